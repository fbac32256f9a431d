"""Items in, vectors out: a model and its processor behind one method."""

import copy
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partialmethod
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import send_to_device
from PIL import Image
from transformers import ProcessorMixin

from conjoin.constants import ROLE_PROMPTS, Role
from conjoin.devices import choose_device, choose_dtype
from conjoin.models.shortcuts import evaluation_mode, use_shortcuts
from conjoin.processing import ImageTextProcessor, MllmRetrieverProcessor
from conjoin.processing.input_types import apply_input_type, check_input_type
from conjoin.processing.item_error import ItemError
from conjoin.processing.item_inputs import check_list, is_one_item, item_names, may_have_image
from conjoin.processing.sentence_files import instructions_of
from conjoin.progress import progress
from conjoin.retrieval.notebook import Described
from conjoin.retrieval.vectors import check_truncation, truncate
from conjoin.storage import model_fingerprint, processor_digest

logger = logging.getLogger(__name__)
OWN_PROCESSORS = (ImageTextProcessor, MllmRetrieverProcessor)
Processor = ProcessorMixin | Callable[..., Mapping[str, Any]]


class ModelIdentity(NamedTuple):
    """Which model made some vectors: a name for people, a fingerprint for comparison.

    Attributes:
        name: What messages call the model.
        fingerprint: Of its configuration and weights.
        input_type: How items with several images were read; None if there is no such item, or it is not known.
        load_options: The options of `load_encoder` without which the model does not load: `pooling` or `preset`.
        centers: By kind of the rows, the mean `(D,)` that was subtracted from their vectors, and is from those of
            queries; empty for none.
        precision: `"full"` if it computed as its weights are, else the type that it computed in.
    """

    name: str
    fingerprint: str
    input_type: str | None = None
    load_options: Mapping[str, str] = {}
    centers: Mapping[str, Sequence[float]] = {}
    precision: str = "full"

    def __str__(self) -> str:
        return f"{self.name!r} (fingerprint {self.fingerprint[:12]})"


def recorded_identity(metadata: Mapping[str, Any]) -> ModelIdentity:
    """The model that the metadata of a collection record."""
    key, details = metadata["key"], metadata["details"]
    input_type = key["input_type"] if details["has_multi_image_items"] else None
    centers = details.get("centers", {})
    name, fingerprint, options = details["model"], key["fingerprint"], details["load_options"]
    return ModelIdentity(name, fingerprint, input_type, options, centers, key["precision"])


