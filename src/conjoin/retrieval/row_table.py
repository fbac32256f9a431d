"""What is known of rows by their id, in a temporary database on disk: memory stays flat in the number of rows."""

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_CACHE_KIB = 65_536


class RowPlace(NamedTuple):
    """Where a row of a store lies, and digests of what it was made from.

    Attributes:
        shard: Number of its shard.
        place: In the shard.
        content: Digest of all that is encoded and kept of the row, as `encode_corpus` compares it.
        item: Digest of what is encoded alone, by content; 0 if it is not known.
    """

    shard: int
    place: int
    content: int
    item: int


class RowTable:
    """Rows by id.

    The database is private, lies in the system's folder for temporary files once it outgrows its cache, and is removed
    with this object.
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("PRAGMA synchronous = OFF")
        self._database.execute(
            "CREATE TABLE rows (id BLOB PRIMARY KEY, shard INTEGER, place INTEGER, content INTEGER, item INTEGER, "
            "marked INTEGER DEFAULT 0) WITHOUT ROWID"
        )
        self._database.execute("BEGIN")

    def add(self, id_: str) -> bool:
        """Add an id alone; returns whether it is new."""
        cursor = self._database.execute("INSERT OR IGNORE INTO rows (id) VALUES (?)", (_digest(id_),))
        return cursor.rowcount == 1

    def put(self, rows: Iterable[tuple[str, RowPlace]]) -> None:
        """Add rows; a row whose id is in the table takes the place of that one."""
        values = ((_digest(id_), *place) for id_, place in rows)
        command = "INSERT OR REPLACE INTO rows (id, shard, place, content, item) VALUES (?, ?, ?, ?, ?)"
        self._database.executemany(command, values)

    def get(self, id_: str) -> RowPlace | None:
        """What is known of a row, if it is in the table."""
        command = "SELECT shard, place, content, item FROM rows WHERE id = ?"
        found = self._database.execute(command, (_digest(id_),)).fetchone()
        return None if found is None else RowPlace(*found)

    def mark(self, id_: str) -> None:
        """Mark a row."""
        self._database.execute("UPDATE rows SET marked = 1 WHERE id = ?", (_digest(id_),))

    def unmarked(self) -> Iterator[tuple[int, int]]:
        """Shard and place of the rows that are not marked."""
        yield from self._database.execute("SELECT shard, place FROM rows WHERE marked = 0")


def _digest(id_: str) -> bytes:
    return hashlib.blake2b(id_.encode("utf-8", "surrogatepass"), digest_size=16).digest()
