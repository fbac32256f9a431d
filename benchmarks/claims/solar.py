"""Does SOLAR improve symmetric image+text retrieval on the emoji sample? Both stages, their ablations, several seeds.

A query is a picture and a name. Its positive is the picture in the other style with the other name. The candidates are
the test triplets and all other pictures in that style. The script reports Precision (against the most confusable
concept), mean Recall@1/5/10, their average Avg, and text → image R@10, which stage 2 alone loses. The result file
keeps finished runs, so an interrupted script resumes. Runs of one seed share stage 1.

    python benchmarks/claims/solar.py --seeds 0 1 2
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import ROOT, Record, Sample, copy_of, embed
from torch import Tensor

from conjoin.data import PairCollator, load_emoji, symmetric_triplets
from conjoin.evaluation import best_ranks, evaluate_symmetric
from conjoin.losses import ContrastiveLoss, GclLoss
from conjoin.methods.contrastive import ContrastiveConfig
from conjoin.methods.solar import (
    SolarStage1Config,
    SolarStage1Trainer,
    SolarStage2Config,
    SolarStage2Rows,
    SolarStage2Trainer,
)
from conjoin.methods.solar.stage1 import ProjectionHeads, align, pair_tokens, threshold_of
from conjoin.models.joint_encoder import JointEncoderModel
from conjoin.retrieval import load_mined
from conjoin.retrieval.mining.negatives import write_mined
from conjoin.training import (
    CachedFeatures,
    LoraArguments,
    Objective,
    RetrievalTrainer,
    add_lora,
    collate_features,
    merge_lora,
)

ROLES = ("query", "positive", "negative")
ITC_ONLY = {"gla_weight": 0.0, "gd_weight": 0.0, "ld_weight": 0.0, "mask": "none"}
STAGE_1: dict[str, dict[str, Any]] = {
    "ITC only": ITC_ONLY,
    "stage 1": {},
    "stage 1, hard mask": {"mask": "hard"},
    "stage 1, no mask": {"mask": "none"},
    "stage 1 without LD": {"ld_weight": 0.0},
    "stage 1, tau of half batches": {"gradient_cache_chunk_size": 64},
}
NO_CN = {"constructed_negatives": False}
MIXED = {"itc_weight": 1.0}
STAGE_2: dict[str, tuple[str, dict[str, Any]]] = {
    "stage 2": ("stage 1", {}),
    "Mixed": ("stage 1", MIXED),
    "Mixed without constructed negatives": ("stage 1", MIXED | NO_CN),
    "stage 2 by LoRA": ("stage 1", {"lora": True}),
    "stage 2 without mined negatives": ("stage 1", {"mined_per_anchor": 0}),
    "stage 2 without constructed negatives": ("stage 1", NO_CN),
    "stage 2, random positives": ("stage 1", NO_CN | {"positive": "random"}),
    "stage 2, augmented positives": ("stage 1", NO_CN | {"positive": "augmented"}),
    "stage 2 without segments": ("stage 1", {"segments": False}),
    "stage 2, towers run": ("stage 1", {"live": True}),  # at every step: slow, and without augmentation
    "stage 2, input-level masks": ("stage 1", {"live": True, "mask_level": "input"}),
    "Mixed, input-level masks": ("stage 1", MIXED | {"live": True, "mask_level": "input"}),
    "stage 2 after ITC only": ("ITC only", {}),
    "stage 2 after hard mask": ("stage 1, hard mask", {}),
    "stage 2 after no mask": ("stage 1, no mask", {}),
    "stage 2 without LD": ("stage 1 without LD", {}),
    "stage 2 after tau of half batches": ("stage 1, tau of half batches", {}),
}
COLUMNS = ["avg", "precision", "mean_recall", "recall@1", "text_to_image@10", "token_auroc", "patch_iou"]


@dataclass
class Features:
    """Cached features of all training and evaluation data."""

    train: Path
    train_ids: list[str]
    train_groups: list[str]
    directions: list[dict[str, CachedFeatures]]
    ids: list[list[tuple[str, ...]]]
    distractors: list[list[CachedFeatures]]
    query: CachedFeatures
    gallery: CachedFeatures
    probe: "Probe"
    processor: Any


@dataclass
class Probe:
    """Test pictures with a text that also names a foreign concept, to test the scores of tokens and patches.

    Args:
        features: The rows.
        own: `(N, T)` 1 for tokens of the depicted concept, 0 for tokens of the foreign one, -1 for others.
        ink: `(N, P)` bool, patches that the drawing covers: at least half of their pixels are not background.
    """

    features: CachedFeatures
    own: Tensor
    ink: Tensor


def load_features(sample: Sample, split: str) -> Features:
    """Compute or read all features; `split` is evaluated."""
    train = load_emoji("train").rename_column("concept", "group")
    directions, ids = [], []
    for styles in (("twemoji", "openmoji"), ("openmoji", "twemoji")):
        found = list(symmetric_triplets(split, query_style=styles[0], positive_style=styles[1]))
        rows = {
            role: [{"image": row[f"{role}_image"], "text": row[f"{role}_text"], "id": row["id"]} for row in found]
            for role in ROLES
        }
        artists = dict(zip(ROLES, (styles[0], styles[1], styles[1]), strict=True))
        ids.append([tuple(f"{row[f'{role}_text']}/{artists[role]}" for role in ROLES) for row in found])
        directions.append(
            {role: CachedFeatures(sample.cache(f"{split} {role} {styles[0]}", rows[role]), True) for role in ROLES}
        )
    test = load_emoji(split)
    parts = {"query": _by(test, "openmoji"), "gallery": _by(test, "twemoji")}
    others = [load_emoji(name) for name in ("train", "validation", "test") if name != split]
    distractors = [
        [
            CachedFeatures(sample.cache(f"distractors {place} {artist} for {split}", _by(rows, artist)), True)
            for place, rows in enumerate(others)
        ]
        for artist in ("openmoji", "twemoji")  # the style of the positives in each direction
    ]
    probe = _probe(sample, split, parts["gallery"])
    return Features(
        train=sample.cache("train", train),
        train_ids=list(train["id"]),
        train_groups=list(train["group"]),
        directions=directions,
        ids=ids,
        distractors=distractors,
        query=CachedFeatures(sample.cache(f"{split} openmoji", parts["query"]), True),
        gallery=CachedFeatures(sample.cache(f"{split} twemoji", parts["gallery"]), True),
        probe=probe,
        processor=sample.processor,
    )


def _by(rows: Any, artist: str) -> Any:  # noqa: ANN401
    """The pictures in one style."""
    rows = rows.rename_column("concept", "group")
    return rows.select([index for index, style in enumerate(rows["style"]) if style == artist])


def _probe(sample: Sample, split: str, rows: Any) -> Probe:  # noqa: ANN401
    names = list(rows["text"])
    foreign = [names[(index + len(names) // 2) % len(names)] for index in range(len(names))]
    probes, spans = [], []
    for index, (row, other) in enumerate(zip(rows, foreign, strict=True)):
        first, second = (row["text"], other) if index % 2 == 0 else (other, row["text"])
        probes.append({"image": row["image"], "text": f"{first}, {second}", "id": row["id"]})
        spans.append((len(first), index % 2 == 0))
    encoded = sample.processor.tokenizer(
        [probe["text"] for probe in probes], return_offsets_mapping=True, return_special_tokens_mask=True, padding=True
    )
    own = torch.full((len(probes), len(encoded["input_ids"][0])), -1)
    for row, (cut, own_first) in enumerate(spans):
        for place, (start, end) in enumerate(encoded["offset_mapping"][row]):
            special = encoded["special_tokens_mask"][row][place]
            if not special and end > start and probes[row]["text"][start] != ",":
                own[row, place] = int((start < cut) == own_first)
    pixels = sample.processor(images=[row["image"] for row in rows])["pixel_values"]
    background = pixels[:, :, :1, :1]
    covered = ((pixels - background).abs().amax(1, keepdim=True) > 0.05).float()
    ink = F.avg_pool2d(covered, sample.encoder.config.vision_config.patch_size).flatten(1) >= 0.5
    return Probe(CachedFeatures(sample.cache(f"{split} probe", probes), True), own, ink)


@torch.inference_mode()
def intersection_quality(model: JointEncoderModel, probe: Probe) -> dict[str, float]:
    """AUROC of token scores (own against foreign), and IoU of the patches above tau with the drawing."""
    batch = collate_features([probe.features[index] for index in range(len(probe.features))])
    model.eval()
    tokens = pair_tokens(model(**batch["pairs"], views=(), output_tokens=True))
    scores = align(tokens)
    width = scores.text.scores.shape[1]
    own = probe.own[:, :width]
    above = below = 0.0
    for row, kinds in zip(scores.text.scores, own, strict=True):
        difference = row[kinds == 1][:, None] - row[kinds == 0]
        above += ((difference > 0).float() + 0.5 * (difference == 0).float()).sum().item()
        below += difference.numel()
    shared = scores.image.scores > threshold_of(scores.image).threshold
    union = (shared | probe.ink).sum(1).clamp(min=1)
    return {"token_auroc": above / below, "patch_iou": ((shared & probe.ink).sum(1) / union).mean().item()}


def measure(vectors: Any, features: Features, seed: int) -> dict[str, float]:  # noqa: ANN401 - features -> (N, D)
    """Symmetric metrics of a function that embeds image and text together: the mean of both directions.

    A pool holds the triplets of one direction only: those of the other are right answers that would count as wrong.
    The interval is the mean of both intervals. It is wider than the interval of all triplets together.
    """
    results = [
        evaluate_symmetric(
            *(vectors(rows[role]) for role in ROLES),
            distractors=[vectors(block) for block in blocks],
            ids=ids,
            resamples=1000,
            seed=seed,
        )
        for rows, ids, blocks in zip(features.directions, features.ids, features.distractors, strict=True)
    ]
    found = {name: np.mean([result.metrics[name].value for result in results]) for name in results[0].metrics}
    for bound in ("low", "high"):
        found[f"avg_{bound}"] = np.mean([vars(result.metrics["average"])[bound] for result in results])
    return {"avg": found.pop("average"), "pool": results[0].pool} | found


def measure_model(model: JointEncoderModel, features: Features, seed: int) -> dict[str, float]:
    """Symmetric metrics, text → image retrieval and the quality of the intersection."""
    found = measure(lambda rows: embed(model, rows, ("fused",))["fused"], features, seed)
    query, gallery = (
        embed(model, features.query, ("text",))["text"],
        embed(model, features.gallery, ("image",))["image"],
    )
    labels = torch.arange(len(query))
    found["text_to_image@10"] = (best_ranks(query, gallery, labels, labels) <= 10).float().mean().item()
    return found | intersection_quality(model, features.probe)


def tower_vectors(rows: CachedFeatures) -> Tensor:
    """Zero-shot score fusion of independent towers: the sum of both cosines."""
    tensors = [rows[index] for index in range(len(rows))]
    image = torch.stack([row["image_features"][0].float() for row in tensors])
    text = torch.stack(
        [
            (row["text_features"][1:].float() * row["attention_mask"][:, None]).sum(0) / row["attention_mask"].sum()
            for row in tensors
        ]
    )
    return torch.cat([F.normalize(image, dim=1), F.normalize(text, dim=1)], dim=1)


def mine(model: JointEncoderModel, features: Features, folder: Path, k: int = 10) -> Path:
    """Mine the union of the top k of the text tower, the vision tower and the model, without the same concept."""
    rows = CachedFeatures(features.train, first_only=True)
    both = tower_vectors(rows)
    width = rows[0]["image_features"].shape[1]
    metrics = {
        "image-image": both[:, :width],
        "text-text": both[:, width:],
        "own": embed(model, rows, ("fused",))["fused"],
    }
    groups = np.array(features.train_groups)
    found: list[dict[str, list[dict[str, Any]]]] = [{} for _ in groups]
    for name, vectors in metrics.items():
        vectors = F.normalize(vectors, dim=1)
        scores = vectors @ vectors.T
        scores[torch.from_numpy(groups[:, None] == groups)] = -2
        scores[scores > 0.9999] = -2  # the same text or picture
        for row, (values, places) in enumerate(zip(*(part.tolist() for part in scores.topk(k)), strict=True)):
            for rank, (value, place) in enumerate(zip(values, places, strict=True), start=1):
                entry = {"miner": name, "rank": rank, "score": value}
                found[row].setdefault(features.train_ids[place], []).append(entry)
    write_mined(
        folder / "negatives.parquet",
        [
            [
                {"id": features.train_ids[row], "negatives": list(negatives), "found_by": list(negatives.values())}
                for row, negatives in enumerate(found)
            ]
        ],
    )
    return folder


def settings_of(sample: Sample, seed: int, steps: int, batch_size: int, rate: float) -> dict[str, Any]:
    """Training arguments of all runs."""
    base = sample.recipe.training
    return {
        "output_dir": "runs/claims",
        "max_steps": steps,
        "per_device_train_batch_size": batch_size,
        "learning_rate": rate,
        "weight_decay": base.weight_decay,
        "warmup_steps": steps // 8,
        "temperature": 0.07,
        "learn_temperature": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": seed,
        "use_cpu": not torch.cuda.is_available(),
    }


def train_baseline(
    model: JointEncoderModel, loss: torch.nn.Module, features: Features, settings: dict[str, Any]
) -> None:
    """Train in place with a baseline objective."""
    views = ("image", "text", "fused") if isinstance(loss, GclLoss) else ("image", "text")
    RetrievalTrainer(
        Objective(model, loss, views),
        ContrastiveConfig(**settings),
        train_dataset=CachedFeatures(features.train, seed=settings["seed"]),
        data_collator=collate_features,
    ).train()


def train_stage_1(
    model: JointEncoderModel, features: Features, settings: dict[str, Any], changes: dict[str, Any]
) -> ProjectionHeads | None:
    """Train in place; returns the projection heads."""
    trainer = SolarStage1Trainer(
        model,
        SolarStage1Config(**(settings | changes)),
        train_dataset=CachedFeatures(features.train, seed=settings["seed"]),
        data_collator=collate_features,
    )
    trainer.train()
    return trainer.objective.heads


def train_stage_2(
    start: JointEncoderModel,
    features: Features,
    settings: dict[str, Any],
    changes: dict[str, Any],
    mined: Path,
    heads: ProjectionHeads | None,
) -> JointEncoderModel:
    """Train a copy: adapters and vision-language encoder fully, or the latter by LoRA as in the paper."""
    model, by_lora = copy_of(start), changes.get("lora", False)
    if by_lora:
        model = add_lora(model, LoraArguments(r=16, alpha=32, towers=("vl_encoder",)))
    fields = {name: value for name, value in changes.items() if name not in ("lora", "live")}
    config = SolarStage2Config(**settings, **fields)
    pairs: Any = CachedFeatures(features.train, seed=settings["seed"])
    collator: Any = collate_features
    if changes.get("live"):  # train on pixels and words
        pairs, collator = load_emoji("train").rename_column("concept", "group"), PairCollator(features.processor)
    rows = SolarStage2Rows(
        pairs,
        features.train_ids,
        load_mined(mined),
        per_anchor=config.mined_per_anchor,
        augmented=config.positive == "augmented",
        seed=settings["seed"],
    )
    trainer = SolarStage2Trainer(model, config, train_dataset=rows, data_collator=collator)
    if heads is not None and trainer.model.heads is not None:
        trainer.model.heads.load_state_dict(heads.state_dict())
    trainer.train()
    return merge_lora(model) if by_lora else model


def run_seed(seed: int, sample: Sample, features: Features, record: Record, args: argparse.Namespace) -> None:
    """Run the missing runs of one seed."""
    wanted = {*(args.only or ["untrained", "CL, score fusion", "GCL", *STAGE_1, *STAGE_2])}

    def missing(name: str) -> bool:
        return name in wanted and not record.has(name, seed)

    def keep(name: str, found: dict[str, float]) -> None:
        record.add(name, seed, **found)
        print(f"{name:40s} seed {seed}  Avg {100 * found['avg']:.1f}", flush=True)

    settings = settings_of(sample, seed, args.steps, args.batch_size, args.rate)
    config = {"token_dropout": args.token_dropout}
    if missing("untrained"):
        keep("untrained", measure_model(sample.new_model(seed, **config), features, seed))
    if missing("CL, score fusion"):
        model = sample.new_model(seed, **config)
        train_baseline(model, ContrastiveLoss(0.07, learn_temperature=False), features, settings)
        keep(
            "CL, score fusion",
            measure(lambda rows: sum(embed(model, rows, ("image", "text")).values()), features, seed),
        )
    if missing("GCL"):
        model = sample.new_model(seed, **config)
        train_baseline(model, GclLoss(0.07, learn_temperature=False), features, settings)
        keep("GCL", measure_model(model, features, seed))
    for first, changes in STAGE_1.items():
        seconds = {name: change for name, (start, change) in STAGE_2.items() if start == first and missing(name)}
        if not missing(first) and not seconds:
            continue
        model = sample.new_model(seed, **config)
        heads = train_stage_1(model, features, settings, changes)
        if missing(first):
            keep(first, measure_model(model, features, seed))
        stage_2 = settings_of(sample, seed, args.steps_2, args.batch_size_2, args.rate_2)
        with tempfile.TemporaryDirectory() as folder:
            mined = mine(model, features, Path(folder)) if seconds else Path(folder)
            for name, change in seconds.items():
                trained = train_stage_2(model, features, stage_2, change, mined, heads)
                keep(name, measure_model(trained, features, seed))


def main() -> None:
    """Run the missing runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--split", choices=["validation", "test"], default="test", help="split to evaluate on")
    parser.add_argument("--steps", type=int, default=120, help="steps of stage 1")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--steps-2", type=int, default=50, help="steps of stage 2")
    parser.add_argument("--batch-size-2", type=int, default=64)
    parser.add_argument("--rate-2", type=float, default=1e-3)
    parser.add_argument("--token-dropout", type=float, default=0.5)
    parser.add_argument("--only", nargs="+", help="names of the runs to run")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/claims/results/solar.json")
    args = parser.parse_args()
    sample = Sample()
    features = load_features(sample, args.split)
    settings = {name: value for name, value in vars(args).items() if name not in ("seeds", "only", "out")}
    record = Record(args.out, settings | {"triplets": sum(len(rows["query"]) for rows in features.directions)})
    if not record.has("towers, score fusion", 0):
        record.add("towers, score fusion", 0, **measure(tower_vectors, features, 0))
    for seed in args.seeds:
        run_seed(seed, sample, features, record, args)
    print(record.table(COLUMNS))


if __name__ == "__main__":
    main()
