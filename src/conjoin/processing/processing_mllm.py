"""The processor of the MLLM retriever: items become prompts that end in the readout token."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from math import ceil, sqrt
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchFeature
from transformers.utils import logging

from .item_error import ItemError
from .item_images import load_image
from .item_inputs import Item, SystemText, check_list, check_parts, check_text, item_names, parse_item
from .item_pixels import by_pillow, moved, picture_reader
from .sentence_files import SETTINGS, TRANSFORMER, SentenceFilesMixin, check_processor_type, instructions_of

logger = logging.get_logger(__name__)
_MARK = "\uffff"
"""Stands around a special token that occurs in an item's text, written backwards; no Unicode character."""


class Picture(NamedTuple):
    """An image: its pixel rows `(P, ...)`, not normalised, for Qwen its patch grid `(1, 3)`, and its tokens."""

    pixels: Tensor
    grid: Tensor | None
    tokens: int


class Piece(NamedTuple):
    """A part of a prompt: token ids, and whether the item's prompt, its images' and its texts' contain it."""

    ids: list[int]
    fused: bool = False
    image: bool = False
    text: bool = False


class MllmRetrieverProcessor(SentenceFilesMixin):
    """Turns items (text, images, both, interleaved in any way) into one batch of prompts for `MllmRetrieverModel`.

    A prompt is the images and texts in the item's own order, each text on a line of its own, with the instruction
    and a space before the first text, then "Summarize above image and sentence in one word: ", then [RET] as the
    answer. An instruction counts as a sentence. In the paper's prompts the image comes first; its period after [RET]
    is omitted, since [RET] does not attend to it. The tokens of the item's other views (images alone, texts alone)
    are outside `attention_mask`. Special tokens that occur in an item's text are read as ordinary words.

    Args:
        image_processor: The backbone's image processor: Qwen's with its dynamic resolution, or one that resizes
            all pictures to one size.
        tokenizer: The backbone's tokenizer, which knows `image_token` and `ret_token`.
        image_token: The placeholder of image features.
        ret_token: The readout token; None for a prompt without one (`readout="last"`).
        tokens_per_picture: Image tokens of a picture (or tile); None for Qwen, whose patch grid gives the number.
        max_length: Longest prompt in tokens; the tokenizer's own limit when None. Only texts are cut to fit.
        max_text_length: Longest text in tokens, with the instruction before it; no limit when None.
        chat_template: What writes the prompts, in Jinja; `conjoin.from_mllm` makes it.
        input_type: How an item with several images is read: `"seq"` (images and texts in their order), or `"cat"` (the
            images concatenated into one picture, then the texts joined).
        prompts: Instructions by name, which sentence-transformers reads: `encode_query` uses `query`,
            `encode_document` uses `document`; those of `sentence_files` when None.
        resize_first: Resize each image to whole tokens, 4 to 16,384 of them, before the image processor resizes it to
            its own limits (GME).
        sentence_files: Of a published embedder, the content of the files by which sentence-transformers reads it, by
            path. `chat_template` is then its own, and an item without an instruction gets its default prompt, if it
            has one. See `conjoin.hub.load_embedder`.
        torch_resize: Resize images by torch rather than by Pillow; see `PictureReader`.

    Raises:
        ValueError: The tokenizer does not know the image token or the readout token, there is no template, or an
            option is out of range.
    """

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        image_token: str = "<|image_pad|>",
        ret_token: str | None = "[RET]",
        tokens_per_picture: int | None = None,
        max_length: int | None = None,
        chat_template: str | None = None,
        max_text_length: int | None = None,
        input_type: str = "seq",
        prompts: dict[str, str] | None = None,
        resize_first: bool = False,
        sentence_files: dict[str, Any] | None = None,
        torch_resize: bool = False,
    ) -> None:
        super().__init__(by_pillow(image_processor), tokenizer, chat_template=chat_template)
        self.sentence_files = sentence_files
        self.input_type = check_processor_type(input_type)
        self.prompts = (sentence_files or {}).get(SETTINGS, {}).get("prompts") if prompts is None else prompts
        self.image_token = image_token
        self.ret_token = ret_token
        self.tokens_per_picture = tokens_per_picture
        self.max_length = max_length
        self.max_text_length = max_text_length
        self.resize_first, self.torch_resize = resize_first, torch_resize
        self._ends = ("", "") if sentence_files is None else _ends(tokenizer)
        if not chat_template:
            raise ValueError("chat_template is missing: conjoin.from_mllm writes one")
        if max_text_length is not None and max_text_length < 1:
            raise ValueError(f"max_text_length={max_text_length} must be at least 1")
        for token in (image_token, ret_token):
            if token is not None and token not in tokenizer.get_vocab():
                raise ValueError(f"{token!r} is no token of this tokenizer ({len(tokenizer)} tokens): was it changed?")

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
            items: Strings, images (PIL, arrays or tensors), paths, `{"image", "text"}` dicts or chat messages, in any
                mix, each with any number of images. A system message is the item's instruction. Or what `reader()`
                gave for them.
            instruction: What to search for, e.g. `"Find an image that matches the caption."`: one for all items, or
                one for each. It precedes the first text.
            ids: Names to report in error messages.
            max_length: Overrides the processor's.
            padding: Accepted for interface compatibility; prompts are always padded to the longest.
            truncation: False cuts no text.
            return_tensors: Accepted for interface compatibility; a batch holds PyTorch tensors.
            device: Where the tensors are to be; images cross to it as 8-bit levels and are normalised there.

        Returns:
            `input_ids` and `attention_mask` `(N, T)`; when any item has an image `pixel_values` `(N, P, ...)`,
            pixel rows padded per item, `pixel_attention_mask` `(N, P)` and, for Qwen, `image_grids` `(N, I, 3)`; when
            the batch has images and texts `image_view_mask` and `text_view_mask` `(N, T)`; `image_mask` / `text_mask`
            `(N,)` when some items lack it.

        Raises:
            TypeError: `items` is a single item rather than a list.
            ValueError: An item cannot be used, its images exceed `max_length`, or an option is invalid.
        """
        check_list(items)
        names, read = item_names(len(items), ids), self.reader()
        parsed = [read(item, name) for item, name in zip(items, names, strict=True)]
        limit = None
        if truncation not in (False, "do_not_truncate"):
            longest, chosen = self.tokenizer.model_max_length, self.max_length if max_length is None else max_length
            limit = longest if chosen is None else min(chosen, longest)
        contents, written = [], []
        instructions = instructions_of(instruction, len(items))
        for item, own, name in zip(parsed, instructions, names, strict=True):
            system = [part for part in item.parts if isinstance(part, SystemText)]
            parts = check_parts([part for part in item.parts if not isinstance(part, SystemText)], name)
            contents.append(Item(tuple(parts)))
            written.append(self._write(contents[-1], self._instruction(system, own, name), limit, name))
        rows = [[(token, *piece[1:]) for piece in pieces for token in piece.ids] for pieces in written]
        padded = pad_sequence([torch.tensor(row) for row in rows], True, padding_side=self.tokenizer.padding_side)
        token_ids, whole, of_images, of_texts = padded.unbind(2)
        token_ids = token_ids.masked_fill(~padded[..., 1:].any(2), self.tokenizer.pad_token_id or 0)
        images, texts = [item.images for item in contents], [item.texts for item in contents]
        batch = {"input_ids": token_ids, "attention_mask": whole} | pad_pixels(images, padded.shape[1])
        if any(images) and any(texts):  # else the view of the one modality is the whole item
            batch |= {"image_view_mask": of_images, "text_view_mask": of_texts}
            masks = {"image_mask": [*map(bool, images)], "text_mask": [*map(bool, texts)]}
            batch |= {name: torch.tensor(mask) for name, mask in masks.items() if not all(mask)}
        batch = moved(batch, device)
        if any(images):
            pixels = picture_reader(self.image_processor, self.torch_resize).normalize(batch["pixel_values"])
            mask = batch["pixel_attention_mask"]
            batch["pixel_values"] = pixels * mask.view(*mask.shape, *[1] * (pixels.ndim - mask.ndim))
        return BatchFeature(batch)

    def reader(self) -> Callable[[Any, str], Item]:
        """Return what reads an item with its images, given its name in messages; threads may share it."""
        pictures = cache(lambda: picture_reader(self.image_processor, self.torch_resize))

        def read(source: Any, name: str) -> Picture:
            if self.resize_first:
                side = self.image_processor.patch_size * self.image_processor.merge_size
                source = _to_tokens(load_image(source, name), side)
            pixels, grid = pictures().read(source, name)
            if grid is not None:
                return Picture(pixels, grid, len(pixels) // self.image_processor.merge_size**2)
            return Picture(pixels, None, len(pixels) * self.tokens_per_picture)  # type: ignore[operator]

        return lambda item, name: parse_item(item, name, read, self.input_type)

    def _instruction(self, system: Sequence[str], own: str | None, name: str) -> str | None:
        """Return the texts of system messages, then the item's own instruction.

        Without both it is the default prompt of an embedder; an empty instruction is none.
        """
        texts = [*system, check_text(own, name)] if own and own.strip() else [*system]
        if not texts and own is None and self.sentence_files is not None:
            settings = self.sentence_files.get(SETTINGS, {})
            return (settings.get("prompts") or {}).get(settings.get("default_prompt_name")) or None
        return " ".join(text.strip() for text in texts) or None

    def render(self, item: Item, instruction: str | None = None) -> str:
        """Return the text that the chat template writes of an item, with one placeholder for each image.

        An instruction is the system message, the item is the user's message. If the tokenizer names tokens that
        surround an image, they are added, as InternVL's processor does; for a published embedder also those that the
        tokenizer puts around every text. Special tokens in a text are marked.

        Raises:
            ValueError: The template fails, or it shows another number of images.
        """
        special = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        pattern = "|".join(map(re.escape, sorted([*special, self.image_token], key=len, reverse=True)))

        def content(part: Any) -> dict[str, str]:
            if not isinstance(part, str):
                return {"type": "image"}
            words = re.sub(pattern, lambda token: f"{_MARK}{token[0][::-1]}{_MARK}", part.replace(_MARK, ""))
            return {"type": "text", "text": words}

        messages = [{"role": "user", "content": [content(part) for part in item.parts]}]
        if instruction is not None:
            messages.insert(0, {"role": "system", "content": [content(instruction)]})
        variables: dict[str, Any] = {"ret_token": self.ret_token, "empty_text": "embed"}
        if self.sentence_files is not None:
            kwargs = self.sentence_files.get(TRANSFORMER, {}).get("processing_kwargs", {})
            variables = kwargs.get("chat_template", {})
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, chat_template=str(self.chat_template), tokenize=False, **variables
            )
        except Exception as error:  # a template can raise any
            problem = f"{type(error).__name__}: {error}"
            raise ValueError(f"the chat template of {self.tokenizer.name_or_path!r} fails: {problem}") from error
        shown, count = text.count(self.image_token), len(item.images)
        if shown != count:
            raise ValueError(f"the chat template shows {shown} of {count} images: {text[:200]!r}")
        named = self.tokenizer.special_tokens_map
        shown_image = f"{named.get('start_image_token', '')}{self.image_token}{named.get('end_image_token', '')}"
        text = text.replace(self.image_token, shown_image)
        bos = self.tokenizer.bos_token  # a text that begins with it is whole, as the library's processors take it
        first, last = ("", "") if bos and text.startswith(bos) else self._ends
        return f"{first}{text}{last}"

    def _tokenize(self, item: Item, instruction: str | None) -> list[list[int]]:
        """Return the token ids of an item's prompt before, between and after its images.

        They are those that the tokenizer gives for the whole prompt, except that special tokens that occur in an
        item's text are read as ordinary words, as `sanitize_control_tokens` of transformers does.
        """
        placeholder = self.tokenizer.convert_tokens_to_ids(self.image_token)
        gaps: list[list[int]] = [[]]
        for index, text in enumerate(self.render(item, instruction).split(_MARK)):
            is_marked = index % 2 == 1
            text = text[::-1] if is_marked else text
            options = {"add_special_tokens": False, "split_special_tokens": is_marked, "verbose": False}
            for token in self.tokenizer(text, **options)["input_ids"]:
                if token == placeholder:
                    gaps.append([])
                else:
                    gaps[-1].append(token)
        return gaps

    def _write(self, item: Item, instruction: str | None, limit: int | None, name: str) -> list[Piece]:
        """Return the pieces of an item's prompt, and of its other views if it has images and texts.

        Each text is truncated to `max_text_length`; then texts, the last first, until the prompt fits.

        Args:
            item: Its texts and, as `Picture`, its images.
            instruction: What to search for.
            limit: Longest prompt in tokens; None truncates nothing.
            name: Of the item.

        Raises:
            ItemError: What cannot be truncated exceeds `limit`.
        """
        item = item.shortened(limit)
        if limit is not None and self.max_text_length is not None:
            for index in range(len(item.parts)):
                item = self._cut(item, instruction, index, limit=self.max_text_length)
        ids = self._tokenize(item, instruction)
        over = 0 if limit is None else sum(image.tokens for image in item.images) + sum(map(len, ids)) - limit
        for index in reversed(range(len(item.parts))):
            while over > 0 and (shorter := self._cut(item, instruction, index, over=over)) is not item:
                over -= sum(map(len, ids))
                item, ids = shorter, self._tokenize(shorter, instruction)
                over += sum(map(len, ids))
        if limit is not None and over > 0:
            taken = f"images, instruction and prompt take {limit + over} tokens, {over} more than max_length={limit}"
            raise ItemError(name, f"{taken}; lower max_pixels, pass fewer images or raise max_length")
        placeholder = self.tokenizer.convert_tokens_to_ids(self.image_token)
        shown = [[placeholder] * image.tokens for image in item.images] + [[]]
        if not item.images or not item.texts:
            return [Piece([*gap, *image], True, True, True) for gap, image in zip(ids, shown, strict=True)]
        pieces = []  # the prompts of the whole item and of its images share the image tokens
        of_images = self._tokenize(Item(tuple(item.images)), instruction)
        for gap, alone, image in zip(ids, of_images, shown, strict=True):
            if gap == alone:
                pieces.append(Piece(gap, fused=True, image=True))
            else:
                pieces += [Piece(gap, fused=True), Piece(alone, image=True)]
            pieces.append(Piece(image, fused=True, image=True))
        (of_texts,) = self._tokenize(Item(tuple(item.texts)), instruction)
        return [*pieces, Piece(of_texts, text=True)]

    def _cut(self, item: Item, instruction: str | None, index: int, limit: int | None = None, over: int = 0) -> Item:
        """Truncate one text to `limit` tokens, or by `over` tokens, to no less than its first token.

        The instruction counts as a part of the first text, but for published embedders.
        """
        text = item.parts[index]
        if not isinstance(text, str):
            return item
        is_first = not Item(item.parts[:index]).texts and self.sentence_files is None
        before = f"{instruction} " if instruction is not None and is_first else ""
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        spans = self.tokenizer(before + text, return_offsets_mapping=True, **options)["offset_mapping"]
        kept = max(1, len(spans) - over if limit is None else limit)
        if kept >= len(spans):
            return item
        logger.warning_once("texts are cut to fit max_length or max_text_length tokens")
        end = max(min(spans[kept - 1][1], spans[kept][0]) - len(before), 1)
        return item if end >= len(text) else Item((*item.parts[:index], text[:end], *item.parts[index + 1 :]))


def _ends(tokenizer: Any) -> tuple[str, str]:
    """Return the special tokens that a tokenizer puts before and after every text."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    tokens, special = tokenizer.convert_ids_to_tokens(encoded["input_ids"]), encoded["special_tokens_mask"]
    return "".join(tokens[: special.index(0)]), "".join(tokens[len(special) - special[::-1].index(0) :])


