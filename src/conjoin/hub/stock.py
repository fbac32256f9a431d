"""A model as an ordinary checkpoint of its backbone's architecture, for programs that run no code of a checkpoint."""

import copy
import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel, ProcessorMixin

from conjoin.hub.save import export, staged
from conjoin.hub.sentence_model import SentenceModel
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.models.score_fusion import ScoreFusionModel
from conjoin.processing import ImageTextProcessor, MllmRetrieverProcessor
from conjoin.processing.sentence_files import (
    MODULES,
    SETTINGS,
    TRANSFORMER,
    sentence_settings,
    write_json_file as write,
)

logger = logging.getLogger(__name__)
PROCESSORS = {
    "internvl": ("InternVLProcessor", "InternVLVideoProcessor"),
    "llava": ("LlavaProcessor", None),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen2_vl": ("Qwen2VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen3_vl": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
}
"""Of each architecture, the class of the processor in transformers, and of its video processor if there is one."""
_VIDEO_KEYS = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
_POOLING_MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
_IDENTITY = "torch.nn.modules.linear.Identity"
_STATES = {"method": "forward", "method_output_name": "last_hidden_state"}


def export_stock(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    folder: str | Path,
    prompts: dict[str, str] | None = None,
    weights: dict[str, Tensor] | None = None,
) -> Path:
    """Save an MLLM retriever, or score fusion over CLIP, as a checkpoint of its backbone's own architecture.

    For score fusion see `export_stock_clip`; what follows is about the MLLM retriever.

    The configuration has the kept layers only. The vector of [RET] is a row of the embedding table: a row that the
    tokenizer does not use, or a new one. There is no head; the configuration ties it to the table. The prompt is
    `chat_template.jinja`; a published embedder keeps its own. Modules of sentence-transformers take the state of the
    last token, cut it to `embedding_dim` and normalise it.

    transformers, sentence-transformers and serving engines load the folder like any other of its architecture. Its
    vectors equal those of `model` to 1e-5 in float32. Two things of the processor are not exported: `max_text_length`
    and the white background of transparent images.

    Args:
        model: The model, with adapters merged.
        processor: Its processor.
        folder: Where to write, as `export` does.
        prompts: Named instructions for sentence-transformers; those of the processor when None.
        weights: The weights of the MLLM retriever, if the model does not hold them whole.

    Raises:
        ValueError: The model is of another kind, or has what no stock checkpoint can have: `position_mode="1d"` with
            Qwen, score fusion of normalised vectors or over another model than CLIP.
    """
    if isinstance(model, ScoreFusionModel) and isinstance(processor, ImageTextProcessor):
        return export_stock_clip(model, processor, folder, prompts)
    if not isinstance(model, MllmRetrieverModel) or not isinstance(processor, MllmRetrieverProcessor):
        raise ValueError(
            f"a stock checkpoint is for the MLLM retriever and for score fusion over CLIP; {type(model).__name__} "
            f"with {type(processor).__name__} is of no architecture of transformers"
        )
    kind = model.config.backbone_config.model_type
    if model.config.position_mode == "1d" and kind.startswith("qwen"):
        raise ValueError(
            f"position_mode='1d' cannot be exported: a stock {kind!r} gives pictures three-dimensional positions, so "
            "other vectors; export it with its code (--format code)"
        )
    if processor.max_text_length is not None:
        logger.warning("max_text_length=%d is not exported: longer texts get other vectors", processor.max_text_length)
    with staged(folder) as staging:
        stock = _stock_model(model, weights or model.state_dict())
        stock.save_pretrained(staging, state_dict=_with_published_names(stock))
        (staging / "generation_config.json").unlink()
        _save_processor(processor, model.config, staging)
        _save_modules(model.config, processor, staging, processor.prompts if prompts is None else prompts)
    return Path(folder)


def save_model(
    model: Any,  # noqa: ANN401 - a SentenceModel is none of transformers
    processor: Any,  # noqa: ANN401 - a SentenceProcessor is none of transformers
    folder: str | Path,
    weights: dict[str, Tensor] | None = None,
) -> Path:
    """Save a published embedder as what it was, a stock checkpoint, and any other model with its code.

    A model of sentence-transformers is saved by the library. An embedder with positions that no stock checkpoint has
    (`position_mode="1d"`) is saved with its code, too.

    Args:
        model: The model, with adapters merged.
        processor: Its processor.
        folder: Where to write.
        weights: The weights, if the model does not hold them whole.

    Raises:
        ValueError: As `export_stock`.
    """
    if isinstance(model, SentenceModel):
        with staged(folder, has_code=True) as staging:
            model.save_pretrained(staging)
        return Path(folder)
    is_embedder = isinstance(processor, MllmRetrieverProcessor) and processor.sentence_files is not None
    if is_embedder and isinstance(model, MllmRetrieverModel) and model.config.position_mode == "mrope":
        return export_stock(model, processor, folder, weights=weights)
    return export(model, processor, folder, weights=weights)


