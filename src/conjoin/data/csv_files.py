"""CSV tables as spreadsheets write them: a cell is a text, an empty one is null, a fault is named by its line."""

import codecs
import csv
import glob
import io
import itertools
import logging
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from conjoin.data.json_files import open_bytes, text_problem

logger = logging.getLogger(__name__)
ENCODING = "CONJOIN_ENCODING"
"""Environment variable with the encoding of CSV files; without it, it is found out."""
_ROWS_AT_ONCE = 10_000


class CsvTable(datasets.ArrowBasedBuilder):
    """A CSV file as a dataset of texts."""

    def _info(self) -> datasets.DatasetInfo:
        _, names = next(csv_rows(Path(self.config.data_files["train"][0])))
        return datasets.DatasetInfo(features=datasets.Features({name: datasets.Value("string") for name in names}))

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        return [datasets.SplitGenerator(name="train", gen_kwargs={"paths": self.config.data_files["train"]})]

    def _generate_tables(self, paths: list[str]) -> Iterator[tuple[int, pa.Table]]:
        rows = csv_rows(Path(paths[0]))
        _, names = next(rows)
        while block := [[cell or None for cell in row] for _, row in itertools.islice(rows, _ROWS_AT_ONCE)]:
            yield 0, pa.table([pa.array(column, pa.string()) for column in zip(*block, strict=True)], names)


def open_csv(path: Path) -> CsvTable:
    """Return the builder of a CSV or TSV file, perhaps compressed.

    Raises:
        ValueError: The file is not text, or the header is malformed.
    """
    # `datasets` keeps what it read by the file, its time, and the name of the configuration
    name = f"{os.environ.get(ENCODING) or 'default'}-{path.stat().st_size}"
    return CsvTable(data_files=glob.escape(str(path)), config_name=name)


def csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the cells of the header, then those of each row that has any value.

    Raises:
        ValueError: A cell's quotes do not match, a row is longer than the header, or a name occurs twice.
    """
    csv.field_size_limit(2**31 - 1)
    facts = path.stat()
    encoding, separator, skipped = _layout(path, facts.st_mtime_ns, facts.st_size, os.environ.get(ENCODING))
    names: list[str] = []
    with io.TextIOWrapper(open_bytes(path), encoding=encoding, newline="") as file:
        for _ in range(skipped):
            file.readline()
        rows = csv.reader(file, delimiter=separator, strict=True)
        end = skipped
        try:
            for row in rows:
                start = end + 1
                end = skipped + rows.line_num
                if not any(row):
                    continue
                if not names:
                    row = names = _names(row)
                elif end > start and has_stray_quote(row, len(names), separator):
                    raise ValueError(
                        f"the lines {start} to {end} are one row, because a cell begins with a double quote; write it "
                        'as """ and end the cell with "'
                    )
                if any(row[len(names) :]):
                    raise ValueError(
                        f"line {start} has {len(row)} fields, the header {len(names)}; put a text that holds "
                        f"{separator!r} in double quotes"
                    )
                yield start, row if len(row) == len(names) else (row + [""] * len(names))[: len(names)]
        except csv.Error as error:
            raise ValueError(
                f"lines {end + 1} to {skipped + rows.line_num}: {error}; a cell begins with a double quote "
                'that does not end it: write """ for a quote, and end the cell with "'
            ) from error


def _names(header: list[str]) -> list[str]:
    names = [name.strip() or f"Unnamed: {index}" for index, name in enumerate(header)]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ValueError(f"two of its columns are named {repeated[0]!r}; expected a name for each")
    return names


def has_stray_quote(row: list[str], width: int, separator: str) -> bool:
    """Whether each line of a row that spans several looks like a row: a stray quote made them one cell."""
    lines = [line.split(separator) for line in separator.join(row).splitlines()]
    return width > 1 and all(
        len(cells) == width and not any(cell[:1] == " " for cell in cells) and " " not in cells[0] for cells in lines
    )


@lru_cache
def _layout(path: Path, changed: int, size: int, given: str | None) -> tuple[str, str, int]:
    """Return the encoding of a file, its separator, and how many lines are before the header (1 for `sep=;` of Excel).

    The separator is the one that makes most columns, as many in the first row.
    """
    encoding = _encoding(path, given)
    with io.TextIOWrapper(open_bytes(path), encoding=encoding, newline="") as file:
        start = list(itertools.islice((line for line in file if line.strip()), 20))
    if start and (named := re.fullmatch(r"sep=([,;\t|])\s*", start[0], re.IGNORECASE)):
        return encoding, named[1], 1
    if Path(path.name.lower().removesuffix(".gz")).suffix == ".tsv":
        return encoding, "\t", 0

    def score(separator: str) -> tuple[bool, int]:
        header, *rows = [len(row) for row in itertools.islice(csv.reader(start, delimiter=separator), 2)]
        return header > 1 and all(count == header for count in rows), header

    return encoding, max(",;\t|", key=score) if start else ",", 0


def _encoding(path: Path, given: str | None) -> str:
    """Return the encoding of a file: UTF-8, UTF-16 with its mark, else Windows-1252, with a warning.

    Raises:
        ValueError: It is none of them.
    """
    if given:
        try:
            return codecs.lookup(given).name
        except LookupError as error:
            raise ValueError(f"unknown encoding {given!r}; expected one that Python knows, such as cp1250") from error
    with open_bytes(path) as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            return "utf-16"
    problem = text_problem(path)
    if problem is None:
        return "utf-8-sig"
    if text_problem(path, "cp1252"):
        raise ValueError(f"{problem}, nor Windows-1252; save it as UTF-8")
    logger.warning("%s: %s; read as Windows-1252. Save it as UTF-8 if letters are wrong", path, problem)
    return "cp1252"