def _to_tokens(image: Image.Image, side: int) -> Image.Image:
    """Resize an image to 4 to 16,384 whole tokens of `side` pixels, as GME's code does first."""
    tokens = [max(1, round(length / side)) for length in image.size]
    pixels = image.width * image.height
    if tokens[0] * tokens[1] > 16384:
        scale = sqrt(pixels / (16384 * side**2))
        tokens = [int(length / scale / side) for length in image.size]
    elif tokens[0] * tokens[1] < 4:
        scale = sqrt(4 * side**2 / pixels)
        tokens = [ceil(length * scale / side) for length in image.size]
    return image.resize((tokens[0] * side, tokens[1] * side))


def pad_pixels(images: Sequence[Sequence[Picture]], num_tokens: int) -> dict[str, Tensor]:
    """Return the pixel rows of each item as one row of a batch, given the images of each item.

    The names and shapes are such that sentence-transformers' gradient cache cuts the batch along its items. It takes
    `image_grid_thw` for the grids of a flat list of images, and dimension 1 of every tensor for tokens if its size is
    `num_tokens`, the length of the prompts.

    Returns:
        `pixel_values` `(N, P, ...)`, `pixel_attention_mask` `(N, P)` and, for Qwen, `image_grids` `(N, I, 3)`; nothing
        if there are no images.
    """
    first = next((image for some in images for image in some), None)
    if first is None:
        return {}
    rows = [torch.cat([first.pixels[:0], *(image.pixels for image in some)]) for some in images]
    lengths = torch.tensor([len(each) for each in rows])
    pixels = pad_sequence(rows, batch_first=True)
    if pixels.shape[1] == num_tokens:
        pixels = torch.cat([pixels, torch.zeros_like(pixels[:, :1])], dim=1)
    batch = {"pixel_values": pixels, "pixel_attention_mask": torch.arange(pixels.shape[1]) < lengths[:, None]}
    if first.grid is not None:
        none = first.grid[:0]
        grids = [torch.cat([none, *(image.grid for image in some if image.grid is not None)]) for some in images]
        batch["image_grids"] = pad_sequence(grids, batch_first=True)
    return batch
