"""What is known of each row, on disk: a folder of shards that is read row by row."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from conjoin.progress import progress

from .folder import StoredFolder
from .manifest import FolderKind
from .writer import FolderWriter

NAMES = "names"
"""The tensor `(rows,)` in every shard that names what its rows were made from."""
_SHARD_SIZE = "shard_size"


class RowShards(StoredFolder):
    """A complete cache of rows, read one by one from memory-mapped shards.

    Args:
        folder: Where it was written.

    Raises:
        FileNotFoundError: There is no cache.
        ValueError: It is unfinished, damaged, or of another kind or version.
    """

    stored: ClassVar[FolderKind]
    """What the cache is."""
    named_by: ClassVar[str]
    """The fields of a row that `row_name` hashes."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder, self.stored)
        self.key = self.manifest.key
        self._files: dict[int, Any] = {}

    def __len__(self) -> int:
        return self.rows

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}}  # each worker process opens its own

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
        """The open shard of a row and its place there.

        Raises:
            ValueError: The shard is damaged.
        """
        shard, place = divmod(index, self.manifest.details[_SHARD_SIZE])
        if shard not in self._files:
            self._files[shard] = self.shard(shard)
        return self._files[shard], place

    @classmethod
    def make(
        cls,
        folder: str | Path,
        rows: int,
        shard_size: int,
        key: Mapping[str, Any],
        tensors: Callable[[range], dict[str, Tensor]],
        *,
        details: Mapping[str, Any] | None = None,
        description: str = "",
        show_progress: bool = True,
    ) -> Self:
        """Make the shards that are missing or damaged, and open the cache.

        Args:
            folder: Where to write.
            rows: How many rows there are.
            shard_size: Rows per file; a cache that is resumed keeps its own.
            key: What the cache is made from, each part under a name that an error message can use.
            tensors: Returns the tensors of a range of rows, `NAMES` among them.
            details: What else to record; never compared.
            description: Stands beside the progress bar.
            show_progress: Show a progress bar.

        Raises:
            ValueError: The folder holds a cache that was made from something else, another process writes into it, or
                `shard_size` is not positive.
        """
        if shard_size < 1:
            raise ValueError(f"shard_size must be at least 1, got {shard_size}")
        bar = progress(total=rows, desc=description, unit="row", show=show_progress)
        with FolderWriter(folder, cls.stored, key) as writer, bar:
            writer.details = {**(details or {}), **writer.details}
            size = writer.details.setdefault(_SHARD_SIZE, shard_size)
            for number, start in enumerate(range(0, rows, size)):
                chosen = range(start, min(start + size, rows))
                if not writer.has(number):
                    writer.write(number, tensors(chosen), len(chosen))
                bar.update(len(chosen))
            writer.finish()
        return cls(folder)

    @classmethod
    def is_complete(cls, folder: str | Path) -> bool:
        """Whether a folder holds a complete cache, all of it intact."""
        try:
            opened = cls(folder)
            for number in range(len(opened.manifest.files)):
                opened.path(number)
        except (FileNotFoundError, ValueError):
            return False
        return True
