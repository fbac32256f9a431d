"""Tensors by row on disk: a folder of safetensors shards and a manifest that says what they were made from."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from safetensors import safe_open
from torch import Tensor
from torch.utils.data import Dataset

from conjoin.retrieval.atomic_files import write_json

NAMES = "names"
"""The tensor `(rows,)` in every shard that names what its rows were made from."""
VERSION = 1


class StateShards:
    """A complete cache of `rows` rows, read one by one from memory-mapped shards.

    Args:
        folder: Where it was written.

    Raises:
        FileNotFoundError: There is no cache.
        ValueError: It is of another version, or shards are missing.
    """

    kind: ClassVar[str]
    """What the cache is, in messages."""
    prefix: ClassVar[str]
    """How its files begin."""
    hint: ClassVar[str]
    """What makes one."""
    named_by: ClassVar[str]
    """What of a row `row_name` takes."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        manifest = _read_manifest(self.folder)
        if manifest is None:
            raise FileNotFoundError(f"no {self.kind} in {str(folder)!r}; {self.hint} makes one")
        self.rows, self.shard_size, self.key = manifest["rows"], manifest["shard_size"], manifest["key"]
        missing = [path.name for _, path in self.shards(folder, self.rows, self.shard_size) if not path.is_file()]
        if missing:
            raise ValueError(
                f"the {self.kind} in {str(folder)!r} is incomplete: {len(missing)} shards are missing, the first is "
                f"{missing[0]}; what began it goes on with it"
            )
        self._files: dict[int, Any] = {}

    def __len__(self) -> int:
        return self.rows

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}}  # a worker opens its own

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """What is known of a row, under the names that the collator of such rows reads."""
        raise NotImplementedError

    @staticmethod
    def row_name(row: Mapping[str, Any], index: int) -> int:
        """A digest of what the row at `index` is made from."""
        raise NotImplementedError

    def name(self, index: int) -> int:
        """The `row_name` of the row that was cached at `index`."""
        file, place = self.find(index)
        return int(file.get_slice(NAMES)[place])

    def find(self, index: int) -> tuple[Any, int]:
        """The open shard of a row and its place there."""
        shard, place = divmod(index, self.shard_size)
        if shard not in self._files:
            self._files[shard] = safe_open(str(self.shard(self.folder, shard)), "pt")
        return self._files[shard], place

    @classmethod
    def shard(cls, folder: str | Path, number: int) -> Path:
        """The file of a shard."""
        return Path(folder) / f"{cls.prefix}-{number:05d}.safetensors"

    @classmethod
    def shards(cls, folder: str | Path, rows: int, shard_size: int) -> Iterator[tuple[range, Path]]:
        """The rows and the file of every shard."""
        for number, start in enumerate(range(0, rows, shard_size)):
            yield range(start, min(start + shard_size, rows)), cls.shard(folder, number)

    @classmethod
    def begin(cls, folder: str | Path, rows: int, shard_size: int, key: dict[str, Any]) -> int:
        """Start a cache or go on with one; returns the rows per shard, which the first run chose.

        Raises:
            ValueError: The folder holds one that was made from something else, or `shard_size` is not positive.
        """
        if shard_size < 1:
            raise ValueError(f"shard_size must be at least 1, got {shard_size}")
        found = _read_manifest(Path(folder))
        if found is None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_json(
                Path(folder) / "manifest.json",
                {"version": VERSION, "rows": rows, "shard_size": shard_size, "key": key},
            )
            return shard_size
        if found["key"] != key or found["rows"] != rows:
            differing = sorted(name for name in key if found["key"].get(name) != key[name]) or ["rows"]
            raise ValueError(
                f"{str(folder)!r} holds a {cls.kind} that differs in: {', '.join(differing)}; choose another folder"
            )
        return int(found["shard_size"])

    @classmethod
    def is_complete(cls, folder: str | Path) -> bool:
        """Whether a folder holds a cache with all its shards."""
        found = _read_manifest(Path(folder))
        if found is None:
            return False
        return all(path.is_file() for _, path in cls.shards(folder, found["rows"], found["shard_size"]))


class TaughtRows(Dataset[dict[str, Any]]):
    """Rows with what a cache knows of them, for the collator that reads it.

    Args:
        rows: The rows that were cached, in the same order, their images not drawn anew.
        cache: Of these rows.

    Raises:
        ValueError: The number of rows differs; on reading one, what it is named by does.
    """

    def __init__(self, rows: Any, cache: StateShards) -> None:  # noqa: ANN401 - any sequence of rows
        if len(rows) != len(cache):
            raise ValueError(f"{len(rows)} rows, but the {cache.kind} in {str(cache.folder)!r} has {len(cache)}")
        self.rows, self.cache = rows, cache

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        if self.cache.row_name(row, index) != self.cache.name(index):
            raise ValueError(
                f"row {index} (id {row.get('id', index)!r}) is not the one in the {self.cache.kind} in "
                f"{str(self.cache.folder)!r}: its {self.cache.named_by} differs"
            )
        return {**row, **self.cache[index]}


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    path = folder / "manifest.json"
    if not path.is_file():
        return None
    manifest = json.loads(path.read_text(encoding="utf-8"))
    if manifest.get("version") != VERSION:
        raise ValueError(f"{str(path)!r} is of version {manifest.get('version')!r}, expected {VERSION}")
    return manifest
