"""What `conjoin demo --recipe solar` does beside the demo: both stages of SOLAR, mining between them, and pictures."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conjoin.evaluation import Figure, Results
    from conjoin.training import RetrievalTrainer

TITLE = "SOLAR on pictures and words"
SUMMARY = (
    "A small joint image-text encoder on two frozen towers, trained without labels in SOLAR's two stages on pictures "
    "of emoji by two artists and their names: first to tell what an image and a text share, then to embed both "
    "together, by samples that are constructed from what they share and hard negatives mined in between. Measured on "
    "{test} concepts that it never saw."
)
FIGURES_NOTE = (
    "Test pairs, drawn at random, as the model of stage 1 sees them: patches that are like the text, segments, and "
    "the samples that stage 2 constructs."
)
METRICS = (("both", "fused"), ("pictures", "image"), ("names", "text"))
"""What the mined negatives are similar in: name and view of the stage-1 model."""


@dataclass
class SolarRun:
    """What is left of both stages.

    Args:
        trainer: Of stage 2.
        stage1: Folder of the stage-1 model.
        log: Of stage 1.
    """

    trainer: "RetrievalTrainer"
    stage1: Path
    log: list[dict[str, Any]]


def train_solar(out: Path, recipes: Path, overrides: Mapping[str, str], say: Callable[[str], None]) -> SolarRun:
    """Train stage 1, mine, and train stage 2 to `out / "model"`.

    Args:
        out: Folder of the demo.
        recipes: Where the recipes are.
        overrides: For both stages.
        say: Announces a step.
    """
    from conjoin.data import load_emoji
    from conjoin.retrieval import MiningMetric, mine_hard_negatives
    from conjoin.training import load_recipe, train

    stage1, mined = out / "stage1", out / "mined"
    first = train(load_recipe(recipes / "solar/sample_stage1.yaml", {**overrides, "training.output_dir": str(stage1)}))
    say("     Mining hard negatives")
    shutil.rmtree(mined, ignore_errors=True)  # another model's
    mine_hard_negatives(
        load_emoji("train").rename_column("concept", "group"),
        [MiningMetric(name, str(stage1), view, view) for name, view in METRICS],
        mined,
        show_progress=True,
    )
    say("     Stage 2")
    changes = {"model.checkpoint": str(stage1), "data.mined": str(mined), "training.mined_per_anchor": "2"}
    second = train(load_recipe(recipes / "solar/sample_stage2.yaml", changes | dict(overrides)))
    return SolarRun(second, stage1, first.state.log_history)


def add_solar(results: "Results", run: SolarRun, seed: int) -> None:
    """Put into the demo's results what is SOLAR's: stage 1 beside stage 2, thresholds over training, pictures."""
    from conjoin.evaluation.emoji_benchmark import evaluate_emoji_triplets
    from conjoin.evaluation.score_charts import MODALITIES, threshold_course
    from conjoin.retrieval import ItemEncoder

    results.title, results.summary = TITLE, SUMMARY.format(test=results.dataset["test concepts"])
    encoder = ItemEncoder.from_pretrained(str(run.stage1), batch_size=64)
    before = evaluate_emoji_triplets(encoder, seed=seed, name="after stage 1")
    results.symmetric = [before, *(replace(found, name="after stage 2") for found in results.symmetric)]
    results.curves += [threshold_course(run.log, modality) for modality in MODALITIES]
    results.figures, results.figures_note = _pictures(run, seed), FIGURES_NOTE


def _pictures(run: SolarRun, seed: int, count: int = 4) -> "list[Figure]":
    import numpy as np
    from transformers import AutoModel, AutoProcessor

    from conjoin.data import load_emoji
    from conjoin.evaluation import Figure, draw_explanation, explain_pair, picture
    from conjoin.evaluation.score_charts import last_thresholds

    from .explain import constructed

    model = AutoModel.from_pretrained(run.stage1, trust_remote_code=True).eval()
    processor = AutoProcessor.from_pretrained(run.stage1, trust_remote_code=True)
    rows, thresholds = load_emoji("test"), last_thresholds(run.log)
    figures = []
    for place in np.random.default_rng(seed).choice(len(rows), size=count, replace=False).tolist():
        row = rows[place]
        explanation = explain_pair(model, processor, row["image"], row["text"])
        segments, samples = constructed(explanation, thresholds, seed)
        drawn = draw_explanation(
            explanation,
            image_threshold=thresholds["image"],
            text_threshold=thresholds["text"],
            segments=segments,
            samples=samples,
        )
        figures.append(Figure(row["text"], picture(drawn, max(drawn.size))))
    return figures