def _stock_model(model: MllmRetrieverModel, weights: dict[str, Tensor]) -> PreTrainedModel:
    """Return the backbone with its final norm, [RET] in its table and a tied head; it shares the weights."""
    state = {name.removeprefix("backbone."): value for name, value in weights.items() if name.startswith("backbone.")}
    state |= {f"language_model.{name}": value for name, value in weights.items() if name.startswith("norm.")}
    name, row = "language_model.embed_tokens.weight", model.config.ret_token_id
    if row is not None:  # the vector of [RET] in its row of the table, which may have too few
        table = state[name]
        state[name] = torch.cat([table, table.new_zeros(max(0, row + 1 - len(table)), table.shape[1])])
        state[name][row] = weights["ret_embedding"].to(table.dtype)
    config = copy.deepcopy(model.config.backbone_config)
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = True
    config.get_text_config().vocab_size = len(state[name])
    if config.model_type == "qwen3_vl":  # transformers always interleaves; vLLM does it only if this says so
        config.text_config.rope_parameters["mrope_interleaved"] = True
    if model.config.embedding_dim is not None:
        config.matryoshka_dimensions = [model.config.embedding_dim]
    with torch.device("meta"):
        stock: Any = AutoModelForImageTextToText.from_config(config)
    stock.base_model.load_state_dict(state, assign=True)
    stock.tie_weights()
    return stock


