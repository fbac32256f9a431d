"""The processor of the MLLM retriever: items become prompts that end in the readout token."""

import json
from collections.abc import Mapping, Sequence
from math import ceil, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, BatchFeature

from .item_error import ItemError
from .item_images import load_image, process_image
from .item_inputs import Item, check_text, item_names, parse_item
from .mllm_prompts import Piece, Prompt, PromptWriter
from .sentence_files import OFF, SETTINGS, TRANSFORMER, SentenceFilesMixin, check_call, instructions_of

REQUEST = "Summarize above {} in one word: "
"""The request of every prompt (PUMA, after LamRA); `{}` is "image", "sentence" or "image and sentence"."""
_CHATML = {"start": "<|im_start|>user\n", "end": "<|im_end|>\n<|im_start|>assistant\n", "request": REQUEST}
_QWEN = _CHATML | {"image": "<|vision_start|><|image_pad|><|vision_end|>"}
_SYSTEM = {"start": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"}
TEMPLATES = {
    "internvl": _CHATML | {"image": "<IMG_CONTEXT>\n"},  # its processor adds <img> and </img>
    "llava": {"start": "<s>USER: ", "image": "<image>\n", "end": "ASSISTANT: ", "request": REQUEST},
    "qwen2_5_vl": _QWEN | _SYSTEM,
    "qwen2_vl": _QWEN | _SYSTEM,
    "qwen3_vl": _QWEN,
}
"""The text around the parts of an item, and what stands for an image, by architecture."""


class Picture(NamedTuple):
    """An image: its pixel rows `(P, ...)`, for Qwen its patch grid `(1, 3)`, and its number of tokens."""

    pixels: Tensor
    grid: Tensor | None
    tokens: int


def retriever_template(start: str, image: str, request: str, end: str) -> str:
    """Return the chat template, in Jinja, of a retriever without one of its own.

    Args:
        start: What precedes the item.
        image: What stands for an image.
        request: Follows the item; `{}` becomes "image", "sentence" or "image and sentence".
        end: Precedes the readout token.
    """
    texts = {"start": start, "image": image, "request": request, "end": end}
    head = "".join(f"{{%- set {name} = {json.dumps(text)} -%}}\n" for name, text in texts.items())
    return head + Path(__file__).with_name("retriever.jinja").read_text(encoding="utf-8")


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
        chat_template: What writes the prompts, in Jinja; `from_mllm` makes it.
        empty_text: `"error"`, or `"embed"` to embed an item that is an empty text: its prompt then has an empty line.
            An empty text beside an image is left out.
        input_type: How an item with several images is read: `"seq"` (images and texts in their order), or `"cat"` (the
            images concatenated into one picture, then the texts joined).
        prompts: Instructions by name, which sentence-transformers reads: `encode_query` uses `query`,
            `encode_document` uses `document`; those of `sentence_files` when None.
        resize_first: Resize each image to whole tokens, 4 to 16,384 of them, before the image processor resizes it to
            its own limits (GME).
        sentence_files: Of a published embedder, the content of the files by which sentence-transformers reads it, by
            path. `chat_template` is then its own, and an item without an instruction gets its default prompt, if it
            has one. See `conjoin.hub.load_embedder`.

    Raises:
        ValueError: The tokenizer does not know the image token or the readout token, there is no template, or an
            option is out of range.
    """

    def __init__(
        self,
        image_processor: Any = None,  # noqa: ANN401
        tokenizer: Any = None,  # noqa: ANN401
        image_token: str = "<|image_pad|>",
        ret_token: str | None = "[RET]",
        tokens_per_picture: int | None = None,
        max_length: int | None = None,
        chat_template: str | None = None,
        max_text_length: int | None = None,
        empty_text: str = "error",
        input_type: str = "seq",
        prompts: dict[str, str] | None = None,
        resize_first: bool = False,
        sentence_files: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        if not chat_template:
            raise ValueError("chat_template is missing: MllmRetrieverProcessor.from_mllm of conjoin writes one")
        self.sentence_files = sentence_files
        own_prompts = (sentence_files or {}).get(SETTINGS, {}).get("prompts")
        self.set_options(empty_text, input_type, own_prompts if prompts is None else prompts)
        self.image_token = image_token
        self.ret_token = ret_token
        self.tokens_per_picture = tokens_per_picture
        self.max_length = max_length
        self.max_text_length = max_text_length
        self.resize_first = resize_first
        if max_text_length is not None and max_text_length < 1:
            raise ValueError(f"max_text_length={max_text_length} must be at least 1")
        for token in (image_token, ret_token):
            if token is not None and token not in tokenizer.get_vocab():
                raise ValueError(
                    f"{token!r} is not a token of this tokenizer ({len(tokenizer)} tokens): was it changed? "
                    "MllmRetrieverProcessor.from_mllm makes a matching one"
                )

    @classmethod
    def from_mllm(
        cls,
        checkpoint: str | Path,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        ret_token: str | None = "[RET]",
        revision: str | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> "MllmRetrieverProcessor":
        """Build the processor of a pretrained MLLM and add the readout token to its tokenizer.

        Args:
            checkpoint: A folder or the name of a repository on the Hub; no video processor is read.
            min_pixels: Smaller images are enlarged to this many pixels (Qwen; PUMA: `4 * 28 * 28`).
            max_pixels: Larger images are reduced to this many pixels (Qwen; PUMA: `300 * 28 * 28`).
            ret_token: As for the class.
            revision: Branch, tag or commit on the Hub.
            kwargs: Other arguments of the class. `max_length` defaults to the language model's number of positions,
                `chat_template` to the retriever's own, see `TEMPLATES`.

        Raises:
            ValueError: The architecture is unknown, its resolution is fixed but pixel limits are given, or not
                `0 < min_pixels <= max_pixels`.
        """
        options: dict[str, Any] = {"trust_remote_code": False, "revision": revision}
        config = AutoConfig.from_pretrained(checkpoint, **options)
        if config.model_type not in TEMPLATES:
            raise ValueError(f"{config.model_type!r} is not a supported MLLM; expected one of {sorted(TEMPLATES)}")
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, **options)
        if ret_token is not None:
            tokenizer.add_tokens([ret_token], special_tokens=True)
        image_processor = AutoImageProcessor.from_pretrained(checkpoint, **options)
        if config.model_type.startswith("qwen"):
            limits = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
            size = dict(image_processor.size) | {name: value for name, value in limits.items() if value is not None}
            least, most = size["shortest_edge"], size["longest_edge"]
            if not 0 < least <= most:
                raise ValueError(f"min_pixels={least}, max_pixels={most}; expected 0 < min_pixels <= max_pixels")
            image_processor.size = size
        else:
            kwargs.setdefault("tokens_per_picture", config.image_seq_length)
            if min_pixels is not None or max_pixels is not None:
                raise ValueError(f"{config.model_type!r} has a fixed resolution; omit min_pixels and max_pixels")
        kwargs["chat_template"] = kwargs.get("chat_template") or retriever_template(**TEMPLATES[config.model_type])
        if kwargs.get("max_length") is None:  # some tokenizers have no limit
            kwargs["max_length"] = config.get_text_config().max_position_embeddings
        image_token = tokenizer.convert_ids_to_tokens([config.image_token_id])[0]
        return cls(image_processor, tokenizer, image_token=image_token, ret_token=ret_token, **kwargs)

    @property
    def model_input_names(self) -> list[str]:
        """Names of the tensors that a batch may hold."""
        names = ["input_ids", "attention_mask", "pixel_values", "pixel_attention_mask", "image_grids"]
        return [*names, "image_view_mask", "text_view_mask", "image_mask", "text_mask"]

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
    ) -> BatchFeature:
        """Prepare `N` items.

        Args:
            items: Strings, images (PIL, arrays or tensors), paths, `{"image", "text"}` dicts or chat messages, in any
                mix, each with any number of images. A system message is the item's instruction.
            instruction: What to search for, e.g. `"Find an image that matches the caption."`: one for all items, or
                one for each. It precedes the first text.
            ids: Names to report in error messages.
            max_length: Overrides the processor's.
            padding: False pads no prompt; the prompts must then have equally many tokens.
            truncation: False cuts no text.
            return_tensors: `"pt"`; accepted for interface compatibility.

        Returns:
            `input_ids` and `attention_mask` `(N, T)`; when any item has an image `pixel_values` `(N, P, ...)`,
            pixel rows padded per item, `pixel_attention_mask` `(N, P)` and, for Qwen, `image_grids` `(N, I, 3)`; when
            the batch has images and texts `image_view_mask` and `text_view_mask` `(N, T)`; `image_mask` / `text_mask`
            `(N,)` when some items lack it.

        Raises:
            TypeError: `items` is a single item rather than a list.
            ValueError: An item cannot be used, its images exceed `max_length`, or an option is invalid.
        """
        check_call(items, return_tensors)
        names = item_names(len(items), ids)
        pairs = zip(items, instructions_of(instruction, len(items)), names, strict=True)
        read = [self._read_item(*each) for each in pairs]
        parsed = [item for item, _ in read]
        prompts = [
            Prompt(tuple(part if isinstance(part, str) else None for part in item.parts), told or None)
            for item, told in read
        ]
        longest = self.tokenizer.model_max_length
        limit = min(next(given for given in (max_length, self.max_length, longest) if given is not None), longest)
        limits = {} if truncation in OFF else {"max_length": limit, "max_text_length": self.max_text_length}
        image_lengths = [[image.tokens for image in item.images] for item in parsed]
        written = self.prompt_writer().write(prompts, image_lengths, names, **limits)
        for name, pieces in zip(names, written, strict=True):
            if not any(piece.ids for piece in pieces):
                raise ItemError(name, "the prompt is empty: this model adds nothing to a text, and the text is empty")
        if padding in OFF and len({sum(len(piece.ids) for piece in pieces) for pieces in written}) > 1:
            raise ValueError(f"padding={padding!r}, but the prompts differ in length; pass items one by one")
        batch = self._pad(written)
        batch |= pad_pixels([item.images for item in parsed], batch["input_ids"].shape[1])
        has = {"image": [bool(item.images) for item in parsed], "text": [bool(item.texts) for item in parsed]}
        if not all(any(flags) for flags in has.values()):  # one modality: its view is the whole item
            return BatchFeature({name: value for name, value in batch.items() if not name.endswith("_view_mask")})
        return BatchFeature(
            batch | {f"{name}_mask": torch.tensor(flags) for name, flags in has.items() if not all(flags)}
        )

    def prompt_writer(self) -> PromptWriter:
        """Return what writes the prompts: the template with its variables."""
        options: dict[str, Any] = {"empty_text": "embed", "ret_token": self.ret_token}  # items are checked already
        of_embedder = self.sentence_files is not None
        if of_embedder:
            kwargs = (self.sentence_files or {}).get(TRANSFORMER, {}).get("processing_kwargs", {})
            others = ("restore_suffix", "padding", "truncation", "max_length")  # which are no variables
            options = {name: value for name, value in kwargs.get("chat_template", {}).items() if name not in others}
        return PromptWriter(self.tokenizer, str(self.chat_template), options, self.image_token, of_embedder)

    def _read_item(self, value: Any, asked: str | None, name: str) -> tuple[Item, str | None]:  # noqa: ANN401
        """Return an item without system messages, and its instruction: these, then what is asked.

        Without both it is the default prompt of an embedder; an empty instruction is none.
        """
        told: list[str] = []
        if isinstance(value, list | tuple) and all(isinstance(message, Mapping) for message in value):
            spoken = [message for message in value if message.get("role") == "system"]
            if spoken:
                value = [message for message in value if message.get("role") != "system"]
                system = parse_item(spoken, name)
                if system.images:
                    raise ItemError(name, "an image in a system message; expected texts, which are the instruction")
                told += system.texts
        item = parse_item(value, name, self._read_image, self.empty_text, self.input_type)
        if asked and asked.strip():
            told.append(check_text(asked, name))
        if not told and asked is None and self.sentence_files is not None:
            settings = self.sentence_files.get(SETTINGS, {})
            return item, (settings.get("prompts") or {}).get(settings.get("default_prompt_name"))
        return item, " ".join(text.strip() for text in told)

    def _read_image(self, source: Any, name: str) -> Picture:  # noqa: ANN401
        """Run the image processor on one image."""
        if self.resize_first:
            side = self.image_processor.patch_size * self.image_processor.merge_size
            source = _to_tokens(load_image(source, name), side)
        output = process_image(self.image_processor, source, name)
        pixels, grid = output["pixel_values"], output.get("image_grid_thw")
        if grid is not None:
            return Picture(pixels, grid, len(pixels) // self.image_processor.merge_size**2)
        if self.tokens_per_picture is None:
            raise ValueError("tokens_per_picture is None, but this image processor returns no patch grid")
        return Picture(pixels, None, len(pixels) * self.tokens_per_picture)

    def _pad(self, prompts: list[list[Piece]]) -> dict[str, Tensor]:
        """Return ids `(N, T)`, padded on the tokenizer's padding side, and the mask of each view."""
        rows = {"input_ids": [torch.tensor([token for piece in prompt for token in piece.ids]) for prompt in prompts]}
        for name, view in (("attention_mask", "fused"), ("image_view_mask", "image"), ("text_view_mask", "text")):
            rows[name] = [
                torch.tensor([int(view in piece.views) for piece in prompt]).repeat_interleave(
                    torch.tensor([len(piece.ids) for piece in prompt])
                )
                for prompt in prompts
            ]
        padding = {"input_ids": self.tokenizer.pad_token_id or 0}
        return {
            name: pad_sequence(
                values, batch_first=True, padding_value=padding.get(name, 0), padding_side=self.tokenizer.padding_side
            )
            for name, values in rows.items()
        }


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
