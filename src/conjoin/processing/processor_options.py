"""Options of a processor's call that libraries pass by transformers' names."""

from collections.abc import Mapping, Sequence
from typing import Any

OFF = (False, "do_not_pad", "do_not_truncate")
"""Values of `padding` and `truncation` that switch them off; all others leave them to the processor."""


def chat_options(kwargs: Mapping[str, Any], processor_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `max_length`, `padding` and `truncation` among the arguments of `apply_chat_template`.

    Sentence-transformers passes them as `processor_kwargs["text_kwargs"]`. It renders short texts with `padding=False`
    to find the tokens that end each prompt, and writes these tokens over the end of each truncated text.
    """
    given = {**kwargs, **(processor_kwargs or {}).get("text_kwargs", {})}
    return {name: given[name] for name in ("max_length", "padding", "truncation") if name in given}


def conversations(conversation: Sequence[Any]) -> list[Any]:
    """Return one conversation or a batch of them as a batch.

    Where a batch of sentence-transformers mixes conversations with other items, each conversation is the only part of
    a message (`{"type": "message", "message": [...]}`); it is put in the place of that message.
    """
    batch = [conversation] if conversation and isinstance(conversation[0], Mapping) else conversation
    return [
        [inner for message in messages for inner in _unwrapped(message)] if isinstance(messages, list) else messages
        for messages in batch
    ]


def _unwrapped(message: Any) -> list[Any]:  # noqa: ANN401
    content = message.get("content") if isinstance(message, Mapping) else None
    part = content[0] if isinstance(content, list) and len(content) == 1 else None
    if not isinstance(part, Mapping) or part.get("type") != "message":
        return [message]
    return part["message"] if isinstance(part.get("message"), list) else [part.get("message")]


def instructions_of(instruction: str | Sequence[str | None] | None, count: int) -> list[str | None]:
    """Return the instruction of each of `count` items: one for all, or one for each.

    Raises:
        ValueError: There is another number of them.
    """
    given = [instruction] * count if instruction is None or isinstance(instruction, str) else list(instruction)
    if len(given) != count:
        raise ValueError(f"{len(given)} instructions for {count} items; pass one for all, or one for each")
    return given


def check_return_tensors(return_tensors: str | None) -> None:
    """Accept PyTorch tensors only.

    Raises:
        ValueError: Tensors of another library are asked for.
    """
    if return_tensors not in ("pt", None):
        raise ValueError(f'return_tensors={return_tensors!r}; expected "pt": a batch holds PyTorch tensors')


__all__ = ["OFF", "chat_options", "check_return_tensors", "conversations", "instructions_of"]
