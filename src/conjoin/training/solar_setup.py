"""What a recipe of SOLAR needs beside pairs: teachers in stage 1, mined negatives and projection heads in stage 2."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, ProcessorMixin

from conjoin.data import ImageAugmentation
from conjoin.retrieval import load_mined

from .feature_cache import CachedFeatures
from .recipes import Recipe, TeacherArguments
from .solar_stage1 import HEADS_FILE, JointEncoderStage1Config
from .solar_stage2 import JointEncoderStage2Config
from .stage2_rows import Stage2Rows
from .state_shards import TaughtRows
from .teacher_cache import TeacherCache
from .teachers import TeacherCollator, Teachers, TextTeacher, VisionTeacher

logger = logging.getLogger(__name__)


def solar_arguments(
    recipe: Recipe,
    model: PreTrainedModel,
    processor: ProcessorMixin,
    train: Any,  # noqa: ANN401 - rows of any kind
    ids: Sequence[str] | None,
    mined_from: Any = None,  # noqa: ANN401
) -> dict[str, Any]:
    """The arguments of the trainer that only SOLAR has; none for other methods.

    Args:
        recipe: What to run.
        model: The encoder.
        processor: Its processor.
        train: Training rows, or their cached features.
        ids: The ids of the rows; None for a stream.
        mined_from: The pairs that hard negatives were mined from; the training rows when None.

    Raises:
        ValueError: A section of the recipe does not go with its method, or with the data.
    """
    if isinstance(recipe.teacher, TeacherArguments) and recipe.method != "solar_stage1":
        raise ValueError(f"teacher: only solar_stage1 and self_distillation have teachers, not {recipe.method}")
    if (recipe.data.mined or recipe.data.mined_source) is not None and recipe.method != "solar_stage2":
        raise ValueError(f"data: only solar_stage2 uses mined negatives, not {recipe.method}")
    if isinstance(recipe.training, JointEncoderStage1Config) and isinstance(recipe.teacher, TeacherArguments):
        return _taught(recipe.teacher, model, processor, train)
    if isinstance(recipe.training, JointEncoderStage2Config):
        return _stage2(recipe, recipe.training, train, ids, mined_from)
    return {}


def load_teachers(arguments: TeacherArguments) -> Teachers:
    """Load the teachers of a recipe."""
    return Teachers(
        VisionTeacher.from_pretrained(arguments.vision, arguments.vision_hidden_layer),
        TextTeacher.from_pretrained(arguments.text, arguments.max_text_length, arguments.text_global),
    )


def _taught(
    arguments: TeacherArguments,
    model: PreTrainedModel,
    processor: ProcessorMixin,
    train: Any,  # noqa: ANN401
) -> dict[str, Any]:
    if isinstance(train, CachedFeatures):
        raise ValueError(
            "teacher: cached tower features hold no pictures to teach; leave out the features section, or the teacher "
            "section for the frozen towers to teach"
        )
    teachers = load_teachers(arguments)
    collator = TeacherCollator(processor, model.config.vision_config.patch_size, teachers)  # type: ignore[arg-type]
    taught: dict[str, Any] = {"teacher": teachers, "data_collator": collator, "train_dataset": train}
    if arguments.cache is not None:
        cache = TeacherCache(arguments.cache)
        cache.check(teachers, collator)
        taught["train_dataset"] = TaughtRows(train, cache)
    return taught


def _stage2(
    recipe: Recipe,
    training: JointEncoderStage2Config,
    train: Any,  # noqa: ANN401
    ids: Sequence[str] | None,
    mined_from: Any,  # noqa: ANN401
) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    folder = Path(recipe.model.checkpoint or "")
    if training.itc_weight and recipe.model.checkpoint and (folder / HEADS_FILE).is_file():
        arguments["heads"] = folder
    elif training.itc_weight:
        logger.warning("no %s in %r: the Mixed variant starts with new projection heads", HEADS_FILE, str(folder))
    if training.mined_per_anchor and recipe.data.mined is None:
        raise ValueError(
            f"data: mined_per_anchor={training.mined_per_anchor} needs data.mined, the output of `conjoin mine`; "
            "set training.mined_per_anchor to 0 to train without"
        )
    augmented = training.positive == "augmented"
    if training.mined_per_anchor or augmented:
        if ids is None:
            raise ValueError("data: mined negatives and augmented positives cannot use a stream; set streaming: false")
        arguments["train_dataset"] = Stage2Rows(
            train,
            ids,
            load_mined(recipe.data.mined) if training.mined_per_anchor and recipe.data.mined else None,
            per_anchor=training.mined_per_anchor,
            augment=ImageAugmentation(training.seed) if augmented else None,
            augmented=augmented,
            seed=training.seed,
            candidates=mined_from if training.mined_per_anchor else None,
        )
    return arguments
