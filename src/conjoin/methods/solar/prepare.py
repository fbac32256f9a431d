"""Prepare a run: load the teachers of stage 1, and the mined negatives and projection heads of stage 2."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import datasets

from conjoin.data import ImageAugmentation, RowsWithTeacher
from conjoin.retrieval import load_mined
from conjoin.training import CachedFeatures, PairArguments, Run

from .rows import SolarStage2Rows
from .stage1 import HEADS_FILE
from .stage2 import SolarStage2Config
from .teacher_cache import TeacherCache
from .teachers import TeacherCollator, Teachers, TextTeacher, VisionTeacher

logger = logging.getLogger(__name__)


@dataclass
class SolarTeacherArguments:
    """The recipe section `teacher` of stage 1; without it the student's own frozen towers are the teachers.

    Args:
        vision: Id or folder of a vision model (DINOv2 in the paper).
        text: Id or folder of a text model, for token states (BGE-m3-retromae).
        text_global: Text model with the same tokens, for states of whole texts (BGE-m3); None for `text`.
        max_text_length: Maximum text length in tokens of the text teacher; None for its tokenizer's limit.
        cache: Output folder of `conjoin teacher-cache`; None runs the teachers live.
    """

    vision: str
    text: str
    text_global: str | None = None
    max_text_length: int | None = None
    cache: str | None = None

    def load(self) -> Teachers:
        """Load the teachers."""
        return Teachers(
            VisionTeacher.from_pretrained(self.vision),
            TextTeacher.from_pretrained(self.text, self.max_text_length, self.text_global),
        )


@dataclass
class MinedPairArguments(PairArguments):
    """The recipe section `data` of stage 2: pairs with hard negatives.

    Args:
        mined: Output folder of `conjoin mine` for the training rows.
        mined_source: The pairs that were mined, with the columns of `source`; None for the training rows.
    """

    mined: str | None = None
    mined_source: str | None = None


def prepare_stage1(run: Run) -> dict[str, Any]:
    """Return the teachers of the recipe and the collator of their inputs.

    Raises:
        ValueError: The rows are cached features, or the teacher cache is from other teachers or data.
    """
    section: SolarTeacherArguments | None = run.recipe.sections.get("teacher")
    if section is None:
        return {}
    if isinstance(run.train_dataset, CachedFeatures):
        raise ValueError(
            "teacher: cached tower features contain no images for the teachers; remove the features section, or the "
            "teacher section to use the frozen towers as teachers"
        )
    teachers = section.load()
    patch_size = run.model.config.vision_config.patch_size
    collator = TeacherCollator(run.processor, patch_size, teachers)  # type: ignore[arg-type]
    prepared: dict[str, Any] = {"teacher": teachers, "data_collator": collator}
    if section.cache is not None:
        cache = TeacherCache(section.cache)
        cache.check(teachers, collator)
        prepared["train_dataset"] = RowsWithTeacher(run.train_dataset, cache)
    return prepared


def prepare_stage2(run: Run) -> dict[str, Any]:
    """Return the projection heads of stage 1, and rows with mined negatives or augmented versions.

    Raises:
        ValueError: The recipe needs mined negatives and names none, or the rows are a stream.
    """
    training, data = cast(SolarStage2Config, run.recipe.training), cast(MinedPairArguments, run.recipe.data)
    prepared: dict[str, Any] = {}
    folder = Path(run.recipe.model.checkpoint or "")
    if training.itc_weight and run.recipe.model.checkpoint and (folder / HEADS_FILE).is_file():
        prepared["heads"] = folder
    elif training.itc_weight:
        logger.warning("no %s in %r: the Mixed variant starts with new projection heads", HEADS_FILE, str(folder))
    if training.mined_per_anchor and data.mined is None:
        raise ValueError(
            f"data: mined_per_anchor={training.mined_per_anchor} needs data.mined, the output of `conjoin mine`; "
            "set training.mined_per_anchor to 0 to train without mined negatives"
        )
    augmented = training.positive == "augmented"
    if not training.mined_per_anchor and not augmented:
        return prepared
    if not isinstance(run.rows, datasets.Dataset):
        raise ValueError("data: mined negatives and augmented positives cannot use a stream; set streaming: false")
    uses_candidates = training.mined_per_anchor and data.mined_source is not None
    prepared["train_dataset"] = SolarStage2Rows(
        run.train_dataset,
        run.rows["id"],
        load_mined(data.mined) if training.mined_per_anchor and data.mined else None,
        per_anchor=training.mined_per_anchor,
        augment=ImageAugmentation(training.seed) if augmented else None,
        augmented=augmented,
        seed=training.seed,
        candidates=data.load_rows(data.mined_source, data.split) if uses_candidates and data.mined_source else None,
    )
    return prepared