class ItemEncoder(Described):
    """Encodes lists of items of any modality with one model; `load_encoder` makes one of any model.

    Args:
        model: Any model with a `config` whose `model(**batch).embeddings` are `(N, D)`, float and L2-normalised.
        processor: `processor(items)` returns the batch, a dict of tensors, or of containers of tensors. When there is
            an instruction it is called as `processor(items, instruction=[...])`, one text or None per item. If it has
            a method `reader()`, threads read the images ahead by what this returns (`read(item, name)`), and the
            processor is given the results and the `device`.
        batch_size: Items per forward pass.
        device: Where to run; the model is moved there. `None` leaves it where it is.
        dtype: Run under autocast to this type, such as `"bfloat16"` or `torch.bfloat16`; None and `"float32"` compute
            as the weights are, `"auto"` in bfloat16 if `conjoin.devices.choose_bf16` finds it faster on the device.
        threads: Threads that decode and resize images ahead of the model; as many as the process has cores when None.
        name: What error messages and manifests call the model; its class by default.
        input_type: How an item with several images is embedded: `"seq"` (images and texts in their order, for models
            that take interleaved items), `"cat"` (the images concatenated into one picture, the texts joined) or
            `"avg"` (the mean of the embeddings of each image with its text, L2-normalised). None for what the
            processor was saved with, else `"seq"`; of a model that takes one image, `"avg"`, which the log says.
        truncate_dim: Keep this many leading numbers of each vector, L2-normalised again (Matryoshka); all when None.
        load_options: As for `ModelIdentity`.
    """

    def __init__(
        self,
        model: "torch.nn.Module",
        processor: Processor,
        batch_size: int = 32,
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        *,
        threads: int | None = None,
        name: str | None = None,
        input_type: str | None = None,
        truncate_dim: int | None = None,
        load_options: Mapping[str, str] = {},
    ) -> None:
        _check_positive(batch_size=batch_size, threads=threads, truncate_dim=truncate_dim)
        self.truncate_dim, self.load_options = truncate_dim, load_options
        self.model: Any = model
        self.processor: Any = processor
        own_type = processor.input_type if isinstance(processor, OWN_PROCESSORS) else "seq"
        takes_one = isinstance(processor, ImageTextProcessor) or getattr(processor, "has_messages", True) is False
        self._tells_mean = input_type is None and own_type == "seq" and takes_one
        self.input_type = check_input_type(input_type or ("avg" if self._tells_mean else own_type))
        if own_type != "seq":  # several images are left as they are, since the encoder applies the input type
            self.processor = copy.copy(processor)
            self.processor.input_type = "seq"
        self.batch_size = batch_size
        self.device = torch.device(device) if device is not None else next(model.parameters()).device
        self.dtype = choose_dtype(dtype, self.device)
        self.threads = threads or _cores()
        self.name = name if name is not None else type(model).__name__
        torch.nn.Module.to(model, self.device)
        use_shortcuts(model)

    def facts(self) -> dict[str, Any]:
        """Name, class of the model, device, type of its autocast if it has one, and input type."""
        kind = type(getattr(self.model, "model", self.model)).__name__
        facts = {"name": self.name, "model": kind, "device": str(self.device), "input_type": self.input_type}
        return facts if self.dtype is None else facts | {"dtype": str(self.dtype).removeprefix("torch.")}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over configuration and weights, wherever the model is stored; or the model's own `fingerprint`.

        Computed once: make a new encoder after changing the weights.
        """
        return getattr(self.model, "fingerprint", None) or model_fingerprint(self.model)

    @property
    def identity(self) -> ModelIdentity:
        """Name and fingerprint, as collections record them."""
        precision = "full" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return ModelIdentity(self.name, self.fingerprint, load_options=self.load_options, precision=precision)

    @cached_property
    def processing(self) -> str | None:
        """A fingerprint of what the processor makes of items, or its own `digest`; None if it has none."""
        if isinstance(self.processor, ProcessorMixin):
            return processor_digest(self.processor)
        return getattr(self.processor, "digest", None)

    @cached_property
    def dimension(self) -> int:
        """Length of an embedding, found by encoding one word; a blank picture, if the model takes no words."""
        try:
            return len(self.encode({"text": "dimension"}))
        except ValueError:
            return len(self.encode(Image.new("RGB", (32, 32))))

    @property
    def prompts(self) -> Mapping[str, str]:
        """The model's own prompts by name; `query` and `document` are empty if not given, as in the library."""
        own = getattr(self.processor, "prompts", None) or {}
        return {"query": "", "document": "", **own} if isinstance(self.processor, OWN_PROCESSORS) else own

    @property
    def is_symmetric(self) -> bool:
        """Whether queries and documents are encoded alike."""
        return getattr(self.model, "is_symmetric", True) and self.prompt_of("query") == self.prompt_of("document")

    @property
    def takes_messages(self) -> bool:
        """Whether a prompt is a message of its own before the item, and not a text that the item's text follows."""
        return bool(getattr(self.processor, "has_messages", False))

    @property
    def follows_instructions(self) -> bool:
        """Whether the model is told what to look for: it is of this package, takes messages or ships prompts."""
        return isinstance(self.processor, OWN_PROCESSORS) or self.takes_messages or any(self.prompts.values())

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

    def encode(
        self,
        inputs: Any,  # noqa: ANN401
        prompt_name: str | None = None,
        prompt: str | Sequence[str | None] | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        *,
        precision: str = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: str | torch.device | None = None,
        normalize_embeddings: bool = True,
        truncate_dim: int | None = None,
        ids: Sequence[str] | None = None,
        role: Role | None = None,
        on_unusable: Callable[[int, ItemError], object] | None = None,
    ) -> Any:  # noqa: ANN401
        """Encode items into vectors, in the order given; the arguments are those of sentence-transformers.

        Args:
            inputs: A list of strings, images (PIL, arrays or tensors), `{"text", "image"}` or chat messages, in any
                mix; or one of them alone, as also a list of chat messages, which is one conversation.
            prompt_name: The name of one of the model's `prompts`, in place of `prompt`.
            prompt: As for `encode_batches`.
            batch_size: Items per forward pass; that of the encoder when None.
            show_progress_bar: Show a progress bar; None shows none.
            precision: `"float32"`; the vectors are not quantised here.
            convert_to_numpy: Return an array; False: a list of tensors.
            convert_to_tensor: Return a tensor on the device of the model instead.
            device: Move the model there first.
            normalize_embeddings: False leaves the vectors of other libraries' models as long as they are; those of
                this package are always of unit length.
            truncate_dim: Keep this many leading numbers of each vector; that of the encoder when None.
            ids: Names to report in error messages instead of positions.
            role: What the items are; `encode_query` and `encode_document` set it.
            on_unusable: Called with the position of every item that cannot be read and the error, which is raised
                otherwise; the vector of such an item is NaN.

        Returns:
            `(N, D)` float32; `(D,)` of an item alone.

        Raises:
            ItemError: An item cannot be read or has a vector that is not finite; `MissingFileError` without its file.
            ValueError: There are no items, another number of ids or prompts, no prompt of this name, no such device,
                or another `precision`.
        """
        if precision != "float32":
            raise ValueError(
                f"precision={precision!r}; vectors are float32: quantise them with "
                "sentence_transformers.util.quantize_embeddings, or store a collection as float16"
            )
        if device is not None:
            self.device = choose_device(device)
            torch.nn.Module.to(self.model, self.device)
        is_alone = is_one_item(inputs)
        items = [inputs] if is_alone else inputs
        batches = self.encode_batches(
            items,
            ids,
            prompt=prompt,
            prompt_name=prompt_name,
            role=role,
            batch_size=batch_size,
            normalize_embeddings=normalize_embeddings,
            truncate_dim=truncate_dim,
            on_unusable=on_unusable,
        )
        vectors = None
        with progress(total=len(items), desc="encoding", unit="item", show=bool(show_progress_bar)) as bar:
            for chunk, usable, some in batches:
                if vectors is None and usable:
                    vectors = np.full((len(items), some.shape[1]), np.nan, dtype=np.float32)
                if vectors is not None:
                    vectors[usable] = some
                bar.update(len(chunk))
        if vectors is None:
            vectors = np.full((len(items), truncate_dim or self.dimension), np.nan, np.float32)
        found: Any = vectors
        if convert_to_tensor:
            found = torch.as_tensor(vectors, device=self.device)
        elif not convert_to_numpy:
            found = [*torch.as_tensor(vectors, device=self.device)]
        return found[0] if is_alone else found

    encode_query = partialmethod(encode, role="query")
    """Encode queries: as `encode`, with the model's prompt `query` and its side for queries, if it has any."""
    encode_document = partialmethod(encode, role="document")
    """Encode what queries search: as `encode`, with the prompt `document`, `passage` or `corpus` of the model."""

    def encode_batches(
        self,
        items: Sequence[Any],
        ids: Sequence[str] | None = None,
        *,
        prompt: str | Sequence[str | None] | None = None,
        prompt_name: str | None = None,
        role: Role | None = None,
        batch_size: int | None = None,
        normalize_embeddings: bool = True,
        truncate_dim: int | None = None,
        on_unusable: Callable[[int, ItemError], object] | None = None,
    ) -> Iterator[tuple[list[int], list[int], np.ndarray]]:
        """Encode items batch by batch: the positions of the batch, those that can be used, and their vectors `(n, D)`.

        Items of one modality and like length share a batch, which saves padding and idle towers.

        Args:
            items: A list, as for `encode`, which explains the arguments that are not here and says what is raised.
            ids: Names to report in error messages instead of positions.
            prompt: What stands before each item, or the instruction of a model that follows instructions: one text for
                all items, or one (or None) for each. None for the model's own.
            prompt_name: The name of one of the model's `prompts`, in place of `prompt`.
            role: What the items are.
            batch_size: Items per forward pass.
            normalize_embeddings: Whether the vectors are of unit length.
            truncate_dim: Keep this many leading numbers of each vector.
            on_unusable: Called with the position of every item that cannot be read and the error.

        Raises:
            TypeError: `items` is a single item rather than a list.
        """
        check_list(items)
        size = self.batch_size if batch_size is None else batch_size
        width = self.truncate_dim if truncate_dim is None else truncate_dim
        _check_positive(batch_size=size, truncate_dim=width)
        names = item_names(len(items), ids)
        if len(names) != len(items):
            raise ValueError(f"got {len(names)} ids for {len(items)} items")
        order = sorted(range(len(items)), key=lambda position: _similarity_key(items[position]), reverse=True)
        chunks = [order[start : start + size] for start in range(0, len(order), size)]
        one = prompt if isinstance(prompt, str) else None
        own = self.prompt_of(role, one, prompt_name)
        prompts = [own if each is None else each for each in instructions_of(prompt, len(items))]
        known = [None] * len(items) if ids is None else ids
        waiting: list[Any] = []  # the batch that a GPU computes while the next one is prepared

        def finished() -> tuple[list[int], list[int], np.ndarray]:
            chunk, usable, outputs, counts = waiting.pop(0)
            of = [names[position] for position in usable]
            return chunk, usable, self._vectors(outputs, counts, of, normalize_embeddings, width)

        for chunk, read in zip(chunks, self._read_ahead(items, names, chunks), strict=True):
            rows = [(parts, prompts[position], known[position]) for position, parts in zip(chunk, read, strict=True)]
            inputs, counts, problems = self._prepare(rows, size, role)
            for index, error in problems.items():
                named = type(error)(names[chunk[index]], error.message)
                if on_unusable is None:
                    raise named
                on_unusable(chunk[index], named)
            usable = [position for index, position in enumerate(chunk) if index not in problems]
            if self._tells_mean and max(counts, default=1) > 1:
                self._tells_mean, first = False, names[usable[int(np.argmax(counts))]]
                logger.warning(
                    "%s takes one image; the vector of an item with several, such as %s, is the mean of those of its "
                    "images (input type avg)", self.name, first,
                )  # fmt: skip
            with evaluation_mode(self.model):
                waiting.append((chunk, usable, self._forward(inputs, normalize_embeddings), counts))
            if len(waiting) > 1 or self.device.type == "cpu":
                yield finished()
        if waiting:
            yield finished()

    def similarity(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:  # noqa: ANN401
        """Cosine similarities `(N, M)` of vectors `(N, D)` and `(M, D)`, arrays or tensors."""
        from sentence_transformers.util import cos_sim

        return cos_sim(embeddings1, embeddings2)

    def _read_ahead(
        self, items: Sequence[Any], names: Sequence[str], chunks: Sequence[Sequence[int]]
    ) -> Iterator[list[list[Any] | ItemError]]:
        """Read the items of each chunk: those that are embedded in place of each, or what is wrong with it.

        Threads read images, some chunks ahead; texts are read here.
        """
        make_reader = getattr(self.processor, "reader", None) if any(map(may_have_image, items)) else None
        reader = None if make_reader is None else make_reader()

        def read(position: int) -> list[Any] | ItemError:
            name = names[position]
            try:
                item = items[position]
                parts = apply_input_type(item, self.input_type, name) if may_have_image(item) else [item]
                return parts if reader is None else [reader(part, name) for part in parts]
            except (ValueError, FileNotFoundError) as error:
                return error if isinstance(error, ItemError) else ItemError(name, str(error))

        ahead: deque[list[Future[list[Any] | ItemError] | None]] = deque()
        left, depth = iter(chunks), 1 + 2 * self.threads // len(chunks[0])
        threads = ThreadPoolExecutor(self.threads, "conjoin-read")
        try:
            for chunk in chunks:
                for coming in islice(left, depth + 1 - len(ahead)):
                    ahead.append([threads.submit(read, at) if may_have_image(items[at]) else None for at in coming])
                pairs = zip(chunk, ahead.popleft(), strict=True)
                yield [read(position) if future is None else future.result() for position, future in pairs]
        finally:
            threads.shutdown(cancel_futures=True)

    def _prepare(
        self, rows: Sequence[tuple[list[Any] | ItemError, str | None, str | None]], batch_size: int, role: Role | None
    ) -> tuple[list[dict[str, Any]], list[int], dict[int, ItemError]]:
        """Make the model inputs of items that were read, each with its prompt and its id.

        Returns:
            The inputs, each of at most `batch_size` embeddings; the number of embeddings of each item that can be
            used; and what is wrong with each of the others, by its index.
        """
        problems = {index: parts for index, (parts, *_) in enumerate(rows) if isinstance(parts, ItemError)}
        usable = [index for index in range(len(rows)) if index not in problems]
        counts = [len(rows[index][0]) for index in usable]  # type: ignore[arg-type]
        try:
            return self._inputs([rows[index] for index in usable], batch_size, role), counts, problems
        except (ValueError, FileNotFoundError) as error:
            if len(usable) == 1:
                problem = error if isinstance(error, ItemError) else ItemError("item", str(error))
                return [], [], problems | {usable[0]: problem}
        alone = {index: self._prepare([rows[index]], batch_size, role) for index in usable}
        wrong = {index: found[0] for index, (_, _, found) in alone.items() if found}
        if wrong:
            marked = [(wrong.get(index, parts), *more) for index, (parts, *more) in enumerate(rows)]
            return self._prepare(marked, batch_size, role)  # type: ignore[arg-type]
        return [batch for inputs, _, _ in alone.values() for batch in inputs], counts, problems

    def _inputs(self, rows: Sequence[Any], batch_size: int, role: Role | None) -> list[dict[str, Any]]:
        flat = [(part, prompt, id_) for parts, prompt, id_ in rows for part in parts]
        inputs = []
        for start in range(0, len(flat), batch_size):
            items, prompts, ids = map(list, zip(*flat[start : start + batch_size], strict=True))
            more: dict[str, Any] = {"instruction": prompts} if any(each is not None for each in prompts) else {}
            if isinstance(self.processor, OWN_PROCESSORS) and all(each is not None for each in ids):
                more["ids"] = ids  # which its warnings name
            if getattr(self.processor, "takes_role", False):
                more["role"] = role
            if hasattr(self.processor, "reader"):
                more["device"] = self.device
            inputs.append(dict(self.processor(items, **more)))
        return inputs

    def _forward(self, inputs: Sequence[dict[str, Any]], normalize: bool) -> list[torch.Tensor]:
        """Run a batch; returns its embeddings, on the device, which may still compute them."""
        autocast = torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None)
        with torch.inference_mode(), autocast:
            outputs = [self.model(**send_to_device(batch, self.device)) for batch in inputs]
        is_raw = not normalize and not isinstance(self.processor, OWN_PROCESSORS)
        return [(output.pooler_output if is_raw else output.embeddings).float() for output in outputs]

    def _vectors(
        self,
        parts: Sequence[torch.Tensor],
        counts: Sequence[int],
        names: Sequence[str],
        normalize: bool,
        width: int | None,
    ) -> np.ndarray:
        """The vectors `(n, D)` float32 of a batch: of an item with several embeddings their mean, L2-normalised."""
        if not parts:
            return np.empty((0, 0), dtype=np.float32)
        embeddings = np.concatenate([part.cpu().numpy() for part in parts])
        if embeddings.ndim != 2 or len(embeddings) != sum(counts):
            raise ValueError(f"{self.name!r} gave embeddings of shape {embeddings.shape} for {len(names)} items")
        if len(counts) < len(embeddings):
            sums = np.add.reduceat(embeddings, np.cumsum([0, *counts[:-1]]), axis=0)
            with np.errstate(invalid="ignore"):  # they may cancel out
                means = sums / np.linalg.norm(sums, axis=1, keepdims=True)
            embeddings = np.where(np.asarray(counts)[:, None] == 1, sums, means)
        finite = np.isfinite(embeddings).all(axis=1)
        if not finite.all():
            raise ItemError(names[int(finite.argmin())], f"{self.name!r} gave an embedding that is not finite")
        if width is None:
            return embeddings
        check_truncation(width, embeddings.shape[1], repr(self.name))
        return truncate(embeddings, width) if normalize else embeddings[:, :width]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_positive(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def model_name(path: str | Path) -> str:
    """What manifests call a model: the absolute path of a local folder, or the name of a repository on the Hub."""
    return str(Path(path).resolve()) if Path(path).is_dir() else str(path)


def _similarity_key(item: Any) -> tuple[bool, int]:  # noqa: ANN401
    """Whether an item has an image, and the length of its text: items of like cost are neighbours in this order."""
    if isinstance(item, str):
        return False, len(item)
    if not isinstance(item, Mapping):
        return True, 0
    text = item.get("text")
    return item.get("image") is not None, len(text) if isinstance(text, str) else 0
