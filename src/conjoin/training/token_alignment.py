"""From a teacher's text tokens to a student's, whose tokenizer cuts the same text elsewhere."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BatchEncoding, PreTrainedTokenizerBase


def tokenize_with_spans(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    max_length: int | None = None,
    padding: str = "longest",
    padding_side: str | None = None,
) -> tuple[BatchEncoding, Tensor]:
    """Tokenise and say which characters of its text each token stands for.

    Args:
        tokenizer: Any fast tokenizer.
        texts: N texts.
        max_length: Longest text in tokens; never more than the tokenizer's own limit.
        padding: As for the tokenizer.
        padding_side: Where padding goes; as the tokenizer has it when None.

    Returns:
        The encoding, and spans `(N, T, 2)`: first character and the one behind the last, counted without white space,
        which some tokenizers give to the next word and others to none. Special tokens and padding have empty spans.

    Raises:
        ValueError: The tokenizer is a slow one, which does not know where its tokens come from.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} is no fast tokenizer: it does not tell which characters its tokens "
            "stand for, so a teacher cannot be aligned"
        )
    encoded = tokenizer(
        list(texts),
        padding=padding,
        padding_side=padding_side,
        truncation=True,
        max_length=min(max_length or tokenizer.model_max_length, tokenizer.model_max_length),
        return_attention_mask=True,
        return_special_tokens_mask=True,
        return_offsets_mapping=True,
        return_tensors="pt",
    )
    longest = max(map(len, texts), default=0)
    inked = torch.tensor([[not c.isspace() for c in text] + [False] * (longest - len(text)) for text in texts])
    before = F.pad(inked.long().cumsum(1), (1, 0))  # (N, longest + 1): how many stand before each
    spans = before.gather(1, encoded.pop("offset_mapping").flatten(1)).unflatten(1, (-1, 2))
    return encoded, spans * (1 - encoded["special_tokens_mask"])[..., None]


def align_tokens(teacher: Tensor, teacher_spans: Tensor, student_spans: Tensor) -> tuple[Tensor, Tensor]:
    """For every student token the mean of the teacher's tokens, weighted by the characters they have in common.

    Args:
        teacher: `(N, U, D)`.
        teacher_spans: `(N, U, 2)` of `tokenize_with_spans`.
        student_spans: `(N, T, 2)`.

    Returns:
        `(N, T, D)`, and `(N, T)` bool: which student tokens share a character with a teacher token; the others are 0.
    """
    first = torch.maximum(student_spans[:, :, None, 0], teacher_spans[:, None, :, 0])
    last = torch.minimum(student_spans[:, :, None, 1], teacher_spans[:, None, :, 1])
    overlap = (last - first).clamp(min=0).to(teacher.dtype)
    total = overlap.sum(2, keepdim=True)
    with torch.autocast(teacher.device.type, enabled=False):
        return (overlap / total.clamp(min=1)) @ teacher, total.squeeze(2) > 0
