"""How embedders embed whose files do not say it: data for `load_embedder(..., preset=NAME)`."""

from typing import Any

_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"

# The system message, then the images of all messages, then their texts.
_IMAGES_THEN_TEXTS = """\
{%%- set seen = namespace(told='', image='', text='') -%%}
{%%- for message in messages -%%}
  {%%- set content = [{'type': 'text', 'text': message.content}] if message.content is string else message.content -%%}
  {%%- for part in content -%%}
    {%%- if part.type in ['image', 'image_url'] -%%}
      {%%- set seen.image = seen.image + '%(image)s' -%%}
    {%%- elif part.type != 'text' -%%}
      {{- raise_exception('a part of type ' + part.type + ' cannot be embedded; expected text or image') -}}
    {%%- elif message.role == 'system' -%%}
      {%%- set seen.told = seen.told + part.text -%%}
    {%%- else -%%}
      {%%- set seen.text = seen.text + part.text -%%}
    {%%- endif -%%}
  {%%- endfor -%%}
{%%- endfor -%%}
%(prompt)s"""

_CHATML = (
    "{{- '<|im_start|>system\\n' + told + '<|im_end|>\\n<|im_start|>user\\n' + seen.image + seen.text "
    "+ '<|im_end|>\\n<|im_start|>assistant\\n%s' -}}"
)
_CLOSED = """\
{%- set told = (seen.told or "Represent the user's input.") | trim -%}
{%- set closing = "!#%&*,-./:;?@_\\"'()[]{}\\u3002\\uff01\\uff0c\\uff1a\\uff1b\\uff1f" -%}
{%- set told = told if told[-1] in closing else told + '.' -%}
"""

PRESETS: dict[str, dict[str, Any]] = {
    # Qwen3VLEmbedder of the repository QwenLM/Qwen3-VL-Embedding: the instruction ends in punctuation.
    "qwen3_vl_embedding": {
        "pooling": "lasttoken",
        "chat_template": _IMAGES_THEN_TEXTS % {"image": _QWEN_IMAGE, "prompt": _CLOSED + _CHATML % ""},
        "processor": {"min_pixels": 4 * 32 * 32, "max_pixels": 1800 * 32 * 32, "max_length": 8192},
    },
    # gme_inference.py of the repositories Alibaba-NLP/gme-Qwen2-VL-*.
    "gme_qwen2_vl": {
        "pooling": "lasttoken",
        "chat_template": _IMAGES_THEN_TEXTS
        % {
            "image": _QWEN_IMAGE,
            "prompt": "{%- set told = seen.told or 'You are a helpful assistant.' -%}" + _CHATML % "<|endoftext|>",
        },
        "processor": {"min_pixels": 256 * 28 * 28, "max_pixels": 1280 * 28 * 28, "max_length": 1800},
    },
    # VLM2Vec on Qwen2-VL: no chat template, and positions count tokens, since no token marks the start of an image.
    "vlm2vec": {
        "pooling": "lasttoken",
        "chat_template": _IMAGES_THEN_TEXTS
        % {
            "image": "<|image_pad|> ",
            "prompt": "{{- seen.image + seen.told + (' ' if seen.told and seen.text else '') + seen.text -}}",
        },
        "processor": {"min_pixels": 4 * 28 * 28, "max_pixels": 1280 * 28 * 28},
        "config": {"position_mode": "1d"},
    },
}
"""Of each preset the pooling, the chat template, the limits of images and prompts, fields of `MllmRetrieverConfig`."""
