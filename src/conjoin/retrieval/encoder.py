"""Items in, vectors out: a model and its processor behind one method."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from accelerate.utils import send_to_device
from PIL import Image
from transformers import ProcessorMixin

from conjoin.constants import SAMPLE_MODEL
from conjoin.models.shortcuts import evaluation_mode, use_shortcuts
from conjoin.processing import ImageTextProcessor, MllmRetrieverProcessor
from conjoin.processing.input_types import apply_input_type, check_input_type
from conjoin.processing.item_error import ItemError
from conjoin.processing.item_images import image_pixels
from conjoin.processing.item_inputs import ImageSource, check_list, instructions_of, item_names, item_parts
from conjoin.progress import progress
from conjoin.retrieval.input_workers import InputWorkers
from conjoin.retrieval.vectors import check_dims, truncate
from conjoin.storage import model_fingerprint, processor_digest

OWN_PROCESSORS = (ImageTextProcessor, MllmRetrieverProcessor)
Processor = ProcessorMixin | Callable[..., Mapping[str, Any]]
Role = Literal["query", "document"]
ROLE_PROMPTS: dict[Role, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}
"""The names of the prompts of a role, as in sentence-transformers: the first that a model has is its prompt."""
BATCH_PIXELS = 2**27
"""Images of a batch that are decoded at one time, in pixels: 400 MB."""


class Inputs(NamedTuple):
    """The model inputs of items.

    Attributes:
        batches: One after the other, each of no more items than a batch.
        counts: The number of embeddings of each item.
    """

    batches: list[dict[str, Any]]
    counts: list[int]


class InputMaker(NamedTuple):
    """Makes model inputs of items of one input type.

    Attributes:
        processor: As `ItemEncoder` takes it.
        input_type: One of `INPUT_TYPES`.
        batch_size: Most items of a batch.
    """

    processor: Processor
    input_type: str
    batch_size: int

    def __call__(
        self, items: Sequence[Any], instructions: Sequence[str | None], ids: Sequence[str | None] | None = None
    ) -> Inputs:
        """Make the inputs of items, each under its instruction; warnings of our processors name their ids.

        Other processors decode all images of a batch before they resize one, as `cat` does, so a batch also ends at
        `BATCH_PIXELS`.
        """
        decodes_one = isinstance(self.processor, OWN_PROCESSORS) and self.input_type != "cat"
        batches: list[dict[str, Any]] = []
        counts: list[int] = []
        batch: list[tuple[Any, str | None, str | None]] = []
        held = 0
        known = ids or [None] * len(items)
        for index, item in enumerate(items):
            parts = apply_input_type(item, self.input_type, f"item {index}")
            counts.append(len(parts))
            for part in parts:
                pixels = 0 if decodes_one else _count_pixels(part)
                if batch and (len(batch) == self.batch_size or held + pixels > BATCH_PIXELS):
                    batches.append(self._batch(batch))
                    batch, held = [], 0
                batch.append((part, instructions[index], known[index]))
                held += pixels
        return Inputs([*batches, self._batch(batch)], counts)

    def _batch(self, named: Sequence[tuple[Any, str | None, str | None]]) -> dict[str, Any]:
        processor: Any = self.processor
        items, instructions, ids = map(list, zip(*named, strict=True))
        more = {} if all(text is None for text in instructions) else {"instruction": instructions}
        if isinstance(processor, OWN_PROCESSORS) and all(own_id is not None for own_id in ids):
            more["ids"] = ids
        return dict(processor(items, **more))


class _NamedItem(NamedTuple):
    name: str
    item: Any
    instruction: str | None
    id: str | None


class _Batch(NamedTuple):
    """A processed batch.

    Attributes:
        inputs: Of the model, for the items that can be used; None without such items.
        unusable: What is wrong with each of the other items, by its index.
        error: What is wrong with the batch although every item can be used alone.
    """

    inputs: Inputs | None = None
    unusable: Mapping[int, ItemError] = {}
    error: ValueError | FileNotFoundError | None = None


class ModelIdentity(NamedTuple):
    """Which model made some vectors: a name for people, a fingerprint for comparison.

    Attributes:
        name: What messages call the model.
        fingerprint: Of its configuration and weights.
        input_type: How items with several images were read; None if there is no such item, or it is not known.
        load_options: The options of `load_encoder` without which the model does not load: `pooling` or `preset`.
    """

    name: str
    fingerprint: str
    input_type: str | None = None
    load_options: Mapping[str, str] = {}

    def __str__(self) -> str:
        return f"{self.name!r} (fingerprint {self.fingerprint[:12]})"


def recorded_identity(metadata: Mapping[str, Any]) -> ModelIdentity:
    """The model that the metadata of a collection record."""
    key, details = metadata["key"], metadata["details"]
    input_type = key["input_type"] if details["several"] else None
    return ModelIdentity(details["model"], key["fingerprint"], input_type, details["load_options"])


class EncoderOutput(NamedTuple):
    """What `ItemEncoder` reads of a model's output: `embeddings` `(N, D)`."""

    embeddings: torch.Tensor


