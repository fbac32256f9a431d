"""What sentence-transformers needs of a processor: the files by which it loads the model, and conversations as items.

Every saved checkpoint contains this file, so it imports nothing of this package outside its folder.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import BatchFeature, ProcessorMixin

MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"
TRANSFORMER = "sentence_bert_config.json"
SENTENCE_FILES = (MODULES, TRANSFORMER, SETTINGS)
_EMBED = {"method": "forward", "method_output_name": "embeddings"}
_FILES: dict[str, Any] = {
    MODULES: [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}],
    TRANSFORMER: {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": _EMBED, "image": _EMBED, "message": _EMBED | {"format": "structured"}},
        "module_output_name": "sentence_embedding",
    },
}


def sentence_settings(prompts: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the settings of a `SentenceTransformer`: its prompts, and the versions of libraries that it needs.

    Args:
        prompts: Instructions by name. `encode_query` uses `query`, `encode_document` uses `document`; both are empty
            unless given.
    """
    return {
        "model_type": "SentenceTransformer",
        "requirements": {"sentence-transformers": ">=6.0", "transformers": ">=5.17"},
        "prompts": {"query": "", "document": ""} | (prompts or {}),
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    }


class SentenceFilesMixin(ProcessorMixin):
    """A processor that sentence-transformers calls, and that is saved with what it reads of its model."""

    prompts: dict[str, str] | None = None

    def apply_chat_template(  # type: ignore[override]
        self, conversation: Sequence[Any], *, processor_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> BatchFeature:
        """Read one conversation or a batch of them as items, as sentence-transformers passes its inputs.

        Of the arguments, `max_length`, `padding` and `truncation` count, which it passes as
        `processor_kwargs["text_kwargs"]`. It renders short texts with `padding=False` to find the tokens that end each
        prompt, and writes these tokens over the end of each truncated text. Where its batch mixes conversations with
        other items, each conversation is the only part of a message (`{"type": "message", "message": [...]}`).
        """
        batch = [conversation] if conversation and isinstance(conversation[0], Mapping) else conversation
        given = kwargs | (processor_kwargs or {}).get("text_kwargs", {})
        options = {name: given[name] for name in ("max_length", "padding", "truncation") if name in given}
        return self([_unwrapped(messages) for messages in batch], **options)

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> Any:
        """Save the processor, and beside it the files of sentence-transformers; `push_to_hub` then uploads all.

        Prompts that are in the folder stay: sentence-transformers writes those of a model before it saves this.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in _FILES.items():
            write_json_file(folder / name, content)
        if not (folder / SETTINGS).exists():
            write_json_file(folder / SETTINGS, sentence_settings(self.prompts))
        saved = super().save_pretrained(save_directory)
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", folder.name), **kwargs)
        return saved


def instructions_of(instruction: str | Sequence[str | None] | None, count: int) -> list[str | None]:
    """Return the instruction of each of `count` items: one for all, or one for each.

    Raises:
        ValueError: There is another number of them.
    """
    given = [instruction] * count if instruction is None or isinstance(instruction, str) else list(instruction)
    if len(given) != count:
        raise ValueError(f"{len(given)} instructions for {count} items; pass one for all, or one for each")
    return given


def check_processor_type(input_type: str) -> str:
    """Return `input_type` if a processor can apply it: each of its items becomes one.

    Raises:
        ValueError: It is not `"seq"` or `"cat"`.
    """
    if input_type not in ("seq", "cat"):
        raise ValueError(f'input_type={input_type!r}; a processor takes "seq" or "cat", load_encoder also "avg"')
    return input_type


def _unwrapped(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return messages, with a conversation in the place of a part of a message that is one."""
    flat: list[Any] = []
    for message in messages:
        parts = [part for part in message.get("content") or () if isinstance(part, Mapping)]
        wrapped = [part["message"] for part in parts if part.get("type") == "message"]
        for each in wrapped or [message]:
            flat += each if isinstance(each, list) else [each]
    return flat


def write_json_file(path: Path, content: Any) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
