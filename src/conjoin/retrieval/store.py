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

from conjoin.retrieval.compact import check_dims, truncate, unpack
from conjoin.retrieval.encoder import ModelIdentity
from conjoin.retrieval.kept_rows import KeptRows, read_columns, to_parquet
from conjoin.storage import (
    DamagedError,
    FolderKind,
    FolderWriter,
    Manifest,
    StoredFile,
    StoredFolder,
    check_checksum,
    check_file,
    read_manifest,
    text_digest,
    write_with_checksum,
)

LEFT_OUT_FILE = "left_out.jsonl"
STORE = FolderKind("embedding store", 2, "run `conjoin encode`")
SEVERAL_IMAGES = "several_images"
"""The detail of a store that says that some items have several images."""

UPDATES = "updates"
"""The detail of a store that counts its updates."""
REMOVED = "removed"
"""The detail of a store that names the file with the places of the rows that were removed, by shard."""

KEPT, _ITEMS = "kept", "items"


class LeftOut(NamedTuple):
    """A row that could not be encoded: its place among the rows of the data, its id, and why."""

    row: int
    id: str
    reason: str


class EmbeddingStore(StoredFolder):
    """A finished store, read shard by shard without loading it whole.

    Iterating gives `(ids, embeddings)` per shard, the embeddings `(rows, D)` mapped from the file.

    Vectors of an `"int8"` or `"binary"` store are unpacked on reading: see `conjoin.retrieval.compact`.

    Args:
        directory: The folder that `encode_corpus` wrote.
        verify: Whether to compare the checksum of a shard when it is first read.
        dims: Read this many leading numbers of each vector, L2-normalised again (Matryoshka); all when None.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is unfinished, damaged or of another format, or its vectors are shorter than `dims`.
    """

    def __init__(self, directory: str | Path, verify: bool = True, dims: int | None = None) -> None:
        self.directory, self.dims = Path(directory), dims
        before: Manifest | None = None
        while True:
            try:
                super().__init__(directory, STORE, verify)
                self._removed = read_removed(self.folder, self.manifest)
            except DamagedError:
                now = read_manifest(self.directory, STORE)
                if now == before:
                    raise
                before = now  # another process may have updated the store meanwhile
            else:
                break
        if dims is not None:
            check_dims(dims, self.stored_dimension, f"the store {str(directory)!r}")

    @classmethod
    def open(cls, directory: str | Path, verify: bool = True, dims: int | None = None) -> "EmbeddingStore":
        """Open the store in `directory`; arguments and errors as for the class."""
        return cls(directory, verify, dims)

    @property
    def model(self) -> ModelIdentity:
        """The model that made the vectors, and its input type if there are items with several images."""
        name, key = self.manifest.details["model"], self.manifest.key
        several = self.manifest.details.get(SEVERAL_IMAGES, False)
        return ModelIdentity(name, key["fingerprint"], key.get("input_type", "seq") if several else None)

    @property
    def dimension(self) -> int:
        """Length of a vector that is read."""
        return self.dims or self.stored_dimension

    @property
    def stored_dimension(self) -> int:
        """Length of a vector that is stored."""
        return int(self.manifest.details["dimension"])

    @property
    def dtype(self) -> str:
        """Type of the stored numbers: `"float32"`, `"float16"`, `"int8"` or `"binary"`."""
        return str(self.manifest.key["dtype"])

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.manifest.files)

    @property
    def checksum(self) -> str:
        """A fingerprint of all ids and vectors."""
        removed = self.manifest.details.get(REMOVED, {}).get("sha256", "")
        return text_digest("".join(file.sha256 for file in self.manifest.files) + removed)

    @cached_property
    def ids(self) -> list[str]:
        """All ids, in the order of the data."""
        return [id_ for ids, _ in self for id_ in ids]

    @property
    def kept(self) -> KeptRows | None:
        """The text, the image's path and the kept columns of each row; None if an earlier version wrote the store."""
        if KEPT not in self.manifest.details:
            return None
        return KeptRows([file.rows for file in self.manifest.files], self._read_kept)

    def _read_kept(self, number: int, columns: list[str] | None = None) -> pa.Table:
        file, live = self.shard(number), self.live(number)
        if KEPT not in file.keys():  # of an earlier version
            return pa.table({"id": pa.array(self.read(number)[0], pa.string())})
        content: torch.Tensor = file.get_tensor(KEPT)
        table = read_columns(pq.ParquetFile(pa.BufferReader(content.numpy())), columns)
        return table if live is None else table.take(pa.array(live))

    def live(self, number: int) -> np.ndarray | None:
        """The places in a shard whose rows were not removed, ascending; None if they all are there."""
        file = self.manifest.files[number]
        removed = self._removed.get(file.file)
        return None if removed is None else np.setdiff1d(np.arange(file.rows + len(removed)), removed)

    def columns(self, number: int) -> pa.Table | None:
        """The id and the kept columns of the rows of a shard, if the store keeps any."""
        return None if KEPT not in self.manifest.details else self._read_kept(number)

    def digests(self, number: int) -> np.ndarray:
        """Digests `(rows,)` int64 of what the vectors of a shard were made from: equal digests, equal vectors."""
        return self._live_rows(number, _item_digests(self.shard(number)))

    def contents(self, number: int) -> np.ndarray:
        """Digests `(rows,)` int64 of all that is stored of the rows of a shard: equal digests, equal rows."""
        return self._live_rows(number, _used_contents(self.shard(number)))

    def _live_rows(self, number: int, values: np.ndarray) -> np.ndarray:
        live = self.live(number)
        return values if live is None else values[live]

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
        """Read the ids and the vectors `(rows, D)` of a shard, memory-mapped where they are read as they are stored.

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
        live = self.live(number)
        if live is not None:
            ids, embeddings = [ids[place] for place in live], embeddings[torch.from_numpy(live)]
        vectors = unpack(embeddings.numpy(), self.dtype, self.stored_dimension)
        return ids, vectors if self.dims is None else truncate(vectors, self.dims)

    def read_ids(self, number: int) -> list[str]:
        """The ids of a shard."""
        ids, live = _read_json(self.shard(number), "ids"), self.live(number)
        return ids if live is None else [ids[place] for place in live]

    def sample(self, count: int) -> tuple[list[str], np.ndarray]:
        """The ids and vectors `(n, D)` of at most `count` rows, spread evenly over the store."""
        places = np.unique(np.linspace(0, len(self) - 1, min(count, len(self))).round().astype(np.int64))
        starts = np.cumsum([0, *(file.rows for file in self.manifest.files)])
        numbers = np.searchsorted(starts, places, side="right") - 1
        ids: list[str] = []
        for number in np.unique(numbers).tolist():
            names = self.read_ids(number)
            ids += [names[place - starts[number]] for place in places[numbers == number]]
        return ids, self.take(places.tolist())

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
    items: Sequence[int] | None = None,
    dimension: int | None = None,
) -> None:
    """Write a shard of a store.

    Args:
        writer: Of the store.
        number: Of the shard.
        ids: N ids.
        embeddings: `(N, D)`, in the type to store.
        contents: The `row_content` of each row of the data, which a resumed run compares.
        left_out: The rows among them that could not be encoded, counted from the first row of the shard.
        kept: The `kept_values` of each of the N rows.
        items: The `item_digest` of each of the N rows.
        dimension: Length of a vector, where it is packed.

    Raises:
        ValueError: A kept column holds values of different types.
    """
    tensors, details = shard_content(number, ids, embeddings, contents, left_out, kept, items, dimension)
    writer.write(number, tensors, len(ids), details)


def shard_content(
    number: int,
    ids: Sequence[str],
    embeddings: np.ndarray,
    contents: Sequence[int],
    left_out: Sequence[LeftOut],
    kept: Sequence[Mapping[str, Any]] | None,
    items: Sequence[int] | None,
    dimension: int | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a shard, arguments as for `write_embeddings`, and the store's details that follow from it."""
    tensors, columns = shard_tensors(ids, embeddings, contents, kept, items)
    details: dict[str, Any] = {} if kept is None else {KEPT: sorted(columns)}
    if left_out:
        tensors["left_out"] = _json_tensor(left_out)
    details["left_out"] = {str(number): len(left_out) or None}
    details["dimension"] = dimension or embeddings.shape[1]
    return tensors, details


