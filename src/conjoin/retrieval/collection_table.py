"""Lance's table of a collection: where it lies, what its errors mean, its conditions, its tag and its checksums.

`SHA256SUMS` lists the files of the published version and names that version; `sha256sum -c` takes it. A file of Lance
never changes, so each is hashed once, at publication. Readers hash it again when they first meet it.
"""

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lancedb
import pyarrow as pa
from lancedb.table import Table

from conjoin.storage import FOLDER_CHECKSUMS, DamagedError, file_digest, read_checksums, write_text

PUBLISHED = "published"
"""The tag of the version that readers see."""
OWN_COLUMNS = ("id", "vector", "item_digest", "row_digest", "row_kind", "picture")
"""Columns that no column of the data may be named as: `item_digest` is of what was encoded (text, image bytes),
`row_digest` of all that a row of the data said, `row_kind` its parts (see `KINDS`), `picture` a thumbnail."""
KINDS = ("image", "text", "both")
"""Which parts of an item a row has: the values of the column `row_kind`."""
IDS_AT_ONCE = 1000
"""How many ids stand in one condition."""
_PLACE = re.compile(r", (?:location: )?/\S+\.rs:\d+")
_CACHED = 2**22
"""Bytes of indexes and of metadata that a writer keeps; by default Lance keeps up to 7 GB."""
TABLE_NAME, TABLE = "train", "data/train.lance"
"""Where the table lies in a collection: as the Hub expects it."""
_SMALL = 2**28
"""Bytes that are hashed in each process; of larger collections only the files that changed after their publication."""
_VERSION, _COUNT = re.compile(r"^# version (\d+)$", re.MULTILINE), re.compile(r"\A# (\d+) files$", re.MULTILINE)
_MUTABLE = {"_refs", "latest_version_hint.json"}
"""What Lance changes: tags, whose version the checksums name, and a hint that it does not rely on."""
_REMEDY = "restore it from a copy, or remove the folder and run `conjoin encode` again"


def local_folder(uri: str | Path) -> Path | None:
    """The folder of a collection on this machine; None for one elsewhere."""
    return None if "://" in str(uri) else Path(uri).absolute()


def milvus_address(uri: str | Path) -> re.Match[str] | None:
    """The server, or the file of Milvus Lite, and the name: `http://HOST:PORT/NAME`, `FILE.db/NAME`; else None."""
    return re.fullmatch(r"(https?://[^/]+|.+\.db)/(\w+)", str(uri))


def connect(uri: str | Path, writes: bool) -> Any:  # noqa: ANN401 - lancedb.DBConnection
    """The database of one table; a writer keeps few indexes and little metadata in memory."""
    folder = local_folder(uri)
    if folder is not None:  # a search of 10⁶ × 384 then takes 240 to 300 MB instead of 620, and no longer
        os.environ.setdefault("LANCE_DEFAULT_IO_BUFFER_SIZE", str(2**25))
    session = lancedb.Session(_CACHED, _CACHED) if writes else None
    return lancedb.connect(f"{str(uri).rstrip('/')}/data" if folder is None else str(folder / "data"), session=session)


def open_table(uri: str | Path, writes: bool = False) -> Table:
    """Open the newest state of a table, published or not, to write it or only to read it.

    Raises:
        FileNotFoundError: There is none.
        ValueError: The folder holds something else.
    """
    folder = local_folder(uri)
    if folder is not None and not (folder / "data").is_dir():
        check_place(folder)
        raise FileNotFoundError(f"there is no collection in {str(uri)!r}: run `conjoin encode`")
    with reading(uri):
        return connect(uri, writes).open_table(TABLE_NAME)


def published_version(uri: str | Path, table: Table | None = None) -> int | None:
    """The version that readers see; None while the first run is unfinished.

    Args:
        uri: As for the collection.
        table: Its table, if it is open.
    """
    table = open_table(uri) if table is None else table
    with reading(uri):
        tags = table.tags.list()
    return int(tags[PUBLISHED]["version"]) if PUBLISHED in tags else None


