"""Texts on their way to a tokenizer, which has a limit of tokens.

Every saved checkpoint contains this file, so it imports nothing of this package outside its folder.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

logger = logging.get_logger(__name__)
_cut_texts: WeakKeyDictionary[PreTrainedTokenizerBase, int] = WeakKeyDictionary()
_NO_LIMIT = 10**9
"""Tokenizers without a limit have a huge one, which their own code cannot read."""


def cut_text(text: str, tokenizer: PreTrainedTokenizerBase, limit: int) -> str:
    """Drop the end of a long text, far behind its first `limit` tokens, so that it need not be tokenised.

    The text that is left has at least `2 * limit` tokens, so the first `limit` stay as they are.
    """
    size = 16 * limit
    while size < len(text):
        if len(tokenizer(text[:size], add_special_tokens=False, verbose=False)["input_ids"]) >= 2 * limit:
            return text[:size]
        size *= 16
    return text


def text_limit(tokenizer: PreTrainedTokenizerBase, wanted: int | None) -> int | None:
    """Return the most tokens of a text: `wanted` or the tokenizer's limit, the smaller; None if there is neither."""
    limits = (wanted, tokenizer.model_max_length)
    return min((limit for limit in limits if limit and limit < _NO_LIMIT), default=None)


def warn_of_cuts(names: Sequence[str], limit: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Log in one line whose texts were cut: the first time, and when the tokenizer's count of them doubles."""
    before = _cut_texts.get(tokenizer, 0)
    count = _cut_texts[tokenizer] = before + len(names)
    if count.bit_length() != before.bit_length():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        so_far = f"; {count} texts so far" if before else ""
        logger.warning("text cut to fit %d tokens: %s%s%s", limit, ", ".join(names[:3]), more, so_far)


def without_special_words(ids: Tensor, special_tokens_mask: Tensor, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Replace special tokens in ids `(N, T)` that come from the text itself by the unknown token.

    A Unigram vocabulary (XLM-R, SigLIP) holds its special tokens as ordinary pieces, so splitting does not help.
    """
    if tokenizer.unk_token_id is None:
        return ids
    from_text = torch.isin(ids, torch.tensor(tokenizer.all_special_ids)) & (special_tokens_mask == 0)
    return ids.masked_fill(from_text, tokenizer.unk_token_id)