@runtime_checkable
class DescribedProcessor(Protocol):
    """A processor of another library's model; its `digest` is equal for equal settings."""

    @property
    def digest(self) -> str: ...


class ItemEncoder:
    """Encodes lists of items of any modality with one model; `load_encoder` makes one of any model.

    Args:
        model: Any model with a `config` whose `model(**batch).embeddings` are `(N, D)`, float and L2-normalised.
        processor: `processor(items)` returns the batch, a dict of tensors, or of containers of tensors. When there is
            an instruction it is called as `processor(items, instruction=[...])`, one text or None per item.
        batch_size: Items per forward pass.
        device: Where to run; the model is moved there. `None` leaves it where it is.
        dtype: Run under autocast to this type, e.g. `torch.bfloat16`; `None` computes as the weights are.
        num_workers: Processes that decode images and tokenise ahead of the model; 0 does it in this one. They start
            with the first call of `encode` and stay until the encoder is deleted.
        name: What error messages and manifests call the model; its class by default.
        input_type: How an item with several images is embedded: `"seq"` (images and texts in their order, for models
            that take interleaved items), `"cat"` (the images concatenated into one picture, the texts joined) or
            `"avg"` (the mean of the embeddings of each image with its text, L2-normalised). None for what the
            processor was saved with, else `"seq"`.
        dims: Keep this many leading numbers of each vector, L2-normalised again (Matryoshka); all when None.
        load_options: As for `ModelIdentity`.
    """

    def __init__(
        self,
        model: "torch.nn.Module",
        processor: Processor,
        batch_size: int = 32,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_workers: int = 0,
        name: str | None = None,
        input_type: str | None = None,
        dims: int | None = None,
        load_options: Mapping[str, str] = {},
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if dims is not None and dims < 1:
            raise ValueError(f"dims must be at least 1, got {dims}")
        self.dims, self.load_options = dims, load_options
        self.model: Any = model
        self.input_type = _own_input_type(processor) if input_type is None else check_input_type(input_type)
        self.processor = _in_sequence(processor)
        self.batch_size = batch_size
        self.device = torch.device(device) if device is not None else next(model.parameters()).device
        self.dtype = dtype
        self.num_workers = num_workers
        self._workers: tuple[tuple[Any, ...], InputWorkers] | None = None
        self.name = name if name is not None else type(model).__name__
        torch.nn.Module.to(model, self.device)
        use_shortcuts(model)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over configuration and weights, wherever the model is stored.

        Computed once: make a new encoder after changing the weights.
        """
        return model_fingerprint(self.model)

    @property
    def identity(self) -> ModelIdentity:
        """Name and fingerprint, as collections record them."""
        return ModelIdentity(self.name, self.fingerprint, load_options=self.load_options)

    @cached_property
    def processing(self) -> str | None:
        """A fingerprint of what the processor makes of items; None if it does not say."""
        if isinstance(self.processor, ProcessorMixin):
            return processor_digest(self.processor)
        return self.processor.digest if isinstance(self.processor, DescribedProcessor) else None

    @cached_property
    def dimension(self) -> int:
        """Length of an embedding, found by encoding one word; a blank picture, if the model takes no words."""
        try:
            return int(self.encode(["dimension"]).shape[1])
        except ValueError:
            return int(self.encode([Image.new("RGB", (32, 32))]).shape[1])

    @property
    def prompts(self) -> Mapping[str, str]:
        """The model's own prompts by name; `query` and `document` are empty if not given, as in the library."""
        own = getattr(self.processor, "prompts", None) or {}
        return {"query": "", "document": "", **own} if isinstance(self.processor, OWN_PROCESSORS) else own

    @property
    def is_symmetric(self) -> bool:
        """Whether queries and documents are encoded alike."""
        return self.prompt_of("query") == self.prompt_of("document")

    def prompt_of(self, role: Role | None, prompt: str | None = None, prompt_name: str | None = None) -> str | None:
        """Return the prompt of items: the one given or named, else the model's own of the role.

        None stands for the default prompt of the model, if it has one.

        Args:
            role: What the items are; None if they are neither queries nor documents.
            prompt: The prompt itself.
            prompt_name: Its name among the model's `prompts`.

        Raises:
            ValueError: Both are given, or the model has no prompt of this name.
        """
        if prompt is not None and prompt_name is not None:
            raise ValueError(f"got prompt={prompt!r} and prompt_name={prompt_name!r}; pass one of them")
        if prompt_name is not None and prompt_name not in self.prompts:
            raise ValueError(f"{self.name!r} has no prompt {prompt_name!r}; its prompts are {[*self.prompts]}")
        if prompt is not None:
            return prompt
        names = (prompt_name,) if prompt_name is not None else ROLE_PROMPTS[role] if role is not None else ()
        return next((self.prompts[name] for name in names if name in self.prompts), None)

    def encode_query(self, items: Sequence[Any], ids: Sequence[str] | None = None, **options: Any) -> np.ndarray:  # noqa: ANN401
        """Encode queries: as `encode`, with the model's prompt `query` and its side for queries, if it has any."""
        return self.encode(items, ids, role="query", **options)

    def encode_document(self, items: Sequence[Any], ids: Sequence[str] | None = None, **options: Any) -> np.ndarray:  # noqa: ANN401
        """Encode what queries search: as `encode`, with the prompt `document`, `passage` or `corpus` of the model."""
        return self.encode(items, ids, role="document", **options)

    def encode(
        self,
        items: Sequence[Any],
        ids: Sequence[str] | None = None,
        show_progress: bool = False,
        on_batch: Callable[[int], object] | None = None,
        *,
        on_unusable: Callable[[int, ItemError], object] | None = None,
        **options: Any,  # noqa: ANN401 - see `encode_batches`
    ) -> np.ndarray:
        """Encode items into vectors, in the order given.

        Args:
            items: Strings, images (PIL, arrays or tensors), `{"text", "image"}` or chat messages, in any mix.
            ids: Names to report in error messages instead of positions.
            show_progress: Show a progress bar.
            on_batch: Called with the number of items done after every batch.
            on_unusable: As for `encode_batches`; the vector of such an item is NaN.
            options: `prompt`, `prompt_name` and `role` of `encode_batches`.

        Returns:
            `(N, D)` float32, L2-normalised.

        Raises:
            TypeError: `items` is a single item rather than a list.
            ItemError: An item cannot be read or has a vector that is not finite; `MissingFileError` without its file.
            ValueError: There are no items, another number of ids or prompts, or no prompt of this name.
        """
        embeddings = None
        with progress(total=len(items), desc="encoding", unit="item", show=show_progress) as bar:
            for chunk, usable, vectors in self.encode_batches(items, ids, on_unusable=on_unusable, **options):
                if embeddings is None and usable:
                    embeddings = np.full((len(items), vectors.shape[1]), np.nan, dtype=np.float32)
                if embeddings is not None:
                    embeddings[usable] = vectors
                bar.update(len(chunk))
                if on_batch is not None:
                    on_batch(len(chunk))
        return np.full((len(items), self.dimension), np.nan, np.float32) if embeddings is None else embeddings

    def encode_batches(
        self,
        items: Sequence[Any],
        ids: Sequence[str] | None = None,
        *,
        prompt: str | Sequence[str | None] | None = None,
        prompt_name: str | None = None,
        role: Role | None = None,
        on_unusable: Callable[[int, ItemError], object] | None = None,
    ) -> Iterator[tuple[list[int], list[int], np.ndarray]]:
        """Encode items batch by batch: the positions of the batch, those that can be used, and their vectors `(n, D)`.

        Items of one modality and like length share a batch, which saves padding and idle towers.

        Args:
            items: As for `encode`, which says what is raised.
            ids: Likewise.
            prompt: What stands before each item, or the instruction of a model that follows instructions: one text for
                all items, or one (or None) for each. None for the model's own.
            prompt_name: The name of one of the model's `prompts`, in place of `prompt`.
            role: What the items are; `encode_query` and `encode_document` set it.
            on_unusable: Called with the position of every item that cannot be read and the error, which is raised
                otherwise.
        """
        check_list(items)
        if not items:
            raise ValueError("there are no items to encode")
        names = item_names(len(items), ids)
        if len(names) != len(items):
            raise ValueError(f"got {len(names)} ids for {len(items)} items")
        order = sorted(range(len(items)), key=lambda position: _similarity_key(items[position]), reverse=True)
        chunks = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        one = prompt if isinstance(prompt, str) else None
        own = self.prompt_of(role, one, prompt_name)
        prompts = [own if each is None else each for each in instructions_of(prompt, len(items))]
        known = [None] * len(items) if ids is None else ids
        named = [_NamedItem(*each) for each in zip(names, items, prompts, known, strict=True)]
        batches = self._prepared([[named[position] for position in chunk] for chunk in chunks])
        for chunk, batch in zip(chunks, batches, strict=True):
            usable = _usable(chunk, batch, on_unusable)
            vectors = np.empty((0, 0), dtype=np.float32)
            if batch.inputs is not None:
                with evaluation_mode(self.model):
                    vectors = self._forward(batch.inputs, [names[position] for position in usable], role)
            yield chunk, usable, vectors

    def _prepared(self, batches: list[list[_NamedItem]]) -> Iterator[_Batch]:
        """The processed batches, in order; made by worker processes when there are any."""
        prepare = partial(_process, InputMaker(self.processor, self.input_type, self.batch_size))
        if self.num_workers == 0:
            return map(prepare, batches)
        key = (self.processor, self.input_type, self.batch_size, self.num_workers)
        if self._workers is None or self._workers[0] != key:
            self._workers = key, InputWorkers(prepare, self.num_workers)
        return self._workers[1].map(batches)

    def _embed(self, batch: dict[str, Any], role: Role | None) -> torch.Tensor:
        """The embeddings `(n, D)` of what the processor made of a batch."""
        return self.model(**send_to_device(batch, self.device)).embeddings

    def _forward(self, inputs: Inputs, names: Sequence[str], role: Role | None) -> np.ndarray:
        """Run a batch; returns `(n, D)` float32."""
        autocast = torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None)
        with torch.inference_mode(), autocast:
            parts = [self._embed(batch, role) for batch in inputs.batches]
        embeddings = np.concatenate([part.float().cpu().numpy() for part in parts])
        if embeddings.ndim != 2 or len(embeddings) != sum(inputs.counts):
            raise ValueError(f"{self.name!r} gave embeddings of shape {embeddings.shape} for {len(names)} items")
        embeddings = _mean_embeddings(embeddings, inputs.counts)
        finite = np.isfinite(embeddings).all(axis=1)
        if not finite.all():
            raise ItemError(names[int(finite.argmin())], f"{self.name!r} gave an embedding that is not finite")
        if self.dims is None:
            return embeddings
        check_dims(self.dims, embeddings.shape[1], repr(self.name))
        return truncate(embeddings, self.dims)


