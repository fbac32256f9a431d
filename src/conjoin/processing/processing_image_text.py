"""The processor of all models with one image tower and one text tower."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import BatchFeature, PreTrainedTokenizerBase
from transformers.utils import logging

from .item_error import ItemError
from .item_inputs import Item, check_list, check_unicode, item_names, parse_item
from .item_pixels import by_pillow, moved, picture_reader
from .sentence_files import SentenceFilesMixin, check_processor_type, instructions_of

logger = logging.get_logger(__name__)


class ImageTextProcessor(SentenceFilesMixin):
    """Turns items (text, image, image + text, in any mix) into one batch of model inputs.

    For a missing modality, the row is zero and `image_mask` / `text_mask` is False, and the tower skips it.

    Args:
        image_processor: Any transformers image processor that resizes all pictures to one size; see `by_pillow`.
        tokenizer: Any transformers tokenizer.
        max_text_length: Longest text in tokens, special tokens included; the tokenizer's own limit when None.
        text_padding: `"longest"`, or `"max_length"` for towers trained that way (SigLIP).
        chat_template: Unused (a chat message is read part by part); kept for the library's interface.
        input_type: What to do with several images of an item: `"seq"` refuses them, since these models take one image;
            `"cat"` concatenates them into one picture and joins the texts.
        prompts: Instructions by name, which sentence-transformers reads: `encode_query` uses `query`,
            `encode_document` uses `document`.
        torch_resize: Resize images by torch rather than by Pillow; see `PictureReader`.
    """

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        max_text_length: int | None = None,
        text_padding: str = "longest",
        chat_template: str | None = None,
        input_type: str = "seq",
        prompts: dict[str, str] | None = None,
        torch_resize: bool = False,
    ) -> None:
        super().__init__(by_pillow(image_processor), tokenizer, chat_template=chat_template)
        self.input_type, self.prompts = check_processor_type(input_type), prompts
        if text_padding not in ("longest", "max_length"):
            raise ValueError(f'text_padding={text_padding!r}; expected "longest" or "max_length"')
        self.max_text_length = max_text_length
        self.text_padding, self.torch_resize = text_padding, torch_resize

    def __call__(
        self,
        items: Sequence[Any],
        *,
        instruction: str | Sequence[str | None] | None = None,
        ids: Sequence[str | int] | None = None,
        max_length: int | None = None,
        padding: bool | str = True,
        truncation: bool | str = True,
        return_tensors: str | None = "pt",
        device: str | torch.device | None = None,
    ) -> BatchFeature:
        """Prepare `N` items.

        Args:
            items: Strings, images (PIL, arrays or tensors), paths, `{"text", "image"}` dicts or chat messages, in any
                mix; or what `reader()` gave for them.
            instruction: What to search for: one text for all items, or one for each. It precedes the item's text.
            ids: Names to report in error messages.
            max_length: Overrides `max_text_length`.
            padding: False pads no text; the texts must then have equally many tokens.
            truncation: False cuts no text.
            return_tensors: Accepted for interface compatibility; a batch holds PyTorch tensors.
            device: Where the tensors are to be; images cross to it as 8-bit levels and are normalised there.

        Returns:
            `pixel_values` `(N, 3, H, W)` when any item has an image, `input_ids`, `attention_mask` and
            `special_tokens_mask` `(N, T)` when any has a text, `image_mask` / `text_mask` `(N,)` when some lack it.

        Raises:
            ValueError: An item cannot be used, or an option is invalid; the message names it.
        """
        check_list(items)
        limit = None
        if truncation not in (False, "do_not_truncate"):
            limit = text_limit(self.tokenizer, max_length or self.max_text_length)
        names, read = item_names(len(items), ids), self.reader()
        parsed = [read(item, name).shortened(limit) for item, name in zip(items, names, strict=True)]
        images = [only_image(item, name) for item, name in zip(parsed, names, strict=True)]
        batch = {}
        if present := [image for image in images if image is not None]:
            batch = _spread({"pixel_values": torch.cat(present)}, [each is not None for each in images], "image_mask")
        instructions = instructions_of(instruction, len(parsed))
        texts = []
        for item, own, name in zip(parsed, instructions, names, strict=True):
            parts = [check_unicode(part, name).strip() for part in (own or "", *item.texts)]
            texts.append(" ".join(part for part in parts if part) or None)
        padding = padding not in (False, "do_not_pad") and self.text_padding
        batch = moved(batch | self._text_batch(texts, names, limit, padding), device)
        if present:
            pixels = picture_reader(self.image_processor, self.torch_resize).normalize(batch["pixel_values"])
            mask = batch.get("image_mask")
            batch["pixel_values"] = pixels if mask is None else pixels * mask[:, None, None, None]
        return BatchFeature(batch)

    def reader(self) -> Callable[[Any, str], Item]:
        """Return what reads an item with its images, given its name in messages; threads may share it."""
        pictures = cache(lambda: picture_reader(self.image_processor, self.torch_resize))

        def read(source: Any, name: str) -> Tensor:
            return pictures().read(source, name)[0]

        return lambda item, name: parse_item(item, name, read, self.input_type)

    def _text_batch(
        self, texts: list[str | None], names: list[str], limit: int | None, padding: bool | str
    ) -> dict[str, Tensor]:
        rows = [name for name, text in zip(names, texts, strict=True) if text is not None]
        present = [text for text in texts if text is not None]
        if not present:
            return {}
        encoded = self.tokenizer(
            present,
            padding=padding,
            truncation=limit is not None,
            max_length=limit,
            return_special_tokens_mask=True,
            return_attention_mask=True,
            split_special_tokens=True,  # special tokens in a text are ordinary words
            return_tensors="pt",
        )
        tensors = {key: encoded[key] for key in ("input_ids", "attention_mask", "special_tokens_mask")}
        if limit is not None and (tensors["attention_mask"].sum(1) >= limit).any():
            logger.warning_once(f"texts of more than {limit} tokens are cut (max_text_length, or the tokenizer)")
        empty = tensors["special_tokens_mask"].all(dim=1).tolist()
        for name, text, is_empty in zip(rows, present, empty, strict=True):
            if is_empty:
                raise ItemError(name, f"text {text[:40]!r} has no tokens for this tokenizer")
        words, special = tensors["input_ids"], tensors["special_tokens_mask"]
        tensors["input_ids"] = without_special_words(words, special, self.tokenizer)
        return _spread(tensors, [text is not None for text in texts], "text_mask")


def _spread(tensors: dict[str, Tensor], present: list[bool], mask_name: str) -> dict[str, Tensor]:
    """Place the rows of `tensors` where `present`, with zeros elsewhere, and add the mask, unless all are present."""
    if all(present):
        return tensors
    mask = torch.tensor(present)
    spread = {mask_name: mask}
    for key, value in tensors.items():
        spread[key] = value.new_zeros(len(present), *value.shape[1:])
        spread[key][mask] = value
    return spread


def only_image(item: Item, name: str) -> Any:
    """Return the image of an item for a model of one image per item; None if it has none.

    Raises:
        ItemError: It has several.
    """
    if len(item.images) > 1:
        raise ItemError(
            name,
            f"{len(item.images)} images, but this model takes one image per item; choose input type cat "
            "(the images as one picture) or avg (the mean of their embeddings): --input cat, load_encoder(..., "
            'input_type="cat"), or input_type="cat" of the processor; or use an MLLM retriever',
        )
    return next(iter(item.images), None)


def text_limit(tokenizer: PreTrainedTokenizerBase, wanted: int | None) -> int | None:
    """Return the most tokens of a text: `wanted` or the tokenizer's limit, the smaller; None if there is neither.

    Tokenizers without a limit have a huge one, which their own code cannot read.
    """
    limits = (wanted, tokenizer.model_max_length)
    return min((limit for limit in limits if limit and limit < 10**9), default=None)


def without_special_words(ids: Tensor, special_tokens_mask: Tensor, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Replace special tokens in ids `(N, T)` that come from the text itself by the unknown token.

    A Unigram vocabulary (XLM-R, SigLIP) holds its special tokens as ordinary pieces, so splitting does not help.
    """
    if tokenizer.unk_token_id is None:
        return ids
    from_text = torch.isin(ids, torch.tensor(tokenizer.all_special_ids)) & (special_tokens_mask == 0)
    return ids.masked_fill(from_text, tokenizer.unk_token_id)
