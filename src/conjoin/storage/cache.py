"""Caches for training: rows of tensors that are made once, on disk, and read memory-mapped."""

import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from conjoin.progress import progress

from .files import (
    FOLDER_CHECKSUMS,
    TEMPORARY,
    DamagedError,
    check_checksums,
    checksummed_path,
    locked,
    make_folder,
    read_checksums,
)

logger = logging.getLogger(__name__)

CACHE_FILE = "cache.json"
_LAYOUT = 1
_OWN = re.compile(rf"shard-\d{{5,}}\.safetensors|{FOLDER_CHECKSUMS}|{CACHE_FILE}")
_BOUNDS = ".bounds"
"""How the tensor is called that tells where the rows of another begin, if they differ in length."""


class RowCache:
    """A complete cache; `cache[index]` holds the tensors of a row.

    The folder holds safetensors shards of equally many rows, `cache.json` with the key (what the rows were made from),
    and `SHA256SUMS`, to which each shard is added when it is finished. Opening a cache compares all checksums, once in
    a process. Shards are mapped into memory when a row is first read; a copy of the cache in another process maps them
    again.

    Args:
        folder: Where `make` wrote it.

    Attributes:
        key: What the rows were made from.
        details: What else was recorded.

    Raises:
        FileNotFoundError: There is no cache.
        ValueError: It is unfinished, damaged, or of another kind or layout.
    """

    kind: ClassVar[str]
    """What the cache is, in messages and in `cache.json`."""
    remedy: ClassVar[str]
    """What makes one, as an imperative: "run `conjoin train`"."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        header = self._read_header(self.folder)
        self.key: dict[str, Any] = header["key"]
        self.details: dict[str, Any] = header["details"]
        self._rows, self._shard_size = header["rows"], header["shard_size"]
        self._files = [_file(number) for number in range(math.ceil(self._rows / self._shard_size))]
        self._shards: dict[int, dict[str, Tensor]] = {}
        finished = self.finished_rows(self.folder)
        if finished < self._rows:
            raise ValueError(
                f"the {self.kind} in {str(folder)!r} is unfinished: {FOLDER_CHECKSUMS} lists {finished} of "
                f"{self._rows} rows; {self.remedy} again, it resumes"
            )
        check_checksums(self.folder, f"{self.remedy} again", self._files)

    def __len__(self) -> int:
        return self._rows

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_shards": {}}

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """The tensors of a row, views of the mapped memory.

        Raises:
            IndexError: There is no such row.
        """
        if not 0 <= index < self._rows:
            raise IndexError(f"row {index} of {self._rows}")
        shard, offset = divmod(index, self._shard_size)
        tensors = self._shard(shard)
        row = {}
        for name, tensor in tensors.items():
            if name.endswith(_BOUNDS):
                continue
            bounds = tensors.get(name + _BOUNDS)
            row[name] = tensor[offset] if bounds is None else tensor[slice(*bounds[offset : offset + 2].tolist())]
        return row

    def column(self, name: str) -> Tensor:
        """A tensor of all rows `(N, ...)`, in memory if there is more than one shard."""
        parts = [self._shard(number)[name] for number in range(len(self._files))]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _shard(self, number: int) -> dict[str, Tensor]:
        if number not in self._shards:
            with safe_open(self.folder / self._files[number], "pt") as file:
                self._shards[number] = {name: file.get_tensor(name) for name in file.keys()}
        return self._shards[number]

    @classmethod
    def make(
        cls,
        folder: str | Path,
        rows: int,
        shard_size: int,
        key: Mapping[str, Any],
        tensors: Callable[[range], Mapping[str, Tensor | Sequence[Tensor]]],
        *,
        details: Mapping[str, Any] | None = None,
        replace: bool = False,
        description: str | None = None,
    ) -> Self:
        """Make the shards that are missing or damaged, and open the cache; a complete one is only opened.

        Args:
            folder: Where to write.
            rows: How many rows there are.
            shard_size: Rows per file; a cache that is resumed keeps its own.
            key: What the cache is made from, each part under a name that an error message can use; plain values.
            tensors: Returns the tensors of a range of rows: `(rows, ...)`, or one for each row if they differ in
                length.
            details: What else to record; never compared.
            replace: Remove a cache of another key, in place of refusing it.
            description: Stands beside a progress bar; without it, none is shown.

        Raises:
            OSError: The disk is full or fails; the message says what is safe.
            ValueError: The folder holds a cache of another key (the message names what differs) or something else,
                another process writes into it, or `shard_size` is not positive.
        """
        if shard_size < 1:
            raise ValueError(f"shard_size must be at least 1, got {shard_size}")
        folder, header = Path(folder), {"kind": cls.kind, "layout": _LAYOUT, "rows": rows, "shard_size": shard_size}
        header |= {"key": plain(key), "details": plain(details or {})}
        with suppress(FileNotFoundError, ValueError):  # none, an unfinished or a damaged one
            cache = cls(folder)
            if (cache.key, len(cache)) == (header["key"], rows):
                return cache
        cls.check_place(folder)
        make_folder(folder)
        show = description is not None
        with locked(folder), progress(total=rows, desc=description or "", unit="row", show=show) as bar:
            size = cls._begin(folder, header, replace)
            for number, start in enumerate(range(0, rows, size)):
                chosen = range(start, min(start + size, rows))
                if not cls._is_intact(folder, _file(number)):
                    _write(folder, number, tensors(chosen), start)
                bar.update(len(chosen))
        return cls(folder)

    @classmethod
    def is_complete(cls, folder: str | Path, key: Mapping[str, Any] | None = None) -> bool:
        """Whether a folder holds a complete and intact cache, of this key if there is one."""
        try:
            cache = cls(folder)
        except (FileNotFoundError, ValueError):
            return False
        return key is None or cache.key == plain(key)

    @classmethod
    def finished_rows(cls, folder: str | Path) -> int:
        """How many rows a folder holds already; 0 if there is no cache. Compares no checksums of shards.

        Raises:
            ValueError: The cache is damaged, or of another kind or layout.
        """
        try:
            header = cls._read_header(Path(folder))
        except FileNotFoundError:
            return 0
        rows, size, listed = header["rows"], header["shard_size"], read_checksums(Path(folder))
        starts = enumerate(range(0, rows, size))
        return sum(min(size, rows - start) for number, start in starts if _file(number) in listed)

    @classmethod
    def check_place(cls, folder: str | Path) -> None:
        """Refuse to write into a folder that holds something else; hidden files do not count.

        Raises:
            ValueError: It is a file, has other files (the message names one), or is a cache of another kind or layout.
        """
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{str(folder)!r} is a file; choose a folder for the {cls.kind}")
        if (folder / CACHE_FILE).exists():
            with suppress(DamagedError):  # `make` warns
                cls._read_header(folder)
            return
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if not path.name.startswith(".") and not path.name.endswith(TEMPORARY) and not _OWN.fullmatch(path.name):
                raise ValueError(
                    f"{str(folder)!r} is not empty and holds no {cls.kind} (it has {path.name!r}); choose another "
                    f"folder, or remove it and {cls.remedy}"
                )

    @classmethod
    def _read_header(cls, folder: Path) -> dict[str, Any]:
        path = folder / CACHE_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"no {cls.kind} in {str(folder)!r}: it has no {CACHE_FILE}; {cls.remedy} to make one"
            )
        check_checksums(folder, f"{cls.remedy} again", [CACHE_FILE])
        header: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        recorded = header.get("kind"), header.get("layout")
        if recorded != (cls.kind, _LAYOUT):
            raise ValueError(
                f"{str(path)!r} is of kind {recorded[0]!r} and layout {recorded[1]!r}, expected {cls.kind!r} and "
                f"{_LAYOUT}; choose another folder, or remove it and {cls.remedy}"
            )
        return header

    @classmethod
    def _begin(cls, folder: Path, header: dict[str, Any], replace: bool) -> int:
        """Write `cache.json`, or check the one that is there, and return the rows per shard."""
        try:
            existing = cls._read_header(folder)
        except FileNotFoundError:
            existing = None
        except DamagedError as error:
            logger.warning("%s; making all files again", error)
            existing = None
        if existing is not None:
            recorded, wanted = ({**each["key"], "rows": each["rows"]} for each in (existing, header))
            if recorded == wanted:
                return int(existing["shard_size"])
            if not replace:
                raise ValueError(
                    f"cannot resume the {cls.kind} in {str(folder)!r}: it was made with "
                    f"{differences(recorded, wanted)}; use the same settings or another folder"
                )
        (folder / FOLDER_CHECKSUMS).unlink(missing_ok=True)  # first: no shard counts from now on
        for path in folder.glob("shard-*.safetensors"):
            path.unlink()
        with checksummed_path(folder / CACHE_FILE) as temporary:
            temporary.write_text(json.dumps(header, indent=2) + "\n", encoding="utf-8")
        return int(header["shard_size"])

    @classmethod
    def _is_intact(cls, folder: Path, name: str) -> bool:
        """Whether a shard is finished and intact; warns if it is damaged."""
        try:
            check_checksums(folder, f"{cls.remedy} again", [name])
        except DamagedError as error:
            if name in read_checksums(folder):
                logger.warning("%s; making it again", error)
            return False
        return True


def _file(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def _write(folder: Path, number: int, tensors: Mapping[str, Tensor | Sequence[Tensor]], rows_before: int) -> None:
    """Write a shard.

    Raises:
        OSError: The disk is full or fails.
    """
    stored: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            stored[name] = value.contiguous()
        else:
            stored[name] = torch.cat(list(value))
            stored[name + _BOUNDS] = torch.tensor([0, *map(len, value)]).cumsum(0)
    path = folder / _file(number)
    try:
        with checksummed_path(path) as temporary:
            temporary.write_bytes(save(stored))
    except OSError as error:
        raise OSError(
            error.errno,
            f"{error.strerror or error} while writing {str(path)!r}: {rows_before} rows are safe; make room and run "
            "the same again, it resumes after them",
        ) from error


def plain(key: Mapping[str, Any]) -> dict[str, Any]:
    """A key as it is read back from JSON."""
    return dict(json.loads(json.dumps(key)))


def differences(recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Name each entry that differs between two keys, with both values; empty if none does."""
    names = [name for name in {**recorded, **wanted} if recorded.get(name) != wanted.get(name)]
    return ", ".join(f"{name} {_short(recorded.get(name))}, not {_short(wanted.get(name))}" for name in names)


def _short(value: object) -> str:
    """A value for a message; of a long text, such as a digest, the beginning."""
    if isinstance(value, list):
        return f"[{', '.join(map(_short, value))}]"
    if isinstance(value, str) and len(value) > 40:
        return f"{value[:12]!r}..."
    return repr(value)
