"""Embeddings on disk: numbered shards of vectors with their ids, and a manifest that says what made them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open

from conjoin.retrieval.encoder import ModelIdentity
from conjoin.retrieval.kept_rows import KeptRows, to_parquet
from conjoin.storage import (
    DamagedError,
    FolderKind,
    FolderWriter,
    StoredFolder,
    check_checksum,
    text_digest,
    write_with_checksum,
)

LEFT_OUT_FILE = "left_out.jsonl"
STORE = FolderKind("embedding store", 2, "run `conjoin encode`")
SEVERAL_IMAGES = "several_images"
"""The detail of a store that says that some items have several images."""

_KEPT = "kept"


class LeftOut(NamedTuple):
    """A row that could not be encoded: its place among the rows of the data, its id, and why."""

    row: int
    id: str
    reason: str


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
        """The model that made the vectors, and its input type if there are items with several images."""
        name, key = self.manifest.details["model"], self.manifest.key
        several = self.manifest.details.get(SEVERAL_IMAGES, False)
        return ModelIdentity(name, key["fingerprint"], key.get("input_type", "seq") if several else None)

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

    @property
    def left_out(self) -> list[LeftOut]:
        """The rows of the data that are not in the store, because `on_error` was `"skip"`.

        Raises:
            ValueError: Their list is missing or damaged.
        """
        if not self.manifest.details.get("left_out"):  # the number of rows, by shard
            return []
        path = self.folder / LEFT_OUT_FILE
        if not path.is_file():
            raise DamagedError(f"the file {str(path)!r} is missing; {STORE.remedy} again")
        check_checksum(path, f"{STORE.remedy} again")
        return [LeftOut(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]

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
            ids = _read_json(file, "ids")
        except (SafetensorError, ValueError) as error:
            raise DamagedError(
                f"{self.path(number)} does not hold embeddings ({error}); {STORE.remedy} again"
            ) from error
        return ids, embeddings.numpy()

    def take(self, positions: Sequence[int]) -> np.ndarray:
        """The embeddings `(P, D)` at some positions, float32; each shard that holds some is read once."""
        starts = np.cumsum([0, *(file.rows for file in self.manifest.files)])
        wanted = np.asarray(positions, dtype=np.int64)
        numbers = np.searchsorted(starts, wanted, side="right") - 1
        found = np.empty((len(wanted), self.dimension), dtype=np.float32)
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            found[places] = self.read(number)[1][wanted[places] - starts[number]]
        return found

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
    left_out: Sequence[LeftOut] = (),
    kept: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Write a shard of a store.

    Args:
        writer: Of the store.
        number: Of the shard.
        ids: N ids.
        embeddings: `(N, D)`, in the type to store.
        contents: The `row_digest` of each row of the data, which a resumed run compares.
        left_out: The rows among them that could not be encoded, counted from the first row of the shard.
        kept: The `kept_values` of each of the N rows.

    Raises:
        ValueError: A kept column holds values of different types.
    """
    tensors = {
        "embeddings": torch.from_numpy(np.ascontiguousarray(embeddings)),
        "ids": _json_tensor(list(ids)),
        "contents": torch.tensor(contents, dtype=torch.int64),
    }
    if kept is not None:
        columns, content = to_parquet(ids, kept)
        tensors[_KEPT] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        writer.details[_KEPT] = sorted({*writer.details.get(_KEPT, ()), *columns})
    counts: dict[str, int] = writer.details.pop("left_out", {}) | {str(number): len(left_out)}
    if left_out:
        tensors["left_out"] = _json_tensor(left_out)
    if any(counts.values()):
        writer.details["left_out"] = {shard: count for shard, count in counts.items() if count}
    writer.details["dimension"] = embeddings.shape[1]
    writer.write(number, tensors, len(ids))


def read_contents(path: Path) -> tuple[list[str], list[int], list[LeftOut]]:
    """The ids and the `row_digest` of each row of the data in an intact shard, and which of them are left out."""
    with safe_open(path, "pt") as file:
        ids = _read_json(file, "ids")
        left_out = [LeftOut(*row) for row in _read_json(file, "left_out")] if "left_out" in file.keys() else []
        for row in left_out:
            ids.insert(row.row, row.id)
        return ids, file.get_tensor("contents").tolist(), left_out


def write_left_out(folder: Path, rows: Sequence[LeftOut]) -> None:
    """Write the list of the rows left out, for people and programs; no rows, no file."""
    path = folder / LEFT_OUT_FILE
    lines = "".join(json.dumps(row._asdict()) + "\n" for row in rows)
    if not rows:
        for beside in folder.glob(f"{LEFT_OUT_FILE}*"):
            beside.unlink()
    elif not path.is_file() or path.read_bytes() != lines.encode():
        write_with_checksum(path, lambda temporary: temporary.write_text(lines, encoding="utf-8"))


def _json_tensor(content: Sequence[Any]) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(content).encode("ascii")), dtype=torch.uint8)


def _read_json(file: Any, name: str) -> Any:  # noqa: ANN401 - safetensors has no types
    return json.loads(file.get_tensor(name).numpy().tobytes())
