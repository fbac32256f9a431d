"""Files beside the weights of a stock checkpoint: its processor, its prompt, its modules of sentence-transformers."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from conjoin.processing import MllmRetrieverProcessor
from conjoin.processing.mllm_prompts import NOUNS
from conjoin.processing.sentence_files import (
    MODULES,
    SETTINGS,
    TRANSFORMER,
    sentence_settings,
    write_json_file as write,
)

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
_STATES = {"method": "forward", "method_output_name": "last_hidden_state"}


def save_processor(processor: MllmRetrieverProcessor, config: PreTrainedConfig, folder: Path) -> None:
    """Write the processor as its publisher would: tokenizer, settings of the image processor, `chat_template.jinja`.

    Args:
        processor: The retriever's processor.
        config: The retriever's configuration.
        folder: Where to write.
    """
    backbone = config.backbone_config
    name, video = PROCESSORS[backbone.model_type]
    tokenizer = copy.deepcopy(processor.tokenizer)
    limits = (processor.max_length, tokenizer.model_max_length)
    tokenizer.model_max_length = min(limit for limit in limits if limit is not None)
    ret_token = None if config.readout == "before_token" else processor.ret_token
    tokenizer.chat_template = processor.chat_template
    if processor.sentence_files is None:
        tokenizer.chat_template = chat_template(processor, _image(processor, backbone.model_type), ret_token)
    tokenizer._set_processor_class(name)
    tokenizer.save_pretrained(folder)
    pixels = processor.image_processor.to_dict() | {"processor_class": name}
    pixels["image_processor_type"] = pixels["image_processor_type"].removesuffix("Pil")
    write(folder / "preprocessor_config.json", pixels)
    write(folder / "processor_config.json", {"processor_class": name} | _settings(processor, backbone))
    if video is not None:
        taken = {key: pixels[key] for key in _VIDEO_KEYS if pixels.get(key) is not None}
        write(folder / "video_preprocessor_config.json", taken | {"video_processor_type": video})


def save_modules(
    config: PreTrainedConfig, processor: MllmRetrieverProcessor, folder: Path, prompts: dict[str, str] | None
) -> None:
    """Write the modules of sentence-transformers: all states, the pooled one, its first components, unit length.

    Args:
        config: The retriever's configuration.
        processor: Its processor; that of a published embedder holds the embedder's own files.
        folder: Where to write.
        prompts: Named instructions.
    """
    files = processor.sentence_files
    if files is None:
        files = module_files("lasttoken", _processing(config.backbone_config.model_type, processor.image_processor))
        files |= {SETTINGS: sentence_settings(prompts)}
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
        if entry["type"].endswith(".Dense"):
            _save_cut(width, config.embedding_dim, folder / entry["path"])
        elif entry["type"].endswith(".Normalize"):
            write(folder / entry["path"] / "config.json", {})
    for name, content in (files | {MODULES: modules, SETTINGS: settings}).items():
        is_pooling = name.endswith("/config.json") and "word_embedding_dimension" in content
        write(folder / name, content | {"word_embedding_dimension": width} if is_pooling else content)


def module_files(pooling: str, processing: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the files of a `SentenceTransformer` of messages with a pooling and a normalisation, by path.

    Args:
        pooling: `"lasttoken"` or `"mean"`.
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
    flags = {f"pooling_mode_{mode}": mode.removesuffix("_tokens") == pooling for mode in _POOLING_MODES}
    return {
        MODULES: [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (path, kind) in enumerate(kinds.items())
        ],
        TRANSFORMER: transformer,
        "1_Pooling/config.json": flags | {"word_embedding_dimension": None, "include_prompt": True},
    }


def _processing(architecture: str, image_processor: Any) -> dict[str, Any]:  # noqa: ANN401
    """Options of the stock processor without which it would prepare other images."""
    if architecture == "internvl":  # its processor would cut every image into tiles
        return {"image": {"crop_to_patches": image_processor.crop_to_patches}}
    return {}


def _save_cut(width: int, dim: int, folder: Path) -> None:
    """Write a linear module that keeps the first `dim` of `width` components."""
    identity = "torch.nn.modules.linear.Identity"
    write(
        folder / "config.json",
        {"in_features": width, "out_features": dim, "bias": False, "activation_function": identity},
    )
    save_file({"linear.weight": torch.eye(dim, width)}, folder / "model.safetensors")


def _image(processor: MllmRetrieverProcessor, architecture: str) -> str:
    """What stands for an image in a prompt. InternVL's processor itself adds the tokens around an image.

    Raises:
        ValueError: The processor has other tokens there.
    """
    before, after = processor.template["image_start"], processor.template["image_end"]
    if architecture == "internvl":
        named = processor.tokenizer.special_tokens_map
        first, last = (str(named.get(f"{name}_image_token")) for name in ("start", "end"))
        if before != first or not after.startswith(last):
            raise ValueError(f"images stand between {before!r} and {after!r}; the tokenizer names {first!r}, {last!r}")
        before, after = "", after.removeprefix(last)
    return before + processor.image_token + after


def _settings(processor: MllmRetrieverProcessor, backbone: PreTrainedConfig) -> dict[str, Any]:
    """Settings of the processor itself, from which it counts the tokens of a picture."""
    if backbone.model_type == "internvl":
        return {"image_seq_length": processor.tokens_per_picture}
    if backbone.model_type != "llava":
        return {}
    strategy, patch = backbone.vision_feature_select_strategy, backbone.vision_config.patch_size
    patches = (backbone.vision_config.image_size // patch) ** 2
    return {
        "image_token": processor.image_token,
        "patch_size": patch,
        "vision_feature_select_strategy": strategy,
        "num_additional_image_tokens": processor.tokens_per_picture - patches + (strategy == "default"),
    }


_TEMPLATE = """\
{#- A prompt to embed: images and texts in order, the request, the readout token. System messages are instructions. -#}
{%- set seen = namespace(told='', image=false, text=false, open=false) -%}
{{- $start -}}
{%- for message in messages -%}
  {%- set content = [{'type': 'text', 'text': message.content}] if message.content is string else message.content -%}
  {%- for part in content -%}
    {%- if part.type in ['image', 'image_url'] -%}
      {{- $image -}}
      {%- set seen.image = true -%}
      {%- set seen.open = true -%}
    {%- elif part.type != 'text' -%}
      {{- raise_exception('a part of type ' + part.type + ' cannot be embedded; expected text or image') -}}
    {%- elif message.role == 'system' -%}
      {%- if seen.image or seen.text -%}
        {{- raise_exception('a system message, the instruction, must come first') -}}
      {%- endif -%}
      {%- set seen.told = (seen.told + ' ' + part.text) | trim -%}
    {%- elif part.text | trim -%}
      {{- (seen.told + ' ' if seen.told else '') + part.text + '\\n' -}}
      {%- set seen.told = '' -%}
      {%- set seen.text = true -%}
      {%- set seen.open = false -%}
    {%- endif -%}
  {%- endfor -%}
{%- endfor -%}
{%- if not seen.image and not seen.text -%}
  {{- $empty -}}
{%- elif seen.told -%}
  {{- seen.told + '\\n' -}}
  {%- set seen.text = true -%}
  {%- set seen.open = false -%}
{%- endif -%}
{%- if seen.open -%}
  {{- $line -}}
{%- endif -%}
{{- ($both if seen.text else $image_alone) if seen.image else $text_alone -}}
{{- $end -}}"""

_EMPTY = {
    "error": "raise_exception('an item has neither text nor image')",
    "embed": "(seen.told + ' ' if seen.told else '') + '\\n'",
}


def chat_template(processor: MllmRetrieverProcessor, image: str, ret_token: str | None) -> str:
    """Return the Jinja template that writes the prompts of `processor`.

    The token ids of its prompts are those of the processor if no text has to be cut.

    Args:
        processor: Of the model.
        image: What stands for an image, with all that surrounds it.
        ret_token: The last token of each prompt; None ends it before.
    """
    texts = processor.template
    asks = {name: texts["ask"].format(NOUNS[key]) for name, key in _ASKS.items()}
    values = asks | {
        "start": texts["start"],
        "image": image,
        "line": "" if texts["image_end"].endswith("\n") else "\n",
        "end": texts["end"] + (ret_token or ""),
    }
    written = _TEMPLATE.replace("$empty", _EMPTY[processor.empty_text])
    for name in sorted(values, key=len, reverse=True):  # `image` is a part of `image_alone`
        written = written.replace(f"${name}", json.dumps(values[name]))
    return written


_ASKS = {"image_alone": (True, False), "text_alone": (False, True), "both": (True, True)}
"""Names of the requests, by whether a prompt has an image and a sentence."""