def model_name(path: str | Path) -> str:
    """What manifests call a model: the absolute path of a local folder, or the name of a repository on the Hub."""
    return str(Path(path).resolve()) if path != SAMPLE_MODEL and Path(path).is_dir() else str(path)


def _process(make: InputMaker, named: list[_NamedItem]) -> _Batch:
    """Process the usable items; errors are returned: raised in a worker process, they would lose their type."""
    items, instructions, ids = zip(*(each[1:] for each in named), strict=True)
    try:
        return _Batch(make(items, instructions, ids))
    except (ValueError, FileNotFoundError) as error:
        problems = {index: _what_is_wrong(make, each) for index, each in enumerate(named)}
        unusable = {index: wrong for index, wrong in problems.items() if wrong is not None}
        if not unusable:
            return _Batch(error=error)
    usable = [index for index in range(len(named)) if index not in unusable]
    again = _process(make, [named[index] for index in usable]) if usable else _Batch()
    return again._replace(unusable=unusable | {usable[index]: wrong for index, wrong in again.unusable.items()})


def _usable(chunk: Sequence[int], batch: _Batch, on_unusable: Callable[[int, ItemError], object] | None) -> list[int]:
    """Return the positions of the items that can be used, after reporting or raising what is wrong with the others."""
    for index, error in batch.unusable.items():
        if on_unusable is None:
            raise error
        on_unusable(chunk[index], error)
    if batch.error is not None:
        raise batch.error
    return [position for index, position in enumerate(chunk) if index not in batch.unusable]


