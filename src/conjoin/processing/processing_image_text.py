"""The processor of all models with one image tower and one text tower."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, BatchFeature

from .item_error import ItemError
from .item_images import process_image
from .item_inputs import Item, check_unicode, item_names, only_image, parse_items
from .sentence_files import OFF, SentenceFilesMixin, check_call, instructions_of
from .texts import cut_text, text_limit, warn_of_cuts, without_special_words


class ImageTextProcessor(SentenceFilesMixin):
    """Turns items (text, image, image + text, in any mix) into one batch of model inputs.

    For a missing modality, the row is zero and `image_mask` / `text_mask` is False, and the tower skips it.

    Args:
        image_processor: Any transformers image processor that resizes all pictures to one size.
        tokenizer: Any transformers tokenizer.
        max_text_length: Longest text in tokens, special tokens included; the tokenizer's own limit when None.
        text_padding: `"longest"`, or `"max_length"` for towers trained that way (SigLIP).
        empty_text: `"error"`, or `"embed"` to embed an item without image whose text is empty: its text is then the
            tokenizer's special tokens alone. An empty text beside an image is left out.
        chat_template: Unused (a chat message is read part by part); kept for the library's interface.
        input_type: What to do with several images of an item: `"seq"` refuses them, since these models take one image;
            `"cat"` concatenates them into one picture and joins the texts.
        prompts: Instructions by name, which sentence-transformers reads: `encode_query` uses `query`,
            `encode_document` uses `document`.
    """

    def __init__(
        self,
        image_processor: Any = None,  # noqa: ANN401
        tokenizer: Any = None,  # noqa: ANN401
        max_text_length: int | None = None,
        text_padding: str = "longest",
        chat_template: str | None = None,
        empty_text: str = "error",
        input_type: str = "seq",
        prompts: dict[str, str] | None = None,
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.set_options(empty_text, input_type, prompts)
        if text_padding not in ("longest", "max_length"):
            raise ValueError(f'text_padding={text_padding!r}; expected "longest" or "max_length"')
        self.max_text_length = max_text_length
        self.text_padding = text_padding

    @classmethod
    def from_backbones(cls, vision: Any, text: Any, **kwargs: Any) -> "ImageTextProcessor":  # noqa: ANN401
        """Combine the image processor and tokenizer of two checkpoints (ids or folders), which may be the same.

        A loaded image processor or tokenizer may replace its checkpoint.
        """
        config = None
        if isinstance(text, str | Path):
            config = AutoConfig.from_pretrained(text, trust_remote_code=False).get_text_config()
            text = AutoTokenizer.from_pretrained(text, trust_remote_code=False)
        if isinstance(vision, str | Path):
            vision = AutoImageProcessor.from_pretrained(vision, trust_remote_code=False)
        if config is not None and config.model_type.startswith("siglip"):  # SigLIP 2's tokenizer has another name
            kwargs["max_text_length"] = kwargs.get("max_text_length") or config.max_position_embeddings
            kwargs.setdefault("text_padding", "max_length")
        elif "siglip" in type(text).__name__.lower():
            kwargs.setdefault("text_padding", "max_length")
        return cls(vision, text, **kwargs)

    @property
    def model_input_names(self) -> list[str]:
        """Names of the tensors that a batch may hold."""
        return ["pixel_values", "image_mask", "input_ids", "attention_mask", "special_tokens_mask", "text_mask"]

    def __call__(
        self,
        items: Sequence[Any] | None = None,
        *,
        images: Sequence[Any] | None = None,
        text: Sequence[str] | None = None,
        instruction: str | Sequence[str | None] | None = None,
        ids: Sequence[str | int] | None = None,
        max_length: int | None = None,
        padding: bool | str = True,
        truncation: bool | str = True,
        return_tensors: str | None = "pt",
    ) -> BatchFeature:
        """Prepare `N` items.

        Args:
            items: Strings, images (PIL, arrays or tensors), paths, `{"text", "image"}` dicts or chat messages, in any
                mix.
            images: In place of `items`: a list of images, alone or beside `text` of equal length.
            text: In place of `items`: a list of texts.
            instruction: What to search for: one text for all items, or one for each. It precedes the item's text.
            ids: Names to report in error messages.
            max_length: Overrides `max_text_length`.
            padding: False pads no text; the texts must then have equally many tokens.
            truncation: False cuts no text.
            return_tensors: `"pt"`; accepted for interface compatibility.

        Returns:
            `pixel_values` `(N, 3, H, W)` when any item has an image, `input_ids`, `attention_mask` and
            `special_tokens_mask` `(N, T)` when any has a text, `image_mask` / `text_mask` `(N,)` when some lack it.

        Raises:
            ValueError: An item cannot be used, or an option is invalid; the message names it.
        """
        if items is None:
            items = self._zip_items(images, text)
        check_call(items, return_tensors)
        parsed = parse_items(items, ids, self._read_image, empty_text=self.empty_text, input_type=self.input_type)
        names = item_names(len(parsed), ids)
        batch = self._image_batch([only_image(item, name) for item, name in zip(parsed, names, strict=True)])
        given = zip(instructions_of(instruction, len(parsed)), names, strict=True)
        instructions = [asked and check_unicode(asked, name) for asked, name in given]
        texts = [_join_texts(asked, item) for asked, item in zip(instructions, parsed, strict=True)]
        limit = None if truncation in OFF else text_limit(self.tokenizer, max_length or self.max_text_length)
        return BatchFeature(batch | self._text_batch(texts, names, limit, padding not in OFF and self.text_padding))

    @staticmethod
    def _zip_items(images: Sequence[Any] | None, text: Sequence[str] | None) -> list[Any]:
        if images is None and text is None:
            raise ValueError("pass items, or images and/or text")
        images = [images] if isinstance(images, Image.Image | str) else images
        text = [text] if isinstance(text, str) else text
        if images is None or text is None:
            return [{"text": t} for t in text] if text is not None else [{"image": i} for i in images or ()]
        if len(images) != len(text):
            raise ValueError(f"{len(images)} images but {len(text)} texts; pass as many of each, or use items")
        return [{"image": image, "text": t} for image, t in zip(images, text, strict=True)]

    def _read_image(self, source: Any, name: str) -> Tensor:  # noqa: ANN401
        """Return the pixels `(1, 3, H, W)` of an image."""
        pixels: Tensor = process_image(self.image_processor, source, name)["pixel_values"]
        return pixels

    def _image_batch(self, images: list[Tensor | None]) -> dict[str, Tensor]:
        present = [image for image in images if image is not None]
        if not present:
            return {}
        shapes = {tuple(image.shape[1:]) for image in present}
        if len(shapes) > 1:
            raise ValueError(f"the image processor gives pictures of several shapes, {sorted(shapes)}; expected one")
        return _spread({"pixel_values": torch.cat(present)}, [image is not None for image in images], "image_mask")

    def _text_batch(
        self, texts: list[str | None], names: list[str], limit: int | None, padding: bool | str
    ) -> dict[str, Tensor]:
        rows = [name for name, text in zip(names, texts, strict=True) if text is not None]
        present = [text for text in texts if text is not None]
        if limit is not None:
            present = [cut_text(text, self.tokenizer, limit) for text in present]
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
        )
        if len(set(map(len, encoded["input_ids"]))) > 1:
            raise ValueError("padding=False, but the texts differ in length; pass padding=True")
        keys = ("input_ids", "attention_mask", "special_tokens_mask")
        tensors = {key: torch.tensor(encoded[key]) for key in keys}
        if limit is not None:
            if encoded.encodings is not None:
                is_cut = [bool(encoding.overflowing) for encoding in encoded.encodings]
            else:  # a slow tokenizer does not say it
                options = {"split_special_tokens": True, "verbose": False}
                is_cut = [len(self.tokenizer(text, **options)["input_ids"]) > limit for text in present]
            warn_of_cuts([name for name, cut in zip(rows, is_cut, strict=True) if cut], limit, self.tokenizer)
        empty = tensors["special_tokens_mask"].all(dim=1).tolist()
        for name, text, is_empty in zip(rows, present, empty, strict=True):
            if text and is_empty:
                raise ItemError(name, f"text {text[:40]!r} has no tokens for this tokenizer")
        words, special = tensors["input_ids"], tensors["special_tokens_mask"]
        tensors["input_ids"] = without_special_words(words, special, self.tokenizer)
        return _spread(tensors, [text is not None for text in texts], "text_mask")


def _join_texts(instruction: str | None, item: Item) -> str | None:
    """Return the instruction and the item's texts, joined by spaces; None if there are none."""
    parts = [part.strip() for part in (instruction or "", *item.texts)]
    return " ".join(part for part in parts if part) if item.texts or parts[0] else None


def _spread(tensors: dict[str, Tensor], present: list[bool], mask_name: str) -> dict[str, Tensor]:
    """Place the rows of `tensors` where `present`, with zeros elsewhere, and add the mask, unless all are present."""
    if all(present):
        return tensors
    mask = torch.tensor(present)
    spread = {key: value.new_zeros(len(present), *value.shape[1:]) for key, value in tensors.items()}
    for key, value in tensors.items():
        spread[key][mask] = value
    return spread | {mask_name: mask}
