"""Options of a processor's call that libraries pass by transformers' names."""

from collections.abc import Mapping
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


def check_return_tensors(return_tensors: str | None) -> None:
    """Accept PyTorch tensors only.

    Raises:
        ValueError: Tensors of another library are asked for.
    """
    if return_tensors not in ("pt", None):
        raise ValueError(f'return_tensors={return_tensors!r}; expected "pt": a batch holds PyTorch tensors')


__all__ = ["OFF", "chat_options", "check_return_tensors"]
