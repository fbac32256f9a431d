"""Mined hard negatives on disk: the negatives of every anchor and the miners that found them.

The file is Parquet with the columns

* `id`: string, the anchor;
* `negatives`: list of strings, the ids of its negatives, best rank first;
* `found_by`: for each of the negatives, in the same order, a list of `{miner, rank, score}`: the miners that found
  it, its rank there (from 1, the anchor itself and its duplicates not counted) and its cosine.

Its pages have checksums.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from conjoin.storage import atomic_path

NEGATIVES_FILE = "negatives.parquet"
_REMEDY = "run `conjoin mine` again"
MINED_SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "negatives": pa.list_(pa.string()),
        "found_by": pa.list_(pa.list_(pa.struct({"miner": pa.string(), "rank": pa.int32(), "score": pa.float32()}))),
    }
)


class MinedNegatives(Mapping[str, list[str]]):
    """From the id of an anchor to the ids of its hard negatives, best rank first.

    The lists stay in Arrow, each id once, so that millions of anchors fit in memory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            table = pq.read_table(
                path,
                columns=["id", "negatives"],
                read_dictionary=["negatives.list.element"],
                page_checksum_verification=True,
            )
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise ValueError(f"{str(path)!r} is not a file of mined negatives ({error}); {_REMEDY}") from error
        if table.column_names != ["id", "negatives"]:
            raise ValueError(f"{str(path)!r} has the columns {table.column_names}, expected {MINED_SCHEMA.names}")
        self._lists = table["negatives"].unify_dictionaries().combine_chunks()
        self._rows = {id_: row for row, id_ in enumerate(table["id"].to_pylist())}

    def __getitem__(self, anchor: str) -> list[str]:
        return list(self._lists[self._rows[anchor]].as_py())

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def load_mined(path: str | Path) -> MinedNegatives:
    """Read what `mine_hard_negatives` wrote.

    Args:
        path: The Parquet file, or the folder that holds it as `negatives.parquet`.

    Raises:
        FileNotFoundError: No such file.
        ValueError: It is another kind of file, or damaged.
    """
    path = Path(path)
    file = path / NEGATIVES_FILE if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{str(file)!r}: no such file; `conjoin mine` writes it when it is done")
    return MinedNegatives(file)


def write_mined(path: Path, blocks: Iterable[list[dict[str, Any]]]) -> None:
    """Write blocks of rows `MINED_SCHEMA`, one row group each; the file appears when all of them are in."""
    settings: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}
    with atomic_path(path) as temporary, pq.ParquetWriter(temporary, MINED_SCHEMA, **settings) as writer:
        for rows in blocks:
            writer.write_table(pa.Table.from_pylist(rows, schema=MINED_SCHEMA))