def open_published(uri: str | Path) -> Table:
    """Open the version that readers see.

    Raises:
        FileNotFoundError: There is no collection.
        DamagedError: A file differs from its checksum.
        OSError: A file is missing or cannot be read.
        ValueError: It is unfinished.
    """
    table = open_table(uri)
    version = published_version(uri, table)
    if version is None:
        raise ValueError(
            f"the collection {str(uri)!r} is unfinished, {table.count_rows()} rows so far: run the same `conjoin "
            "encode` again, it resumes"
        )
    try:
        if (folder := local_folder(uri)) is not None:
            check_files(folder, version)
        with reading(uri):
            table.checkout(PUBLISHED)
    except (DamagedError, OSError):
        if published_version(uri) == version:
            raise
        return open_published(uri)  # another process has published meanwhile
    return table


def index_names(table: Table) -> list[str]:
    """The names of the indexes of a table; those of this package are named as their column."""
    return [index.name for index in table.list_indices()]


def with_kind(where: str | None, kind: str | None) -> str | None:
    """A condition that holds for rows of a kind alone, one of `KINDS`; None for all kinds.

    Raises:
        ValueError: There is no such kind.
    """
    if kind is None:
        return where
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r} of row; expected one of {', '.join(KINDS)}")
    return " and ".join([*([] if where is None else [f"({where})"]), f"row_kind == '{kind}'"])  # == of Milvus


def id_conditions(ids: Sequence[str]) -> Iterator[str]:
    """Conditions that hold for the rows under some ids, each for `IDS_AT_ONCE` of them."""
    for start in range(0, len(ids), IDS_AT_ONCE):
        quoted = ("'" + id_.replace("'", "''") + "'" for id_ in ids[start : start + IDS_AT_ONCE])
        yield f"id in ({', '.join(quoted)})"


@contextmanager
def committing(uri: str | Path) -> Iterator[None]:
    """Name the collection in what Lance raises while it writes.

    Raises:
        OSError: The disk is full or fails.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise OSError(
            f"cannot write the collection {str(uri)!r}: {_first_line(error)}; readers see it as it was, and the rows "
            "that were written are safe: run the same again, it resumes"
        ) from error


@contextmanager
def reading(uri: str | Path, where: str | None = None, columns: pa.Schema | None = None) -> Iterator[None]:
    """Name the collection, or the condition, in what Lance raises.

    Raises:
        FileNotFoundError: There is no table.
        OSError: A file of a folder is missing or cannot be read.
        ConnectionError: The collection is elsewhere and cannot be reached.
        ValueError: The condition cannot be evaluated.
    """
    try:
        yield
    except Exception as error:  # of a damaged file Lance makes a ValueError, RuntimeError, OSError or RustPanic
        reason = _first_line(error)
        if isinstance(error, ValueError) and where is not None:
            named = ", ".join(f"{field.name} ({field.type})" for field in columns or ())
            if "could not convert" in reason:
                named += "; `conjoin encode --keep NAME:number` reads texts as numbers"
            problem = f"cannot be evaluated: {reason}; the columns are {named}"
            raise ValueError(f"the condition {where!r:.200} {problem}") from error
        if f"Table '{TABLE_NAME}' was not found" in reason:
            raise FileNotFoundError(f"there is no collection in {str(uri)!r}: run `conjoin encode`") from error
        problem = f"the collection {str(uri)!r} cannot be read: {reason}"
        if local_folder(uri) is not None:
            raise OSError(f"{problem}; {_REMEDY}") from error
        raise ConnectionError(f"{problem}; check the address, the network and your credentials") from error


def check_place(folder: Path) -> None:
    """Refuse to write a collection into a folder that has something else.

    Raises:
        ValueError: The message names what it holds.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(
            f"{str(folder)!r} is a file; `conjoin start {shlex.quote(str(folder))}` makes a collection of a table"
        )
    if not folder.is_dir() or (folder / "data").is_dir():
        return
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if names:
        raise ValueError(f"{str(folder)!r} is not empty and no collection: it has {names[0]!r}; choose a new folder")


