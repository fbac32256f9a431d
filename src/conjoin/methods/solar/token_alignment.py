"""Align a teacher's text tokens to a student's tokens, for different tokenizers."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BatchEncoding, PreTrainedTokenizerBase

from conjoin.processing.item_inputs import cut_text, text_limit, without_special_words


def tokenize_with_spans(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    max_length: int | None = None,
    padding: str = "longest",
    padding_side: str | None = None,
) -> tuple[BatchEncoding, Tensor]:
    """Tokenise texts as `ImageTextProcessor` does, and return the character span of each token.

    Args:
        tokenizer: Any fast tokenizer.
        texts: N texts.
        max_length: Maximum text length in tokens; the tokenizer's limit always applies.
        padding: Argument of the tokenizer.
        padding_side: Side of the padding; None for the tokenizer's default.

    Returns:
        The encoding, and spans `(N, T, 2)`: start and exclusive end of each token. Positions do not count white space,
        because tokenizers assign it differently. Special tokens and padding have empty spans.

    Raises:
        ValueError: The tokenizer is slow and does not report character offsets.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} is no fast tokenizer: it does not report the character offsets of its "
            "tokens, so a teacher cannot be aligned"
        )
    limit = text_limit(tokenizer, max_length)
    if limit is not None:
        texts = [cut_text(text, tokenizer, limit) for text in texts]
    encoded = tokenizer(
        texts,
        padding=padding,
        padding_side=padding_side,
        truncation=limit is not None,
        max_length=limit,
        split_special_tokens=True,  # as in the processor, special tokens in a text are ordinary words
        return_attention_mask=True,
        return_special_tokens_mask=True,
        return_offsets_mapping=True,
        return_tensors="pt",
    )
    encoded["input_ids"] = without_special_words(encoded["input_ids"], encoded["special_tokens_mask"], tokenizer)
    longest = max(map(len, texts), default=0)
    inked = torch.tensor([[not c.isspace() for c in text] + [False] * (longest - len(text)) for text in texts])
    before = F.pad(inked.long().cumsum(1), (1, 0))  # (N, longest + 1): non-space characters before each position
    spans = before.gather(1, encoded.pop("offset_mapping").flatten(1)).unflatten(1, (-1, 2))
    return encoded, spans * (1 - encoded["special_tokens_mask"])[..., None]


def align_tokens(teacher: Tensor, teacher_spans: Tensor, student_spans: Tensor) -> tuple[Tensor, Tensor]:
    """Average the teacher's tokens for every student token, weighted by the number of shared characters.

    Args:
        teacher: `(N, U, D)` states of the teacher's tokens.
        teacher_spans: `(N, U, 2)` from `tokenize_with_spans`.
        student_spans: `(N, T, 2)`, likewise.

    Returns:
        States `(N, T, D)`, and bool `(N, T)`: True where a student token overlaps a teacher token; other states are 0.
    """
    first = torch.maximum(student_spans[:, :, None, 0], teacher_spans[:, None, :, 0])
    last = torch.minimum(student_spans[:, :, None, 1], teacher_spans[:, None, :, 1])
    overlap = (last - first).clamp(min=0).to(teacher.dtype)
    total = overlap.sum(2, keepdim=True)
    with torch.autocast(teacher.device.type, enabled=False):
        return (overlap / total.clamp(min=1)) @ teacher, total.squeeze(2) > 0
