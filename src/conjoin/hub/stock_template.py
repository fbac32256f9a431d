"""The prompt of an MLLM retriever as a chat template, the only form of it that other programs read."""

import json

from conjoin.processing import MllmRetrieverProcessor
from conjoin.processing.mllm_prompts import NOUNS

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