def _first_line(error: BaseException) -> str:
    """What Lance says, without the place in its source."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return _PLACE.split(line)[0].split(" Valid fields are ")[0].removeprefix("Invalid input, ")


def move_tag(folder: Path | None, table: Table, before: int | None) -> None:
    """Let readers see the version of a table; they saw `before`."""
    version = int(table.version)
    if folder is not None:
        _write_sums(folder, version, before)
    if before is None and folder is not None:  # Lance makes a tag below a percent-encoded path, such as M%C3%B6bel
        manifest = folder / TABLE / "_versions" / f"{2**64 - 1 - version:020}.manifest"
        tag = folder / TABLE / "_refs" / "tags" / f"{PUBLISHED}.json"
        tag.parent.mkdir(parents=True, exist_ok=True)
        write_text(tag, json.dumps({"branch": None, "version": version, "manifestSize": manifest.stat().st_size}))
    elif before is None:
        table.tags.create(PUBLISHED, version)
    elif before != version:
        table.tags.update(PUBLISHED, version)
        if folder is not None:
            _write_sums(folder, version, None)


def _write_sums(folder: Path, version: int, before: int | None) -> None:
    """Write the checksums of a version that is about to be published; readers still see `before`, if any."""
    known = read_checksums(folder)  # a file of Lance never changes
    paths = sorted(path.relative_to(folder) for path in (folder / TABLE).rglob("*") if path.is_file())
    names = [path.as_posix() for path in paths if not _MUTABLE & {*path.parts}]
    sums = {name: known[name] if name in known else file_digest(folder / name) for name in names}
    versions = dict.fromkeys([version, *([] if before is None else [before])])
    lines = [f"# {len(sums)} files", *(f"# version {number}" for number in versions)]
    write_text(
        folder / FOLDER_CHECKSUMS, "".join(f"{line}\n" for line in lines + [f"{v}  {k}" for k, v in sums.items()])
    )


def check_files(folder: Path, version: int, everything: bool = False) -> None:
    """Compare the files of a collection with their checksums.

    A file that is listed and missing belongs to an earlier version that was cleaned up, or Lance misses it by name.

    Args:
        folder: Of the collection.
        version: That readers are to see.
        everything: Hash all files, also those of a large collection that are older than its `SHA256SUMS`.

    Raises:
        DamagedError: A file differs, or another version is published than the checksums are of.
    """
    sums = folder / FOLDER_CHECKSUMS
    if not sums.is_file():
        raise OSError(f"the collection {str(folder)!r} has no {FOLDER_CHECKSUMS}; {_REMEDY}")
    text, hashed = sums.read_text(encoding="utf-8", errors="replace"), read_checksums(folder)
    count, versions = _COUNT.search(text), [int(number) for number in _VERSION.findall(text)]
    if count is None or int(count[1]) != len(hashed):
        raise DamagedError(f"the file {str(sums)!r} is truncated or damaged; {_REMEDY}")
    if version not in versions:
        raise DamagedError(
            f"{str(sums)!r} is of version {versions} of the collection, and version {version} is published; {_REMEDY}"
        )
    states = {name: (folder / name).stat() for name in hashed if (folder / name).is_file()}
    is_large = sum(state.st_size for state in states.values()) > _SMALL
    since = sums.stat().st_mtime_ns if is_large and not everything else 0
    for name, state in states.items():
        if state.st_mtime_ns >= since and file_digest(folder / name) != hashed[name]:
            raise DamagedError(
                f"the file {str(folder / name)!r} is truncated or damaged: it differs from its checksum in "
                f"{FOLDER_CHECKSUMS}; {_REMEDY}"
            )
