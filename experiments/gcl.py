"""Does GCL beat plain contrastive learning on the emoji sample? Same model, data and steps, several seeds.

The script trains the demo's joint encoder on cached tower features with each objective. Then it ranks one mixed
gallery of image, text and image+text candidates for nine combinations of query and candidate modality, on unseen
concepts. "CL + triplets" is the paper's baseline of composed queries: it also learns from a picture and an edit ("but
with dark skin tone") whose target is the edited picture. The result file keeps finished runs, so an interrupted script
resumes. The plot of the modalities is drawn if one call runs "untrained", "CL" and "GCL" for the first seed. The rows
"GCL without a→b" of the stored results left out one of the six terms, which gained nothing; the last commit that runs
them is 28f18ad.

    python experiments/gcl.py --steps 150 --seeds 0 1 2
"""

import argparse
import json
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from emoji_edits import edit_triplets
from torch import Tensor
from transformers.utils import logging

import conjoin
from conjoin import JointEncoderModel
from conjoin.data import EpochRows, load_emoji
from conjoin.evaluation import best_ranks
from conjoin.losses import ContrastiveLoss, GclLoss, info_nce
from conjoin.trainers import CachedFeatures, RetrievalTrainer, collate_features, load_recipe

ROOT = Path(__file__).parents[1]
MODALITIES = {"image": "image", "text": "text", "image,text": "fused"}
KS = (1, 10, 50)


class Separation(GclLoss):
    """The paper's intra-modality separation: image-text pairs, with same-modality negatives in the denominators."""

    def forward(self, image: Tensor, text: Tensor, ids: Tensor | None = None) -> dict[str, Tensor]:
        """The terms of `GclLoss` with no fused embedding present."""
        present = torch.tensor([True, True, False], device=image.device).expand(len(image), 3)
        return super().forward(image=image, text=text, fused=image, ids=ids, present=present)


class WithEdits(EpochRows):
    """Pairs, each with a random composed query: the reference picture, the edit and the target picture."""

    def __init__(self, pairs: CachedFeatures, queries: CachedFeatures, targets: CachedFeatures, seed: int) -> None:
        super().__init__(pairs, seed)
        self.queries, self.targets = queries, targets

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        edit = int(np.random.default_rng((self.seed, self.epoch, index, 1)).integers(len(self.queries)))
        query = {f"query_{name}": value for name, value in self.queries[edit].items()}
        return self.rows[index] | query | {"target_features": self.targets[edit]["image_features"]}


