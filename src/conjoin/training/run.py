"""From a recipe to a trained model on disk."""

import json
import time
from collections.abc import Callable, Sized
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.utils.data import Dataset
from transformers import AutoModel, AutoProcessor, PreTrainedModel, ProcessorMixin

from conjoin.data import (
    ImageAugmentation,
    load_emoji,
    load_pairs,
    load_sample_text_tower,
    load_sample_vision_tower,
    sample_image_processor,
)
from conjoin.models.joint_encoder import JointEncoderModel
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.models.score_fusion import ScoreFusionModel
from conjoin.models.token_fusion import TokenFusionModel
from conjoin.processing import ImageTextProcessor

from .arguments import RetrievalConfig
from .digests import processor_digest, rows_digest, text_digest, weights_digest
from .feature_cache import CachedFeatures, cache_features, collate_features
from .lora import add_lora
from .puma_setup import choose_trained, compose_mllm, load_queries, puma_arguments
from .query_candidates import QueryCandidateConfig
from .recipes import METHODS, DataArguments, FeatureArguments, ModelArguments, Recipe
from .solar_setup import solar_arguments
from .trainer import RetrievalTrainer

COMPOSED: dict[str, Any] = {"joint_encoder": JointEncoderModel, "token_fusion": TokenFusionModel}
"""Architectures made of any vision tower and any text tower."""