def _what_is_wrong(make: InputMaker, each: _NamedItem) -> ItemError | None:
    """Return what is wrong with one item, under the name that the caller gave it."""
    try:
        make([each.item], [each.instruction])
    except ItemError as error:
        return type(error)(each.name, error.message)
    except (ValueError, FileNotFoundError) as error:  # of a processor of another package
        return ItemError(each.name, str(error))
    return None


def _similarity_key(item: Any) -> tuple[bool, int]:  # noqa: ANN401
    """Whether an item has an image, and the length of its text: items of like cost are neighbours in this order."""
    if isinstance(item, str):
        return False, len(item)
    if not isinstance(item, Mapping):
        return True, 0
    text = item.get("text")
    return item.get("image") is not None, len(text) if isinstance(text, str) else 0


def _count_pixels(item: Any) -> int:  # noqa: ANN401
    """The pixels of the images of an item, by their headers; the processor judges what cannot be read."""
    try:
        parts = item_parts(item)
    except (ValueError, FileNotFoundError):
        return 0
    return sum(image_pixels(part.source) for part in parts if isinstance(part, ImageSource))


def _own_input_type(processor: Processor) -> str:
    """Return the input type that a processor was saved with; `seq` for those of other packages."""
    return processor.input_type if isinstance(processor, OWN_PROCESSORS) else "seq"


def _in_sequence(processor: Processor) -> Processor:
    """Return a processor that leaves several images as they are, since the encoder applies the input type."""
    if _own_input_type(processor) == "seq":
        return processor
    other: Any = copy.copy(processor)
    other.input_type = "seq"
    return other


def _mean_embeddings(embeddings: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """The means `(N, D)` of the embeddings `(M, D)` of items, L2-normalised; not finite where they cancel out."""
    if len(counts) == len(embeddings):
        return embeddings
    starts = np.cumsum([0, *counts[:-1]])
    sums = np.add.reduceat(embeddings, starts, axis=0)
    with np.errstate(invalid="ignore"):
        means = sums / np.linalg.norm(sums, axis=1, keepdims=True)
    return np.where(np.asarray(counts)[:, None] == 1, embeddings[starts], means)