def shard_tensors(
    ids: Sequence[str],
    embeddings: np.ndarray,
    contents: Sequence[int],
    kept: Sequence[Mapping[str, Any]] | None,
    items: Sequence[int] | None,
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of a shard, arguments as for `write_embeddings`, and the names of its kept columns."""
    tensors = {
        "embeddings": torch.from_numpy(np.ascontiguousarray(embeddings)),
        "ids": _json_tensor(list(ids)),
        "contents": torch.tensor(contents, dtype=torch.int64),
    }
    columns: list[str] = []
    if kept is not None:
        columns, content = to_parquet(ids, kept)
        tensors[KEPT] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if items is not None:
        tensors[_ITEMS] = torch.tensor(items, dtype=torch.int64)
    return tensors, columns


def read_removed(folder: Path, manifest: Manifest) -> dict[str, np.ndarray]:
    """The places of the removed rows, ascending, by the name of their shard.

    Raises:
        DamagedError: The file that has them is damaged.
    """
    if REMOVED not in manifest.details:
        return {}
    path = check_file(folder, StoredFile(**manifest.details[REMOVED]), STORE)
    with safe_open(path, "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def read_contents(path: Path) -> tuple[list[str], list[int], list[LeftOut]]:
    """The ids and the `row_digest` of each row of the data in an intact shard, and which of them are left out."""
    with safe_open(path, "pt") as file:
        ids = _read_json(file, "ids")
        left_out = [LeftOut(*row) for row in _read_json(file, "left_out")] if "left_out" in file.keys() else []
        for row in left_out:
            ids.insert(row.row, row.id)
        return ids, file.get_tensor("contents").tolist(), left_out


def read_row_digests(path: Path) -> tuple[list[str], np.ndarray, np.ndarray]:
    """The ids, the `row_content` and the `item_digest` of the rows in an intact shard, removed ones too.

    A shard of an earlier version has no `item_digest`: 0.
    """
    with safe_open(path, "pt") as file:
        ids, contents = _read_json(file, "ids"), _used_contents(file)
        items = file.get_tensor(_ITEMS).numpy() if _ITEMS in file.keys() else np.zeros(len(ids), dtype=np.int64)
        return ids, contents, items


def _item_digests(file: Any) -> np.ndarray:  # noqa: ANN401 - safetensors has no types
    """The `item_digest` of each row; of a shard of an earlier version, its `row_content`."""
    digests: np.ndarray = file.get_tensor(_ITEMS).numpy() if _ITEMS in file.keys() else _used_contents(file)
    return digests


def _used_contents(file: Any) -> np.ndarray:  # noqa: ANN401
    """The `row_content` of the rows that are not left out."""
    contents: np.ndarray = file.get_tensor("contents").numpy()
    left_out = [row[0] for row in _read_json(file, "left_out")] if "left_out" in file.keys() else []
    return np.delete(contents, left_out)


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
