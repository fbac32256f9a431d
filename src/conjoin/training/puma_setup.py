"""What a recipe of PUMA needs: a pruned MLLM, queries with candidates, and in stage 1 the un-pruned teacher."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel, ProcessorMixin

from conjoin.data import MbeirTraining, load_nli
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.processing import MllmRetrieverProcessor

from .recipes import DataArguments, DeepTeacherArguments, ModelArguments, Recipe
from .self_distillation import SelfDistillationConfig
from .teacher_states import TeacherStates, cache_teacher_states


def compose_mllm(arguments: ModelArguments) -> tuple[MllmRetrieverModel, MllmRetrieverProcessor]:
    """A new retriever on a pretrained MLLM, of which only the kept layers are read.

    Raises:
        ValueError: No MLLM is named, or a field of `config` is unknown.
    """
    if arguments.mllm is None:
        raise ValueError("model: name the MLLM (mllm) or a checkpoint")
    model = MllmRetrieverModel.from_mllm(arguments.mllm, **arguments.config)
    ret_token = None if model.config.readout == "last" else arguments.config.get("ret_token", "[RET]")
    processor = MllmRetrieverProcessor.from_mllm(
        arguments.mllm,
        min_pixels=arguments.min_pixels,
        max_pixels=arguments.max_pixels,
        max_length=arguments.max_text_length,
        ret_token=ret_token,
        revision=arguments.config.get("revision"),
    )
    return model, processor


def choose_trained(model: MllmRetrieverModel, freeze: bool) -> None:
    """Freeze an MLLM or leave it; train [RET], and then no other token, only if the configuration says so.

    Of a model that was loaded every weight is to be trained, whatever was frozen when it was saved.
    """
    if freeze:
        model.requires_grad_(False)
    model.ret_embedding.requires_grad_(model.config.train_ret_token)
    if model.config.train_ret_token:
        model.get_input_embeddings().requires_grad_(False)


def load_queries(arguments: DataArguments) -> tuple[Any, Any]:
    """Training rows of queries and candidates, and evaluation rows (or None).

    Raises:
        ValueError: Evaluation on M-BEIR is asked for, which is a benchmark of its own.
    """
    evaluates = arguments.eval_source is not None or arguments.eval_split is not None
    if arguments.format == "nli":
        train = load_nli(arguments.source, arguments.columns, arguments.split)
        if not evaluates:
            return train, None
        source, split = arguments.eval_source or arguments.source, arguments.eval_split or arguments.split
        return train, load_nli(source, arguments.columns, split)
    if evaluates:
        raise ValueError(
            "data: M-BEIR is evaluated after training, by `conjoin evaluate --benchmark mbeir`; leave out eval_source "
            "and eval_split"
        )
    rows = MbeirTraining(
        arguments.source,
        datasets=arguments.datasets or None,
        hard_negatives=arguments.hard_negatives,
        instructions=arguments.instructions,
    )
    return rows, None


def puma_arguments(
    recipe: Recipe,
    model: PreTrainedModel,
    processor: ProcessorMixin,
    train: Any,  # noqa: ANN401 - rows of any kind
) -> dict[str, Any]:
    """The arguments of the trainer that only stage 1 of PUMA has: its teacher, live or on disk; none for others.

    Raises:
        ValueError: The teacher is not named, or is to be cached but changes with the student or the rows do.
    """
    training = recipe.training
    if not isinstance(training, SelfDistillationConfig) or not training.distill_weight:
        return {}
    section = recipe.teacher if isinstance(recipe.teacher, DeepTeacherArguments) else DeepTeacherArguments()
    if section.cache is None:
        return {"teacher": _load_teacher(recipe, section, model, processor)}
    if recipe.data.format == "mbeir":
        raise ValueError(
            "teacher: each row of M-BEIR draws its prompt and positive anew, so the teacher's states cannot be "
            "cached: leave out teacher.cache"
        )
    if training.teacher == "shared":
        raise ValueError(
            'teacher: the layers that are "shared" change with the student, so their states cannot be cached; set '
            "training.teacher to full, or leave out teacher.cache"
        )
    with training.main_process_first(desc="caching the teacher's states"):
        if TeacherStates.is_complete(section.cache):
            return {"teacher": TeacherStates(section.cache)}
        teacher = _load_teacher(recipe, section, model, processor)
        nn.Module.to(teacher, training.device)
        batch_size = training.per_device_eval_batch_size
        return {"teacher": cache_teacher_states(teacher, processor, train, section.cache, batch_size=batch_size)}


def _load_teacher(
    recipe: Recipe, section: DeepTeacherArguments, model: PreTrainedModel, processor: ProcessorMixin
) -> MllmRetrieverModel:
    """The un-pruned model, read where and held as the student is."""
    source = section.mllm or recipe.model.mllm
    if source is None:
        raise ValueError("teacher: name the un-pruned model (model.mllm or teacher.mllm)")
    settings = {"readout": model.config.readout, "position_mode": model.config.position_mode}
    ret_token = processor.ret_token or "[RET]"  # type: ignore[attr-defined]
    return MllmRetrieverModel.from_mllm(source, ret_token=ret_token, dtype=model.dtype, **settings)
