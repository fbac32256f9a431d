"""The processor of all models with one image tower and one text tower."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, BatchFeature, ProcessorMixin
from transformers.utils import logging

from .item_images import process_image
from .item_inputs import Item, cut_text, parse_items

logger = logging.get_logger(__name__)


class ImageTextProcessor(ProcessorMixin):
    """Turns items (text, image, image + text, in any mix) into one batch of model inputs.

    For a missing modality, the row is zero and `image_mask` / `text_mask` is False, and the tower skips it.

    Args:
        image_processor: Any transformers image processor that resizes all pictures to one size.
        tokenizer: Any transformers tokenizer.
        max_text_length: Longest text in tokens, special tokens included; the tokenizer's own limit when None.
        text_padding: `"longest"`, or `"max_length"` for towers trained that way (SigLIP).
        chat_template: Unused (a chat message is read part by part); kept for the library's interface.
    """

    def __init__(
        self,
        image_processor: Any = None,  # noqa: ANN401
        tokenizer: Any = None,  # noqa: ANN401
        max_text_length: int | None = None,
        text_padding: str = "longest",
        chat_template: str | None = None,
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        if text_padding not in ("longest", "max_length"):
            raise ValueError(f'text_padding={text_padding!r}; expected "longest" or "max_length"')
        self.max_text_length = max_text_length
        self.text_padding = text_padding

    @classmethod
    def from_backbones(cls, vision: Any, text: Any, **kwargs: Any) -> "ImageTextProcessor":  # noqa: ANN401
        """Combine the image processor and tokenizer of two checkpoints (ids or folders), which may be the same.

        A loaded image processor or tokenizer may replace its checkpoint.
        """
        tokenizer = AutoTokenizer.from_pretrained(text) if isinstance(text, str) else text
        image_processor = AutoImageProcessor.from_pretrained(vision) if isinstance(vision, str) else vision
        config = AutoConfig.from_pretrained(text).get_text_config() if isinstance(text, str) else None
        if config is not None and config.model_type.startswith("siglip"):  # SigLIP 2's tokenizer has another name
            kwargs["max_text_length"] = kwargs.get("max_text_length") or config.max_position_embeddings
            kwargs.setdefault("text_padding", "max_length")
        elif "siglip" in type(tokenizer).__name__.lower():
            kwargs.setdefault("text_padding", "max_length")
        return cls(image_processor, tokenizer, **kwargs)

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
        ids: Sequence[str] | None = None,
        max_length: int | None = None,
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

        Returns:
            `pixel_values` `(N, 3, H, W)` when any item has an image, `input_ids`, `attention_mask` and
            `special_tokens_mask` `(N, T)` when any has a text, `image_mask` / `text_mask` `(N,)` when some lack it.

        Raises:
            ValueError: An item cannot be used; the message names it.
        """
        if items is None:
            items = self._zip_items(images, text)
        parsed = parse_items(items, ids, self._read_image)
        if not parsed:
            raise ValueError("got an empty list of items")
        names = [f"item {i}" if ids is None else f"item {i} (id {ids[i]!r})" for i in range(len(parsed))]
        batch = self._image_batch([_one_image(item, name) for item, name in zip(parsed, names, strict=True)])
        given = [instruction] * len(parsed) if instruction is None or isinstance(instruction, str) else instruction
        if len(given) != len(parsed):
            raise ValueError(f"{len(given)} instructions for {len(parsed)} items")
        parts = [[told or "", *item.texts] for told, item in zip(given, parsed, strict=True)]
        texts = [" ".join(part.strip() for part in some if part.strip()) for some in parts]
        return BatchFeature(batch | self._text_batch(texts, names, max_length or self.max_text_length))

    def apply_chat_template(  # type: ignore[override]
        self,
        conversation: Sequence[Any],
        chat_template: str | None = None,
        processor_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> BatchFeature:
        """Read one conversation or a batch of them as items, as sentence-transformers passes its inputs.

        The parts of all messages are read in order, a system prompt first. No template text is added.
        """
        if conversation and isinstance(conversation[0], dict):
            conversation = [conversation]
        max_length = (processor_kwargs or {}).get("text_kwargs", {}).get("max_length")
        return self(list(conversation), max_length=max_length)

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

    def _text_batch(self, texts: list[str], names: list[str], max_length: int | None) -> dict[str, Tensor]:
        limit = min(max_length or self.tokenizer.model_max_length, self.tokenizer.model_max_length)
        rows = [(text, name) for text, name in zip(texts, names, strict=True) if text]
        present = [cut_text(text, self.tokenizer, limit, name) for text, name in rows]
        if not present:
            return {}
        encoded = self.tokenizer(
            present,
            padding=self.text_padding,
            truncation=True,
            max_length=limit,
            return_special_tokens_mask=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        self._check_tokens(encoded, present, [name for _, name in rows], limit)
        tensors = {key: encoded[key] for key in ("input_ids", "attention_mask", "special_tokens_mask")}
        return _spread(tensors, [bool(text) for text in texts], "text_mask")

    def _check_tokens(self, encoded: Any, texts: list[str], names: list[str], limit: int) -> None:  # noqa: ANN401
        full = (encoded["attention_mask"].sum(dim=1) >= limit).tolist()
        cut = [
            name
            for name, text, is_full in zip(names, texts, full, strict=True)
            if is_full and len(self.tokenizer(text, verbose=False)["input_ids"]) > limit
        ]
        if cut:
            more = f" and {len(cut) - 3} more" if len(cut) > 3 else ""
            logger.warning("text cut to %d tokens: %s%s", limit, ", ".join(cut[:3]), more)
        for row in (encoded["special_tokens_mask"].all(dim=1)).nonzero().flatten().tolist():
            raise ValueError(f"{names[row]}: text {texts[row][:40]!r} has no tokens for this tokenizer")


def _one_image(item: Item, name: str) -> Tensor | None:
    if len(item.images) > 1:
        raise ValueError(
            f"{name}: {len(item.images)} images, but this model takes one image per item; "
            "use an MLLM retriever for several images per item"
        )
    return next(iter(item.images), None)


def _spread(tensors: dict[str, Tensor], present: list[bool], mask_name: str) -> dict[str, Tensor]:
    """Place the rows of `tensors` where `present`, with zeros elsewhere, and add the mask, unless all are present."""
    if all(present):
        return tensors
    mask = torch.tensor(present)
    spread = {key: value.new_zeros(len(present), *value.shape[1:]) for key, value in tensors.items()}
    for key, value in tensors.items():
        spread[key][mask] = value
    return spread | {mask_name: mask}


__all__ = ["ImageTextProcessor"]
