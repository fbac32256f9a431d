"""Embeddings on disk: numbered shards of vectors with their ids, and a manifest that says what made them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open

from conjoin.retrieval.encoder import ModelIdentity
from conjoin.retrieval.kept_rows import KeptRows, to_parquet
from conjoin.storage import DamagedError, FolderKind, FolderWriter, StoredFolder, text_digest

STORE = FolderKind("embedding store", 2, "run `conjoin encode`")
_KEPT = "kept"


class EmbeddingStore(StoredFolder):
    """A finished store, read shard by shard without loading it whole.

    Iterating gives `(ids, embeddings)` per shard, the embeddings `(rows, D)` mapped from the file.

    Args:
        directory: The folder that `encode_corpus` wrote.
        verify: Whether to compare the checksum of a shard when it is first read.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is unfinished, damaged or of another format.
    """

    def __init__(self, directory: str | Path, verify: bool = True) -> None:
        super().__init__(directory, STORE, verify)
        self.directory = self.folder

    @classmethod
    def open(cls, directory: str | Path, verify: bool = True) -> "EmbeddingStore":
        """Open the store in `directory`; arguments and errors as for the class."""
        return cls(directory, verify)

    @property
    def model(self) -> ModelIdentity:
        """The model that made the vectors."""
        return ModelIdentity(self.manifest.details["model"], self.manifest.key["fingerprint"])

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return int(self.manifest.details["dimension"])

    @property
    def dtype(self) -> str:
        """Type of the stored numbers, `"float32"` or `"float16"`."""
        return str(self.manifest.key["dtype"])

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.manifest.files)

    @property
    def checksum(self) -> str:
        """A fingerprint of all ids and vectors."""
        return text_digest("".join(file.sha256 for file in self.manifest.files))

    @cached_property
    def ids(self) -> list[str]:
        """All ids, in the order of the data."""
        return [id_ for ids, _ in self for id_ in ids]

    @property
    def kept(self) -> KeptRows | None:
        """The text, the image's path and the kept columns of each row; None if an earlier version wrote the store."""
        if _KEPT not in self.manifest.details:
            return None
        return KeptRows([file.rows for file in self.manifest.files], self._read_kept)

    def _read_kept(self, number: int) -> pa.Table:
        content: torch.Tensor = self.shard(number).get_tensor(_KEPT)
        return pq.read_table(pa.BufferReader(content.numpy()))

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[tuple[list[str], np.ndarray]]:
        for number in range(self.shards):
            yield self.read(number)

    def read(self, number: int) -> tuple[list[str], np.ndarray]:
        """Read the ids and the memory-mapped vectors `(rows, D)` of a shard.

        Raises:
            ValueError: It is missing, truncated or damaged.
        """
        file = self.shard(number)
        try:
            embeddings: torch.Tensor = file.get_tensor("embeddings")
            ids = json.loads(file.get_tensor("ids").numpy().tobytes())
        except (SafetensorError, ValueError) as error:
            raise DamagedError(
                f"{self.path(number)} does not hold embeddings ({error}); {STORE.remedy} again"
            ) from error
        return ids, embeddings.numpy()

    def load(self) -> tuple[list[str], np.ndarray]:
        """All ids and embeddings `(N, D)`, float32, in memory."""
        embeddings = np.empty((len(self), self.dimension), dtype=np.float32)
        all_ids: list[str] = []
        for ids, rows in self:
            embeddings[len(all_ids) : len(all_ids) + len(ids)] = rows
            all_ids.extend(ids)
        return all_ids, embeddings


def write_embeddings(
    writer: FolderWriter,
    number: int,
    ids: Sequence[str],
    embeddings: np.ndarray,
    contents: Sequence[int],
    kept: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Write a shard of a store.

    Args:
        writer: Of the store.
        number: Of the shard.
        ids: N ids.
        embeddings: `(N, D)`, in the type to store.
        contents: The `row_digest` of each row, which a resumed run compares.
        kept: The `kept_values` of each row.

    Raises:
        ValueError: A kept column holds values of different types.
    """
    tensors = {
        "embeddings": torch.from_numpy(np.ascontiguousarray(embeddings)),
        "ids": torch.frombuffer(bytearray(json.dumps(list(ids)).encode("ascii")), dtype=torch.uint8),
        "contents": torch.tensor(contents, dtype=torch.int64),
    }
    if kept is not None:
        columns, content = to_parquet(ids, kept)
        tensors[_KEPT] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        writer.details[_KEPT] = sorted({*writer.details.get(_KEPT, ()), *columns})
    writer.details["dimension"] = embeddings.shape[1]
    writer.write(number, tensors, len(ids))


def read_contents(path: Path) -> tuple[list[str], list[int]]:
    """The ids and the `row_digest` of each row of an intact shard."""
    with safe_open(path, "pt") as file:
        return json.loads(file.get_tensor("ids").numpy().tobytes()), file.get_tensor("contents").tolist()