def collate_edits(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Collate the rows of `WithEdits` into the parts `pairs`, `queries` and `targets`, with `target_ids`."""
    batch = collate_features(
        [{k: v for k, v in row.items() if not k.startswith(("query_", "target_"))} for row in rows]
    )
    queries = collate_features(
        [{k.removeprefix("query_"): v for k, v in row.items() if k.startswith("query_")} for row in rows]
    )
    targets = {"image_features": torch.stack([row["target_features"] for row in rows])}
    return batch | {"queries": queries["pairs"], "target_ids": queries["ids"], "targets": targets}


class EditTrainer(RetrievalTrainer):
    """Symmetric InfoNCE over the pairs and InfoNCE from each composed query to its target."""

    def embed(self, model: JointEncoderModel, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """The embeddings of the pairs, the composed queries and their targets."""
        others = {part: model(**inputs[part]).pooler_output for part in ("queries", "targets")}
        return super().embed(model, inputs) | others

    def loss_terms(self, embeddings: dict[str, Tensor], inputs: dict[str, Any]) -> dict[str, Tensor]:
        """The terms of the pairs, and `edit_loss`."""
        composed, found = embeddings.pop("queries"), embeddings.pop("targets")
        # several edits can have the same target: these copies are not negatives
        edit_loss = info_nce(composed, found, self.loss.temperature(), candidate_ids=inputs["target_ids"])
        return super().loss_terms(embeddings, inputs) | {"edit_loss": edit_loss}


class ThreeViews(RetrievalTrainer):
    """Embeds image, text and both."""

    views = ("image", "text", "fused")


FIXED = {"temperature": 0.07, "learn_temperature": False}
OBJECTIVES = {
    "CL": (RetrievalTrainer, ContrastiveLoss),
    "CL + triplets": (EditTrainer, ContrastiveLoss),
    "intra-modality separation": (RetrievalTrainer, Separation),
    "GCL": (ThreeViews, GclLoss),
}
"""The trainer and the loss of each objective."""


@torch.inference_mode()
def embed(model: JointEncoderModel, features: CachedFeatures) -> dict[str, Tensor]:
    """Embeddings of every row in the three views."""
    model.eval()
    batch = collate_features([features[index] for index in range(len(features))])["pairs"]
    parts = [
        model(**{name: value[start : start + 128] for name, value in batch.items()}, views=tuple(MODALITIES.values()))
        for start in range(0, len(features), 128)
    ]
    views = [part.embeddings.chunk(3) for part in parts]
    return {name: torch.cat([view[place] for view in views]) for place, name in enumerate(MODALITIES)}


def measure(model: JointEncoderModel, test: dict[str, CachedFeatures], concepts: list[str], keep: list[bool]) -> dict:
    """Global hit rates, distances between the centroids of the modalities, and the gallery vectors."""
    query, gallery = embed(model, test["query"]), embed(model, test["gallery"])
    numbers, rates = torch.arange(len(concepts)), {}
    pool = torch.cat(list(gallery.values()))
    for place, target in enumerate(gallery):
        labels = torch.full((len(pool),), -1)  # only candidates of this modality are right
        labels[place * len(numbers) : (place + 1) * len(numbers)] = numbers
        for name, vectors in query.items():
            asked = numbers[torch.tensor(keep)] if "text" in name and "text" in target else numbers
            ranks = best_ranks(vectors[asked], pool, asked, labels)
            rates[f"{name} → {target}"] = {k: float((ranks <= k).double().mean()) for k in KS}
    rates["mean"] = {k: float(np.mean([rate[k] for rate in rates.values()])) for k in KS}
    centres = {name: F.normalize(vectors, dim=1).mean(0) for name, vectors in gallery.items()}
    gap = {
        f"{a} – {b}": (centres[a] - centres[b]).norm().item() for a, b in (("image", "text"), ("image", "image,text"))
    }
    return {"hit_rate": rates, "gap": gap, "vectors": gallery}


def draw_pca(panels: dict[str, dict[str, Tensor]], path: Path, size: int = 300) -> None:
    """Plot the three modalities in their first two principal components, one panel per model, as SVG."""
    colours = {"image": "#0b6bb5", "text": "#d1600a", "image,text": "#3a8f3a"}
    marks = []
    for column, (title, views) in enumerate(panels.items()):
        stacked = torch.cat(list(views.values())).double()
        centred = stacked - stacked.mean(0)
        flat = centred @ torch.linalg.svd(centred, full_matrices=False)[2][:2].T
        flat = 0.5 + 0.45 * flat / flat.abs().max()
        left = column * (size + 20)
        marks.append(f'<text x="{left + 8}" y="18" font-size="14">{title}</text>')
        for (name, vectors), start in zip(
            views.items(), range(0, len(flat), len(next(iter(views.values())))), strict=True
        ):
            dots = "".join(
                f"M{left + x * size:.0f} {24 + y * size:.0f}h0" for x, y in flat[start : start + len(vectors)].tolist()
            )
            marks.append(
                f'<path d="{dots}" stroke="{colours[name]}" stroke-width="3" stroke-linecap="round" opacity="0.6"/>'
            )
    legend = "".join(
        f'<text x="{8 + 90 * place}" y="{size + 44}" font-size="13" fill="{colour}">● {name}</text>'
        for place, (name, colour) in enumerate(colours.items())
    )
    width = len(panels) * (size + 20)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{size + 56}" font-family="sans-serif">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(marks)}{legend}</svg>\n',
        encoding="utf-8",
    )


def main() -> None:
    """Run the missing runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", help="names of the objectives to run")
    parser.add_argument("--out", type=Path, default=ROOT / "experiments/results/gcl.json")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    recipe = load_recipe(
        ROOT / "training_args/gcl/sample.yaml", ["--output_dir", "runs/claims", "--feature_copies", "0"]
    )
    encoder, processor = recipe.model.load()
    rows = {"train": load_emoji("train").rename_column("concept", "group")}
    test = load_emoji("test")
    for name, style in (("query", "openmoji"), ("gallery", "twemoji")):
        rows[name] = test.select([i for i, found in enumerate(test["style"]) if found == style])
    concepts = list(rows["query"]["concept"])
    if concepts != list(rows["gallery"]["concept"]):
        raise ValueError("the two styles of the test split are not in the same order")
    keep = [other is not None for other in rows["gallery"]["alternative_text"]]
    other = [a or b for a, b in zip(rows["gallery"]["alternative_text"], rows["gallery"]["text"], strict=True)]
    rows["gallery"] = rows["gallery"].remove_columns(["text", "alternative_text"]).add_column("text", other)
    edits = edit_triplets("train", skin_tones=False)
    rows["edit queries"] = edits.rename_columns(
        {"reference_image": "image", "edit_text": "text", "target_text": "group"}
    )
    rows["edit targets"] = edits.rename_columns({"target_image": "image", "target_text": "text"})

    def features(name: str, seed: int | None = None) -> CachedFeatures:
        options = {"dtype": torch.bfloat16, "first_only": seed is None, "seed": seed or 0}
        return CachedFeatures(encoder, processor, rows[name], f"runs/claims/features/{name}", **options)

    test_features = {name: features(name) for name in ("query", "gallery")}
    record = json.loads(args.out.read_text()) if args.out.exists() else {"runs": []}
    done = {(run["objective"], run["seed"]) for run in record["runs"]}
    pictures: dict[str, dict[str, Tensor]] = {}
    for seed in args.seeds:
        for name in ["untrained", *OBJECTIVES]:
            if (args.only and name not in args.only) or (name, seed) in done:
                continue
            torch.manual_seed(seed)
            model = JointEncoderModel(encoder.config)
            model.vision_model, model.text_model = encoder.vision_model, encoder.text_model
            if name != "untrained":
                config = replace(
                    recipe.training,
                    max_steps=args.steps,
                    per_device_train_batch_size=args.batch_size,
                    seed=seed,
                    eval_strategy="no",
                    logging_strategy="no",
                    disable_tqdm=True,
                )
                train, collator = features("train", seed), collate_features
                if name == "CL + triplets":
                    train = WithEdits(train, features("edit queries"), features("edit targets"), seed)
                    collator = collate_edits
                trainer, loss = OBJECTIVES[name]
                trainer(model, config, train, loss=loss(**FIXED), data_collator=collator).train()
            found = measure(model, test_features, concepts, keep)
            if seed == args.seeds[0] and name in ("untrained", "CL", "GCL"):
                pictures[name] = found["vectors"]
            record["runs"].append(
                {"objective": name, "seed": seed, "hit_rate": found["hit_rate"], "gap": found["gap"]}
            )
            record |= {
                "steps": args.steps,
                "batch_size": args.batch_size,
                "test concepts": len(concepts),
                "versions": {
                    "conjoin": conjoin.__version__,
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                },
            }
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(record, indent=1) + "\n")
            print(f"{name:32s} seed {seed}  mean R@10 {100 * found['hit_rate']['mean'][10]:.1f}", flush=True)
    if len(pictures) > 1:
        draw_pca(pictures, args.out.with_suffix(".svg"))
    print_table(json.loads(args.out.read_text()))


def print_table(record: dict) -> None:
    """Print mean and standard deviation over seeds, in percent."""
    names = list(dict.fromkeys(run["objective"] for run in record["runs"]))
    print(f"\n{'objective':32s} {'R@1':>12s} {'R@10':>12s} {'R@50':>12s} {'gap i–t':>8s} {'gap i–it':>8s}")
    for name in names:
        runs = [run for run in record["runs"] if run["objective"] == name]
        cells = []
        for k in KS:
            values = [100 * run["hit_rate"]["mean"][str(k)] for run in runs]
            cells.append(f"{np.mean(values):6.1f} ± {np.std(values):3.1f}")
        gaps = [np.mean([run["gap"][pair] for run in runs]) for pair in ("image – text", "image – image,text")]
        print(f"{name:32s} {cells[0]:>12s} {cells[1]:>12s} {cells[2]:>12s} {gaps[0]:8.2f} {gaps[1]:8.2f}")


if __name__ == "__main__":
    main()
