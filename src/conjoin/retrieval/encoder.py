"""Items in, vectors out: a model and its processor behind one method."""

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from conjoin.ops import choose_device
from conjoin.processing.item_inputs import parse_item

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin

_INCIDENTAL_CONFIG_KEYS = frozenset({"transformers_version", "dtype", "torch_dtype", "architectures", "auto_map"})

_Batch = dict[str, torch.Tensor] | ValueError | FileNotFoundError


class ModelIdentity(NamedTuple):
    """Which model made some vectors: a name for people, a fingerprint for comparison."""

    name: str
    fingerprint: str

    def __str__(self) -> str:
        return f"{self.name!r} (fingerprint {self.fingerprint[:12]})"


class ItemEncoder:
    """Encodes lists of items of any modality with one model.

    Args:
        model: Any model whose `model(**batch).embeddings` are `(N, D)`, float and L2-normalised.
        processor: `processor(items)` returns the batch, every tensor with the items as its first dimension.
        batch_size: Items per forward pass.
        device: Where to run; the model is moved there. `None` leaves it where it is.
        dtype: Run under autocast to this type, e.g. `torch.bfloat16`; `None` computes as the weights are.
        num_workers: Processes that decode images and tokenise ahead of the model; 0 does it in this one.
        name: What error messages and manifests call the model; its class by default.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        processor: "ProcessorMixin",
        batch_size: int = 32,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_workers: int = 0,
        name: str | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.model = model
        self.processor = processor
        self.batch_size = batch_size
        self.device = torch.device(device) if device is not None else next(model.parameters()).device
        self.dtype = dtype
        self.num_workers = num_workers
        self.name = name if name is not None else type(model).__name__
        torch.nn.Module.to(model, self.device)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        batch_size: int = 32,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_workers: int = 0,
    ) -> "ItemEncoder":
        """Load a saved model and its processor, running the model code that lies beside the weights.

        Args:
            path: A local folder or the name of a repository on the Hub.
            batch_size: As for the class.
            device: As for the class, but `None` takes a GPU when there is one.
            dtype: As for the class.
            num_workers: As for the class.

        Raises:
            FileNotFoundError: There is no such model.
            ValueError: Its weights are damaged, or there is no such `device`.
        """
        from transformers import AutoModel, AutoProcessor

        device = choose_device(device)
        with loading(path):
            model = AutoModel.from_pretrained(path, trust_remote_code=True)
            processor = AutoProcessor.from_pretrained(path, trust_remote_code=True)
        name = str(Path(path).resolve()) if Path(path).is_dir() else str(path)
        return cls(model, processor, batch_size, device, dtype, num_workers=num_workers, name=name)

    def with_processor(self, processor: Callable[..., Any]) -> "ItemEncoder":
        """The same model behind another processor."""
        other = copy.copy(self)
        other.processor = processor  # type: ignore[assignment]
        return other

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over configuration and weights, wherever the model is stored.

        Computed once: make a new encoder after changing the weights.
        """
        config = _essential(self.model.config.to_dict())
        digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    @property
    def identity(self) -> ModelIdentity:
        """Name and fingerprint, as stores and indexes record them."""
        return ModelIdentity(self.name, self.fingerprint)

    @cached_property
    def dimension(self) -> int:
        """Length of an embedding, found by encoding one word; a blank picture, if the model takes no words."""
        try:
            return int(self.encode(["dimension"]).shape[1])
        except ValueError:
            return int(self.encode([Image.new("RGB", (32, 32))]).shape[1])

    def encode(
        self,
        items: Sequence[Any],
        ids: Sequence[str] | None = None,
        show_progress: bool = False,
        on_batch: Callable[[int], object] | None = None,
    ) -> np.ndarray:
        """Encode items into vectors, in the order given.

        Items of one modality and like length share a batch, which saves padding and idle towers.

        Args:
            items: Strings, PIL images, `{"text", "image"}` or chat messages, mixed as you like.
            ids: Names to report in error messages instead of positions.
            show_progress: Show a progress bar.
            on_batch: Called with the number of items done after every batch.

        Returns:
            `(N, D)` float32.

        Raises:
            TypeError: `items` is a single item rather than a list.
            ValueError: No items, an item that cannot be read (the message names it), or a vector that is not finite.
            FileNotFoundError: An image path that does not exist.
        """
        if isinstance(items, str | bytes | Mapping | Image.Image):
            raise TypeError(f"expected a list of items, got one {type(items).__name__}; wrap it in a list")
        if not items:
            raise ValueError("there are no items to encode")
        names = [f"item {position}" for position in range(len(items))] if ids is None else [f"item {i!r}" for i in ids]
        if len(names) != len(items):
            raise ValueError(f"got {len(names)} ids for {len(items)} items")
        order = sorted(range(len(items)), key=lambda position: _similarity_key(items[position]), reverse=True)
        chunks = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        batches = self._prepared([[items[position] for position in chunk] for chunk in chunks])
        rows: list[np.ndarray] = []
        progress = tqdm(total=len(items), desc="encoding", unit="item", disable=not show_progress)
        with _evaluation_mode(self.model), progress as bar:
            for chunk in chunks:
                rows.append(self._forward(batches, [(names[position], items[position]) for position in chunk]))
                bar.update(len(chunk))
                if on_batch is not None:
                    on_batch(len(chunk))
        embeddings = np.empty((len(items), rows[0].shape[1]), dtype=np.float32)
        embeddings[order] = np.concatenate(rows)
        return embeddings

    def _prepared(self, batches: list[list[Any]]) -> Iterator[_Batch]:
        """The processed batches, in order; made by worker processes when there are any."""
        prepare = partial(_process, self.processor)
        if self.num_workers == 0:
            return map(prepare, batches)
        own_generator = torch.Generator()  # the loader would otherwise draw from the global one
        return iter(
            DataLoader(
                batches,  # type: ignore[arg-type]
                batch_size=None,
                collate_fn=prepare,
                num_workers=min(self.num_workers, len(batches)),
                generator=own_generator,
            )
        )

    def _forward(self, batches: Iterator[_Batch], named: list[tuple[str, Any]]) -> np.ndarray:
        """Run the next batch, which holds the items `named`; returns `(n, D)` float32."""
        batch = next(batches)
        if isinstance(batch, Exception):
            for name, item in named:
                self._check_alone(name, item)
            raise batch
        autocast = torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None)
        with torch.inference_mode(), autocast:
            output = self.model(**{key: value.to(self.device) for key, value in batch.items()})
        embeddings = output.embeddings.float().cpu().numpy()
        if embeddings.ndim != 2 or len(embeddings) != len(named):
            raise ValueError(f"{self.name!r} gave embeddings of shape {embeddings.shape} for {len(named)} items")
        finite = np.isfinite(embeddings).all(axis=1)
        if not finite.all():
            raise ValueError(f"{named[int(finite.argmin())][0]}: {self.name!r} gave an embedding that is not finite")
        return embeddings

    def _check_alone(self, name: str, item: Any) -> None:  # noqa: ANN401
        """Raise what is wrong with one item, under its own name instead of its place in the batch."""
        parse_item(item, name)
        try:
            self.processor([item])
        except ValueError as error:
            raise ValueError(f"{name}: {str(error).removeprefix('item 0: ')}") from error


