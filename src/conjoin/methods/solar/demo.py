"""`conjoin demo --recipe solar`: stage 1, mining and stage 2 on the embedded sample."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from conjoin.data import load_emoji, load_training_pairs
from conjoin.evaluation import Figure, Results, picture
from conjoin.evaluation.benchmarks.emoji import evaluate_emoji_triplets
from conjoin.hub import load_model
from conjoin.retrieval import ItemEncoder, Miner, mine_hard_negatives
from conjoin.training import RetrievalTrainer, load_recipe, recipe_folder, train

from .explain.charts import MODALITIES, last_thresholds, threshold_course
from .explain.constructed import construct_masked
from .explain.pair import draw_explanation, explain_pair

TITLE = "SOLAR on pictures and words"
SUMMARY = (
    "A small joint image-text encoder on two frozen towers, trained without labels in SOLAR's two stages on pictures "
    "of emoji by two artists and their names. Stage 1 separates what image and text share from what they do not. "
    "Stage 2 embeds both together, with samples constructed from the shared part and mined hard negatives. Measured "
    "on {test} concepts that are in no training split."
)
FIGURES_NOTE = (
    "Test pairs, drawn at random, as the model of stage 1 sees them: patches that are like the text, segments, and "
    "the samples that stage 2 constructs."
)
MINED_VIEWS = (("both", "fused"), ("pictures", "image"), ("names", "text"))
"""Each miner's name, and the view of the stage-1 model that it compares."""


def train_both_stages(
    out: Path, overrides: Mapping[str, str], say: Callable[[str], None]
) -> tuple[RetrievalTrainer, Callable[[Results], None]]:
    """Train stage 1, mine hard negatives, train stage 2, and save the model to `out / "model"`.

    Args:
        out: Folder of the demo.
        overrides: Overrides of both recipes.
        say: Announces a step.

    Returns:
        The trainer of stage 2, and a function that adds the results, thresholds and pictures of stage 1 to the demo.
    """
    recipes, stage1, mined = recipe_folder(), out / "stage1", out / "mined"
    first_changes = {**overrides, "training.output_dir": str(stage1)}
    first = train(load_recipe(recipes / "solar/sample_stage1.yaml", first_changes), overwrite=True)
    say("     Mining hard negatives")
    shutil.rmtree(mined, ignore_errors=True)  # may be from another model
    mine_hard_negatives(
        load_training_pairs("emoji"),
        [Miner(name, str(stage1), view, view) for name, view in MINED_VIEWS],
        mined,
        show_progress=True,
    )
    say("     Stage 2")
    changes = {"model.checkpoint": str(stage1), "data.mined": str(mined), "training.mined_per_anchor": "2"}
    second = train(load_recipe(recipes / "solar/sample_stage2.yaml", changes | dict(overrides)), overwrite=True)

    def add(results: Results) -> None:
        _add_stage1(results, stage1, first.state.log_history, second.args.seed)

    return second, add


def _add_stage1(results: Results, stage1: Path, log: list[dict[str, Any]], seed: int) -> None:
    results.title, results.summary = TITLE, SUMMARY.format(test=results.dataset["test concepts"])
    encoder = ItemEncoder.from_pretrained(str(stage1), batch_size=64)
    before = evaluate_emoji_triplets(encoder, seed=seed, name="after stage 1")
    results.symmetric = [before, *(replace(found, name="after stage 2") for found in results.symmetric)]
    results.curves += [threshold_course(log, modality) for modality in MODALITIES]
    results.figures, results.figures_note = _pictures(stage1, last_thresholds(log), seed), FIGURES_NOTE


def _pictures(stage1: Path, thresholds: Mapping[str, float], seed: int, count: int = 4) -> list[Figure]:
    model, processor = load_model(stage1)
    rows = load_emoji("test")
    figures = []
    for place in np.random.default_rng(seed).choice(len(rows), size=count, replace=False).tolist():
        row = rows[place]
        explanation = explain_pair(model, processor, row["image"], row["text"])
        segments, samples = construct_masked(explanation, thresholds, seed)
        drawn = draw_explanation(
            explanation,
            image_threshold=thresholds["image"],
            text_threshold=thresholds["text"],
            segments=segments,
            samples=samples,
        )
        figures.append(Figure(row["text"], picture(drawn, max(drawn.size))))
    return figures
