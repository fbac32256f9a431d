"""Prepare a run of stage 1: load the un-pruned teacher or its cached states."""

import os
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from conjoin.hub import check_model
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.training import QueryArguments, Run

from .stage1 import PumaStage1Config
from .teacher_states import TeacherStates, cache_teacher_states


@dataclass
class PumaTeacherArguments:
    """The recipe section `teacher`: the un-pruned model; without it, `model.mllm` runs live.

    Args:
        mllm: The un-pruned model; None for `model.mllm`.
        cache: Folder of its states for the training rows. Missing states are computed once; if they exist, the teacher
            is not loaded.
    """

    mllm: str | None = None
    cache: str | None = None


def prepare_stage1(run: Run) -> dict[str, Any]:
    """Return the teacher for the trainer, or nothing without distillation.

    Raises:
        ValueError: The teacher is not named, or a cache is set but the teacher or the rows change in training, or the
            cache is of another teacher or processor.
    """
    training = cast(PumaStage1Config, run.recipe.training)
    if not training.distill_weight:
        return {}
    section: PumaTeacherArguments = run.recipe.sections.get("teacher", PumaTeacherArguments())
    source = section.mllm or run.recipe.model.mllm
    if section.cache is None:
        return {"teacher": _load_teacher(run, source)}
    if cast(QueryArguments, run.recipe.data).format != "nli":
        raise ValueError(
            "teacher: only the rows of format nli are the same in every epoch; others resample a prompt, a positive "
            "or negatives, so the teacher's states cannot be cached: remove teacher.cache"
        )
    if training.teacher == "shared":
        raise ValueError(
            'teacher: the layers that are "shared" change with the student, so their states cannot be cached; set '
            "training.teacher to full, or remove teacher.cache"
        )
    with training.main_process_first(local=False, desc="caching the teacher's states"):
        name = os.path.realpath(source) if source and os.path.isdir(source) else source
        if TeacherStates.is_complete(section.cache):
            states = TeacherStates(section.cache)
            states.check_teacher(name, lambda: _load_teacher(run, source), run.processor)
            return {"teacher": states}
        teacher = _load_teacher(run, source)
        nn.Module.to(teacher, training.device)
        batch_size = training.per_device_eval_batch_size
        states = cache_teacher_states(
            teacher, run.processor, run.rows, section.cache, batch_size=batch_size, name=name
        )
        return {"teacher": states}


def _load_teacher(run: Run, source: str | None) -> MllmRetrieverModel:
    """Load the un-pruned model with the student's readout, positions and dtype."""
    if source is None:
        raise ValueError("teacher: name the un-pruned model (model.mllm or teacher.mllm)")
    check_model(source)
    model: PreTrainedModel = run.model
    settings = {"readout": model.config.readout, "position_mode": model.config.position_mode}
    ret_token = run.processor.ret_token or "[RET]"  # type: ignore[attr-defined]
    return MllmRetrieverModel.from_mllm(source, ret_token=ret_token, dtype=model.dtype, **settings)