@contextmanager
def loading(path: str | Path) -> Iterator[None]:
    """Name the model in whatever goes wrong while it is loaded.

    Raises:
        FileNotFoundError: There is no such model, or a part of it is missing.
        ValueError: Its weights are damaged, or it is of another kind than expected.
    """
    try:
        yield
    except OSError as error:
        where = "" if Path(path).exists() else "there is no such folder, and on the hub: "
        raise FileNotFoundError(f"cannot load the model {str(path)!r}: {where}{error}") from error
    except SafetensorError as error:
        raise ValueError(f"the weights of the model {str(path)!r} are truncated or damaged: {error}") from error
    except ValueError as error:
        raise ValueError(f"cannot load the model {str(path)!r}: {error}") from error


def _process(processor: Callable[[list[Any]], Mapping[str, torch.Tensor]], items: list[Any]) -> _Batch:
    """The batch, or what is wrong with it: raised in a worker process, an error would lose its type and its words."""
    try:
        return dict(processor(items))
    except (ValueError, FileNotFoundError) as error:
        return error


def _essential(config: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Drop what depends on where and by which version a configuration was saved."""
    if isinstance(config, Mapping):
        return {
            str(key): _essential(value)
            for key, value in config.items()
            if str(key) not in _INCIDENTAL_CONFIG_KEYS and not str(key).startswith("_")
        }
    return [_essential(value) for value in config] if isinstance(config, list | tuple) else config


def _similarity_key(item: Any) -> tuple[bool, int]:  # noqa: ANN401
    """Whether an item has an image, and the length of its text: sorting by it puts like beside like."""
    if isinstance(item, str):
        return False, len(item)
    if not isinstance(item, Mapping):
        return True, 0
    text = item.get("text")
    return item.get("image") is not None, len(text) if isinstance(text, str) else 0


@contextmanager
def _evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode, undone module by module afterwards (some parts may be frozen in evaluation mode)."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