def _with_published_names(stock: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights; those of a CLIP or SigLIP tower with the names that published checkpoints have."""
    state: dict[str, Tensor] = stock.state_dict()
    if stock.config.vision_config.model_type not in ("clip_vision_model", "siglip_vision_model"):
        return state
    old, new = "vision_tower.", "vision_tower.vision_model."  # newer versions of transformers write without
    return {name if new in name else name.replace(old, new, 1): value for name, value in state.items()}


def export_stock_clip(
    model: ScoreFusionModel, processor: ImageTextProcessor, folder: str | Path, prompts: dict[str, str] | None = None
) -> Path:
    """Save score fusion over CLIP as a CLIP checkpoint, without code.

    The vector of a text is its text features, that of an image its image features, that of both their sum; all are
    normalised at the end. The sum depends only on the ratio of the two weights, `w_t / w_i`, which the text projection
    takes up. The image features are those of the backbone.

    Args:
        model: Score fusion, with adapters merged.
        processor: Its processor.
        folder: Where to write, as `export` does.
        prompts: Named instructions, which are not written: those of the processor when None.

    Raises:
        ValueError: The backbone is not CLIP; or `normalize_inputs` is set, whose sum is not one of features.
    """
    kind = model.config.backbone_config.model_type
    if kind != "clip":
        raise ValueError(f"score fusion over {kind!r} cannot be a stock checkpoint; expected a backbone 'clip'")
    if model.config.normalize_inputs:
        raise ValueError(
            "normalize_inputs=True cannot be exported: both vectors are normalised before their sum, but the features "
            "of a CLIP checkpoint are not"
        )
    given = {name: text for name, text in (prompts or processor.prompts or {}).items() if text}
    if given:
        logger.warning("a CLIP checkpoint has no prompts; put them before the texts: %s", given)
    with staged(folder) as staging:
        backbone = copy.deepcopy(model.backbone)
        with torch.no_grad():
            backbone.text_projection.weight.mul_(model.config.text_weight / model.config.image_weight)
        backbone.save_pretrained(staging)
        tokenizer = copy.deepcopy(processor.tokenizer)
        if processor.max_text_length is not None:
            tokenizer.model_max_length = min(processor.max_text_length, tokenizer.model_max_length)
        _save_parts(tokenizer, processor.image_processor, "CLIPProcessor", staging)
    return Path(folder)


def _save_parts(tokenizer: Any, image_processor: Any, name: str, folder: Path) -> dict[str, Any]:  # noqa: ANN401
    """Write tokenizer and image processor; returns the settings of the latter."""
    tokenizer._set_processor_class(name)
    tokenizer.save_pretrained(folder)
    pixels: dict[str, Any] = image_processor.to_dict() | {"processor_class": name}
    write(folder / "preprocessor_config.json", pixels)
    return pixels


def _save_processor(processor: MllmRetrieverProcessor, config: PreTrainedConfig, folder: Path) -> None:
    """Write the processor as its publisher would: tokenizer, image processor, `chat_template.jinja`."""
    backbone = config.backbone_config
    name, video = PROCESSORS[backbone.model_type]
    tokenizer = copy.deepcopy(processor.tokenizer)
    if processor.max_length is not None:
        tokenizer.model_max_length = min(processor.max_length, tokenizer.model_max_length)
    tokenizer.chat_template = processor.chat_template
    if processor.sentence_files is None:  # the variable that the retriever's processor gives
        ret_token = None if config.readout == "before_token" else processor.ret_token
        tokenizer.chat_template = f"{{%- set ret_token = {json.dumps(ret_token or '')} -%}}\n{processor.chat_template}"
    pixels = _save_parts(tokenizer, processor.image_processor, name, folder)
    settings: dict[str, Any] = {"processor_class": name}  # from which it counts the tokens of a picture
    if backbone.model_type == "internvl":
        settings["image_seq_length"] = processor.tokens_per_picture
    if backbone.model_type == "llava":
        strategy, patch = backbone.vision_feature_select_strategy, backbone.vision_config.patch_size
        patches = (backbone.vision_config.image_size // patch) ** 2
        settings |= {
            "image_token": processor.image_token,
            "patch_size": patch,
            "vision_feature_select_strategy": strategy,
            "num_additional_image_tokens": processor.tokens_per_picture - patches + (strategy == "default"),
        }
    write(folder / "processor_config.json", settings)
    if video is not None:
        taken = {key: pixels[key] for key in _VIDEO_KEYS if pixels.get(key) is not None}
        write(folder / "video_preprocessor_config.json", taken | {"video_processor_type": video})


def _save_modules(
    config: PreTrainedConfig, processor: MllmRetrieverProcessor, folder: Path, prompts: dict[str, str] | None
) -> None:
    """Write the modules of sentence-transformers: all states, the pooled one, its first components, unit length."""
    files = processor.sentence_files
    if files is None:
        is_tiled = config.backbone_config.model_type == "internvl"  # its processor would cut every image into tiles
        crops = {"image": {"crop_to_patches": processor.image_processor.crop_to_patches}} if is_tiled else None
        files = module_files(crops) | {SETTINGS: sentence_settings(prompts)}
    settings = files[SETTINGS] | ({} if processor.sentence_files is None else {"prompts": prompts or {}})
    modules, width = [dict(entry) for entry in files[MODULES]], config.get_text_config().hidden_size
    if config.embedding_dim is not None:
        settings["truncate_dim"] = config.embedding_dim
        if not any(entry["type"].endswith(".Dense") for entry in modules):
            index = next((index for index, entry in enumerate(modules) if entry["type"].endswith(".Normalize")), None)
            dense = {"path": f"{len(modules)}_Dense", "type": "sentence_transformers.models.Dense"}
            modules.insert(len(modules) if index is None else index, dense)
    for index, entry in enumerate(modules):
        entry |= {"idx": index, "name": str(index)}
        (folder / entry["path"]).mkdir(exist_ok=True)
        if entry["type"].endswith(".Dense"):  # keeps the first components
            sizes = {"in_features": width, "out_features": config.embedding_dim, "bias": False}
            write(folder / entry["path"] / "config.json", sizes | {"activation_function": _IDENTITY})
            weights = {"linear.weight": torch.eye(config.embedding_dim, width)}
            save_file(weights, folder / entry["path"] / "model.safetensors")
        elif entry["type"].endswith(".Normalize"):
            write(folder / entry["path"] / "config.json", {})
    for name, content in (files | {MODULES: modules, SETTINGS: settings}).items():
        is_pooling = name.endswith("/config.json") and "word_embedding_dimension" in content
        write(folder / name, content | {"word_embedding_dimension": width} if is_pooling else content)


def module_files(processing: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the files of a `SentenceTransformer` of messages that reads the last token and normalises it, by path.

    Args:
        processing: `processing_kwargs` of the first module.
    """
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    transformer: dict[str, Any] = {
        "transformer_task": "feature-extraction",
        "modality_config": {name: _STATES for name in ("text", "image")}
        | {"message": _STATES | {"format": "structured"}},
        "module_output_name": "token_embeddings",
    }
    if processing:
        transformer["processing_kwargs"] = processing
    flags = {f"pooling_mode_{mode}": mode == "lasttoken" for mode in _POOLING_MODES}
    return {
        MODULES: [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (path, kind) in enumerate(kinds.items())
        ],
        TRANSFORMER: transformer,
        "1_Pooling/config.json": flags | {"word_embedding_dimension": None, "include_prompt": True},
    }