def build_model(arguments: ModelArguments) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Load or compose the model of a recipe and its processor.

    Raises:
        ValueError: No towers are named, or an unknown architecture.
    """
    if arguments.checkpoint is not None:
        model = AutoModel.from_pretrained(arguments.checkpoint, trust_remote_code=True)
        processor = AutoProcessor.from_pretrained(arguments.checkpoint, trust_remote_code=True)
    else:
        model, processor = _compose(arguments)
    if isinstance(model, MllmRetrieverModel):
        choose_trained(model, arguments.freeze_towers)
    elif arguments.freeze_towers:
        for name in ("vision_model", "text_model"):
            model.get_submodule(name).requires_grad_(False)
    if arguments.lora is not None:
        add_lora(model, arguments.lora)
    return model, processor


def build_trainer(recipe: Recipe, model: PreTrainedModel, processor: ProcessorMixin) -> RetrievalTrainer:
    """Load the data of a recipe and make its trainer, caching tower features first if the recipe says so."""
    is_pairs = not isinstance(recipe.training, QueryCandidateConfig)
    formats = ("pairs",) if is_pairs else ("nli", "mbeir")
    if recipe.data.format not in formats:
        raise ValueError(f"data: {recipe.method} needs format {' or '.join(formats)}, not {recipe.data.format!r}")
    train, evaluation = _load_data(recipe.data) if is_pairs else load_queries(recipe.data)
    collator = None
    ids = train["id"] if isinstance(train, datasets.Dataset) else None
    if recipe.features is not None:
        train, evaluation = _with_features(recipe.features, model, processor, train, evaluation, recipe.training)
        collator = collate_features
    rows_per_step = recipe.training.per_device_train_batch_size * recipe.training.world_size
    if isinstance(train, Sized) and len(train) < rows_per_step:
        raise ValueError(
            f"a batch of {rows_per_step} rows (per_device_train_batch_size times devices) is larger than the training "
            f"data of {len(train)}: no step could be made"
        )
    make_trainer: Callable[..., RetrievalTrainer] = METHODS[recipe.method][1]
    arguments = {"train_dataset": train, "eval_dataset": evaluation, "data_collator": collator}
    candidates = recipe.data.mined_source
    mined_from = (
        None if candidates is None else _load_rows(recipe.data, candidates, recipe.data.split, streaming=False)
    )
    arguments |= solar_arguments(recipe, model, processor, train, ids, mined_from)
    arguments |= puma_arguments(recipe, model, processor, train)
    return make_trainer(model, recipe.training, processing_class=processor, **arguments)


def train(recipe: Recipe, resume: bool = False) -> RetrievalTrainer:
    """Run a recipe: `output_dir` then holds the model, its processor, and `recipe.json`.

    Args:
        recipe: What to run.
        resume: Go on from the last checkpoint in `output_dir`.
    """
    torch.manual_seed(recipe.training.seed)
    model, processor = build_model(recipe.model)
    trainer = build_trainer(recipe, model, processor)
    trainer.train(resume_from_checkpoint=resume or None)
    trainer.save_model()
    if trainer.args.should_save:
        folder = Path(str(trainer.args.output_dir))
        record: dict[str, Any] = {"method": recipe.method, "model": asdict(recipe.model), "data": asdict(recipe.data)}
        optional = {"features": recipe.features, "teacher": recipe.teacher}
        record |= {name: asdict(section) for name, section in optional.items() if section is not None}
        record |= {"training": recipe.training.to_sanitized_dict(), "log": trainer.state.log_history}
        (folder / "recipe.json").write_text(json.dumps(record, indent=2, default=str) + "\n", encoding="utf-8")
    return trainer


def fastest_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where a matrix product in it is measured to be faster than in float32, else float32."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.randn(512, 512, device=device).to(dtype)
        for repeats in (2, 20):  # of which the latter are timed
            start = time.perf_counter()
            for _ in range(repeats):
                product = matrix @ matrix
            product.float().sum().item()
        seconds[dtype] = time.perf_counter() - start
    return torch.bfloat16 if seconds[torch.bfloat16] < 0.8 * seconds[torch.float32] else torch.float32


def _compose(arguments: ModelArguments) -> tuple[PreTrainedModel, ProcessorMixin]:
    """A new model on pretrained towers, or on an MLLM, by architecture."""
    if arguments.architecture == "mllm_retriever":
        return compose_mllm(arguments)
    if arguments.vision is None or arguments.text is None:
        raise ValueError("model: name both towers (vision, text) or a checkpoint")
    if arguments.architecture == "score_fusion":
        if arguments.vision != arguments.text:
            raise ValueError("model: score_fusion takes both towers from one checkpoint; make vision and text equal")
        model: PreTrainedModel = ScoreFusionModel.from_clip(arguments.vision, **arguments.config)
        return model, _processor(arguments)
    if arguments.architecture not in COMPOSED:
        raise ValueError(
            f"model: unknown architecture {arguments.architecture!r}; "
            f"expected one of {[*COMPOSED, 'score_fusion', 'mllm_retriever']}"
        )
    vision = load_sample_vision_tower() if arguments.vision == "sample" else arguments.vision
    text = load_sample_text_tower()[0] if arguments.text == "sample" else arguments.text
    return COMPOSED[arguments.architecture].from_backbones(vision, text, **arguments.config), _processor(arguments)


def _processor(arguments: ModelArguments) -> ImageTextProcessor:
    sample = {"vision": arguments.vision == "sample", "text": arguments.text == "sample"}
    image_processor = sample_image_processor(arguments.image_size) if sample["vision"] else None
    tokenizer = load_sample_text_tower()[1] if sample["text"] else None
    return ImageTextProcessor.from_backbones(
        image_processor or str(arguments.vision),
        tokenizer or str(arguments.text),
        max_text_length=arguments.max_text_length,
    )


def _load_data(arguments: DataArguments) -> tuple[Any, Any]:
    """Training rows and evaluation rows (or None)."""
    train_rows = _load_rows(arguments, arguments.source, arguments.split, arguments.streaming)
    if arguments.eval_source is None and arguments.eval_split is None:
        return train_rows, None
    source, split = arguments.eval_source or arguments.source, arguments.eval_split or arguments.split
    return train_rows, _load_rows(arguments, source, split, streaming=False)


def _load_rows(arguments: DataArguments, source: str, split: str, streaming: bool) -> Any:  # noqa: ANN401
    if source == "emoji":
        return load_emoji(split).rename_column("concept", "group")
    return load_pairs(
        source,
        image_column=arguments.image_column,
        text_column=arguments.text_column,
        id_column=arguments.id_column,
        split=split,
        streaming=streaming,
    )


def _with_features(
    arguments: FeatureArguments,
    model: PreTrainedModel,
    processor: ProcessorMixin,
    train_rows: Any,  # noqa: ANN401
    eval_rows: Any,  # noqa: ANN401
    training: RetrievalConfig,
) -> tuple[Dataset[Any], Dataset[Any] | None]:
    """Replace rows by the features of the frozen towers, computed once.

    Raises:
        ValueError: A tower is being trained, so its features would change; or the rows are a stream.
    """
    if not isinstance(model, JointEncoderModel):
        raise ValueError(f"features: only a joint encoder takes cached features, not {type(model).__name__}")
    towers = {name: model.get_submodule(name) for name in ("vision_model", "text_model")}
    for name, tower in towers.items():
        if any(parameter.requires_grad for parameter in tower.parameters()):
            raise ValueError(f"features: {name} is being trained; set model.freeze_towers, or leave out the cache")
    nn.Module.to(model, training.device)  # the trainer would move it only later
    bf16 = fastest_dtype(training.device) == torch.bfloat16 if arguments.bf16 is None else arguments.bf16
    bf16 = broadcast_object_list([bf16])[0]  # as the first process measured it
    settings = asdict(arguments) | {"folder": None, "batch_size": None, "bf16": bf16}
    key = json.dumps([weights_digest(model, ("vision_model.", "text_model.")), processor_digest(processor), settings])
    cached: list[Dataset[Any]] = []
    for name, rows in (("train", train_rows), ("eval", eval_rows)):
        if rows is None:
            continue
        if not isinstance(rows, datasets.Dataset):
            raise ValueError("features: a stream cannot be cached; set data.streaming: false, or leave out the cache")
        augment = ImageAugmentation(arguments.seed) if arguments.augment and name == "train" else None
        with training.main_process_first(desc="caching features"):
            folder = cache_features(
                model,
                processor,
                rows,
                Path(arguments.folder) / name,
                augment=augment,
                copies=arguments.copies if name == "train" else 1,
                batch_size=arguments.batch_size,
                dtype=torch.bfloat16 if bf16 else torch.float32,
                key=text_digest(f"{key}{rows_digest(rows)}"),
            )
        cached.append(CachedFeatures(folder, first_only=name == "eval", seed=training.seed))
    return cached[0], cached[1] if len(cached) > 1 else None
