"""`MllmRetrieverProcessor.from_mllm`: the processor of a pretrained MLLM, with the prompts of its architecture."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

from conjoin.processing.processing_mllm import MllmRetrieverProcessor

REQUEST = "Summarize above {} in one word: "
"""The request of every prompt (PUMA, after LamRA); `{}` is "image", "sentence" or "image and sentence"."""
_CHATML = {"start": "<|im_start|>user\n", "end": "<|im_end|>\n<|im_start|>assistant\n", "request": REQUEST}
_QWEN = _CHATML | {"image": "<|vision_start|><|image_pad|><|vision_end|>"}
_SYSTEM = {"start": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"}
TEMPLATES = {
    "internvl": _CHATML | {"image": "<IMG_CONTEXT>\n"},  # its processor adds <img> and </img>
    "llava": {"start": "<s>USER: ", "image": "<image>\n", "end": "ASSISTANT: ", "request": REQUEST},
    "qwen2_5_vl": _QWEN | _SYSTEM,
    "qwen2_vl": _QWEN | _SYSTEM,
    "qwen3_vl": _QWEN,
}
"""The text around the parts of an item, and what stands for an image, by architecture."""


def retriever_template(start: str, image: str, request: str, end: str) -> str:
    """Return the chat template, in Jinja, of a retriever without one of its own.

    Args:
        start: What precedes the item.
        image: What stands for an image.
        request: Follows the item; `{}` becomes "image", "sentence" or "image and sentence".
        end: Precedes the readout token.
    """
    texts = {"start": start, "image": image, "request": request, "end": end}
    head = "".join(f"{{%- set {name} = {json.dumps(text)} -%}}\n" for name, text in texts.items())
    return head + Path(__file__).with_name("retriever.jinja").read_text(encoding="utf-8")


def from_mllm(
    checkpoint: str | Path,
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    ret_token: str | None = "[RET]",
    revision: str | None = None,
    **kwargs: Any,
) -> MllmRetrieverProcessor:
    """Build the processor of a pretrained MLLM and add the readout token to its tokenizer.

    Args:
        checkpoint: A folder or the name of a repository on the Hub; no video processor is read.
        min_pixels: Smaller images are enlarged to this many pixels (Qwen; PUMA: `4 * 28 * 28`).
        max_pixels: Larger images are reduced to this many pixels (Qwen; PUMA: `300 * 28 * 28`).
        ret_token: As for the class.
        revision: Branch, tag or commit on the Hub.
        kwargs: Other arguments of the class. `max_length` defaults to the language model's number of positions,
            `chat_template` to the retriever's own, see `TEMPLATES`.

    Raises:
        ValueError: The architecture is unknown, its resolution is fixed but pixel limits are given, or not
            `0 < min_pixels <= max_pixels`.
    """
    options: dict[str, Any] = {"trust_remote_code": False, "revision": revision}
    config = AutoConfig.from_pretrained(checkpoint, **options)
    if config.model_type not in TEMPLATES:
        raise ValueError(f"{config.model_type!r} is not a supported MLLM; expected one of {sorted(TEMPLATES)}")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, **options)
    if ret_token is not None:
        tokenizer.add_tokens([ret_token], special_tokens=True)
    image_processor = AutoImageProcessor.from_pretrained(checkpoint, **options)
    if config.model_type.startswith("qwen"):
        limits = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
        size = dict(image_processor.size) | {name: value for name, value in limits.items() if value is not None}
        least, most = size["shortest_edge"], size["longest_edge"]
        if not 0 < least <= most:
            raise ValueError(f"min_pixels={least}, max_pixels={most}; expected 0 < min_pixels <= max_pixels")
        image_processor.size = size
    else:
        kwargs.setdefault("tokens_per_picture", config.image_seq_length)
        if min_pixels is not None or max_pixels is not None:
            raise ValueError(f"{config.model_type!r} has a fixed resolution; omit min_pixels and max_pixels")
    kwargs["chat_template"] = kwargs.get("chat_template") or retriever_template(**TEMPLATES[config.model_type])
    if kwargs.get("max_length") is None:  # some tokenizers have no limit
        kwargs["max_length"] = config.get_text_config().max_position_embeddings
    image_token = tokenizer.convert_ids_to_tokens([config.image_token_id])[0]
    return MllmRetrieverProcessor(image_processor, tokenizer, image_token=image_token, ret_token=ret_token, **kwargs)


MllmRetrieverProcessor.from_mllm = staticmethod(from_mllm)
