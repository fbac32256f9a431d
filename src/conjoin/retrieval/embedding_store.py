"""Embeddings on disk: numbered shards of vectors with their ids, and a manifest that says what made them."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from safetensors import SafetensorError, safe_open

from conjoin.retrieval.atomic_files import atomic_path, write_json
from conjoin.retrieval.encoder import ModelIdentity

MANIFEST = "manifest.json"
FORMAT = "conjoin-embeddings-1"


@dataclass(frozen=True)
class Shard:
    """One file of a store.

    Attributes:
        file: Its name inside the store: safetensors holding `embeddings` `(rows, D)` and `ids`, a JSON list as UTF-8
            bytes.
        rows: Number of vectors.
        sha256: Checksum of the file.
    """

    file: str
    rows: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a store holds and what made it; no times or machine names, so that equal work gives equal bytes.

    Attributes:
        model: Name or folder of the model.
        fingerprint: Its `ItemEncoder.fingerprint`.
        precision: Type the model computed in under autocast, or `"full"`.
        dimension: Length of a vector.
        dtype: Type of the stored numbers, `"float32"` or `"float16"`.
        shard_size: Rows per shard; the last one may be shorter.
        complete: Whether all of the data is in.
        shards: The finished shards, in order.
        versions: Of the libraries that computed the vectors.
    """

    model: str
    fingerprint: str
    precision: str
    dimension: int
    dtype: str
    shard_size: int
    complete: bool
    shards: tuple[Shard, ...]
    versions: dict[str, str]

    @property
    def identity(self) -> ModelIdentity:
        """The model that made the vectors."""
        return ModelIdentity(self.model, self.fingerprint)

    @property
    def count(self) -> int:
        """Number of vectors in the finished shards."""
        return sum(shard.rows for shard in self.shards)

    def with_shard(self, number: int, shard: Shard) -> "Manifest":
        """This manifest with shard `number` added or replaced."""
        return replace(self, shards=(*self.shards[:number], shard, *self.shards[number + 1 :]))

    def save(self, directory: Path) -> None:
        """Write the manifest into the store, atomically."""
        write_json(directory / MANIFEST, {"format": FORMAT, "count": self.count, **asdict(self)})

    @classmethod
    def load(cls, directory: Path) -> "Manifest":
        """Read the manifest of a store.

        Raises:
            FileNotFoundError: `directory` holds none.
            ValueError: It is not a manifest of this format.
        """
        path = directory / MANIFEST
        if not path.is_file():
            raise FileNotFoundError(f"{str(directory)!r} is not an embedding store: it has no {MANIFEST}")
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            found = content.pop("format")
            del content["count"]
            shards = tuple(Shard(**shard) for shard in content.pop("shards"))
            manifest = cls(**content, shards=shards)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{str(path)!r} is not a manifest of an embedding store ({error!r})") from error
        if found != FORMAT:
            raise ValueError(f"{str(path)!r} has format {found!r}, expected {FORMAT!r}")
        return manifest


class EmbeddingStore:
    """A finished store, read shard by shard without loading it whole.

    Iterating gives `(ids, embeddings)` per shard, the embeddings `(rows, D)` mapped from the file.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest

    @classmethod
    def open(cls, directory: str | Path) -> "EmbeddingStore":
        """Open the store in `directory`.

        Raises:
            FileNotFoundError: There is none.
            ValueError: It is unfinished or of another format.
        """
        directory = Path(directory)
        manifest = Manifest.load(directory)
        if not manifest.complete:
            raise ValueError(
                f"the store {str(directory)!r} is unfinished ({manifest.count} rows so far); "
                "run the command that encodes it again, it resumes"
            )
        return cls(directory, manifest)

    @property
    def model(self) -> ModelIdentity:
        """The model that made the vectors."""
        return self.manifest.identity

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return self.manifest.dimension

    @cached_property
    def ids(self) -> list[str]:
        """All ids, in the order of the data."""
        return [id_ for ids, _ in self for id_ in ids]

    def __len__(self) -> int:
        return self.manifest.count

    def __iter__(self) -> Iterator[tuple[list[str], np.ndarray]]:
        for shard in self.manifest.shards:
            yield read_shard(self.directory / shard.file, shard.rows, self.dimension)

    def load(self) -> tuple[list[str], np.ndarray]:
        """All ids and embeddings `(N, D)`, float32, in memory."""
        embeddings = np.empty((len(self), self.dimension), dtype=np.float32)
        all_ids: list[str] = []
        for ids, rows in self:
            embeddings[len(all_ids) : len(all_ids) + len(ids)] = rows
            all_ids.extend(ids)
        return all_ids, embeddings


def write_shard(path: Path, ids: list[str], embeddings: np.ndarray) -> Shard:
    """Write vectors `(N, D)` and their ids to `path`, atomically."""
    encoded_ids = np.frombuffer(json.dumps(ids).encode("ascii"), dtype=np.uint8)
    # Bytes first, then the file: safetensors' own writer leaves a randomly named file behind when it is killed.
    content = safetensors.numpy.save({"embeddings": np.ascontiguousarray(embeddings), "ids": encoded_ids})
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)
    return Shard(path.name, len(ids), hashlib.sha256(content).hexdigest())


def read_shard(path: Path, rows: int, dimension: int) -> tuple[list[str], np.ndarray]:
    """Read ids and memory-mapped vectors `(rows, dimension)`.

    Raises:
        ValueError: The file is missing, truncated or not what the manifest says.
    """
    try:
        with safe_open(path, framework="pt") as file:
            embeddings: torch.Tensor = file.get_tensor("embeddings")
            ids = json.loads(file.get_tensor("ids").numpy().tobytes())
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{_damaged(path)} ({error})") from error
    if embeddings.shape != (rows, dimension) or len(ids) != rows:
        raise ValueError(
            f"{_damaged(path)}: it holds {len(ids)} ids and vectors of shape {tuple(embeddings.shape)}, "
            f"the manifest says {(rows, dimension)}"
        )
    return ids, embeddings.numpy()


def shard_is_intact(directory: Path, shard: Shard) -> bool:
    """Whether the file is there and has the recorded checksum."""
    try:
        with (directory / shard.file).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == shard.sha256
    except FileNotFoundError:
        return False


def _damaged(path: Path) -> str:
    return f"shard {str(path)!r} is missing, truncated or damaged; encode again to rebuild it"
