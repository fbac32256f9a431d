"""`conjoin demo` on the emoji sample: train, encode, search and evaluate."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

from conjoin.evaluation import (
    CellScores,
    Curve,
    EvaluateOptions,
    Example,
    Headline,
    Results,
    Shown,
    evaluate_cells,
    make_report,
    picture,
)
from conjoin.evaluation.tasks.emoji import TASK, EmojiOptions, emoji_cells, emoji_rows
from conjoin.retrieval import ItemEncoder, encode_collection, load_encoder
from conjoin.retrieval.collection import check_place
from conjoin.trainers import RetrievalTrainer, load_recipe, recipe_folder, train

from .baseline import DEMO, DIRECTIONS, compare_models

TITLE = "Pictures and words in one space"
SUMMARY = (
    "A small model on two frozen towers, trained for {steps} steps on pictures of emoji by two artists and their "
    "names. All scores are on {test} concepts that are in no training split. The gallery holds one "
    "artist's picture of each; queries are names, the other artist's pictures, or both."
)
_THUMBNAIL = 128
NAMES = {"image": "image", "text": "text", "image+text": "image + text"}


def run_sample(
    out: Path, flags: Sequence[str], say: Callable[[str], None], recipe: str | None = None, joint_encoder: bool = False
) -> Results:
    """Train a model on the sample, and encode, search and evaluate a held-out gallery.

    Args:
        out: Folder of the demo: `model`, `gallery` (a collection), `pictures`, `evaluation`.
        flags: Replace values of the recipe, such as `["--max_steps", "100"]`.
        say: Announces a step.
        recipe: A recipe (default: the sample's).
        joint_encoder: Also compare with a joint encoder on the same towers.

    Raises:
        ValueError: A folder of collections holds something else; and as training.
    """
    made = [out / "gallery", *(out / "evaluation" / "collections").glob("[!.]*")]
    for folder in made:
        check_place(folder)
    model = str(out / "model")
    say("1/4  Data and training")
    loaded = load_recipe(recipe or recipe_folder() / DEMO, ["--output_dir", model, "--overwrite", *flags])
    trainer = train(loaded)
    seed = trainer.args.seed

    say("2/4  Encoding and evaluating the held-out gallery")
    encoder = load_encoder(
        model, batch_size=64, device=trainer.args.device, dtype=torch.bfloat16 if trainer.args.bf16 else None
    )
    for folder in made:  # vectors of an earlier model
        shutil.rmtree(folder, ignore_errors=True)
    options = EvaluateOptions(ks=TASK.ks, seed=seed, show_progress=True, baselines=False)
    rows, cells = emoji_rows(EmojiOptions()), emoji_cells(EmojiOptions())
    scores = evaluate_cells(encoder, cells, out / "evaluation", options)

    say("3/4  Searching")
    _encode_gallery(encoder, rows[1], out)
    examples = _examples(scores, rows[1], seed)

    say("4/4  Results")
    results = _results(trainer, scores, examples)
    if recipe is None:
        folder = out / "baselines"
        results.tables.append(compare_models(trainer, encoder.processor, rows, results, flags, folder, joint_encoder))
    return results


def _encode_gallery(encoder: ItemEncoder, gallery: datasets.Dataset, out: Path) -> None:
    """Encode the gallery into a collection to search, with its pictures as files and its names."""
    folder = (out / "pictures").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for row in gallery:
        path = folder / (row["id"].replace("/", "-") + ".png")
        row["image"].save(path)
        rows.append({"id": row["id"], "image": str(path), "metadata": {"text": row["text"]}})
    encode_collection(rows, encoder, out / "gallery", keep_pictures=_THUMBNAIL)


def _examples(scores: Sequence[CellScores], candidates: datasets.Dataset, seed: int) -> list[Example]:
    """Nine searches drawn at random: three each by text, by picture and by both."""
    generator = np.random.default_rng(seed)
    gallery = {f"image/{row['id']}": row for row in candidates}
    by_name, examples = {each.cell.name: each for each in scores}, []

    def show(id_: str) -> Shown:
        return Shown(gallery[id_]["text"], picture(gallery[id_]["image"]))

    for modality, name in NAMES.items():
        search = by_name[f"local {modality} → image"]
        chosen = generator.choice(len(candidates), size=3, replace=False).tolist()
        examples += search.examples([search.ids[row] for row in chosen], f"{name} → image", show)
    return examples


def _results(trainer: RetrievalTrainer, scores: Sequence[CellScores], examples: list[Example]) -> Results:
    log = trainer.state.log_history
    losses = [[entry["step"], entry["loss"]] for entry in log if "loss" in entry]
    validation = {
        f"{query} → {candidate}": [[entry["step"], 100 * entry[key]] for entry in log if key in entry]
        for query, candidate, key in (
            ("text", "image", "eval_text_to_image_hit_rate@10"),
            ("image", "text", "eval_image_to_text_hit_rate@10"),
        )
    }
    model = trainer.encoder
    test = len(scores[0].ids)
    results = make_report(TASK, scores)
    results.title, results.summary = TITLE, SUMMARY.format(steps=trainer.state.max_steps, test=test)
    results.model = {
        "architecture": type(model).__name__,
        "parameters": sum(each.numel() for each in model.parameters()),
        "trained parameters": sum(each.numel() for each in model.parameters() if each.requires_grad),
        "dimension": model.config.hidden_size,
    }
    results.dataset = {
        "name": "emoji sample: Twemoji (CC BY 4.0), OpenMoji (CC BY-SA 4.0), names of the emoji package",
        "test concepts": test,
        "gallery": "Twemoji pictures",
        "queries": "English names, OpenMoji pictures",
    }
    results.config = {
        "steps": trainer.state.max_steps,
        "batch size": trainer.args.per_device_train_batch_size,
        "learning rate": trainer.args.learning_rate,
    }
    validated: Any = trainer.eval_dataset
    searched = f"Validation R@10 among {len(validated):,} pictures, %"
    results.curves = [Curve("Training loss", {"training": losses}), Curve(searched, validation)]
    results.examples = examples
    results.examples_note = f"Drawn at random with seed {trainer.args.seed}, not chosen."
    notes = ("names, unseen concepts", "across two artists", "across artists", "other names")
    results.headline = [
        Headline(name, results.metrics(f"local {query} → {candidate}")[metric], note)
        for (name, (query, candidate, metric)), note in zip(DIRECTIONS.items(), notes, strict=True)
    ]
    return results
