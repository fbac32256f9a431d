"""What a table of products holds: which columns are the pictures, the titles, the ids, the prices, the categories."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
from price_parser import Price

from conjoin.data import load_pairs
from conjoin.data.cells import clean_texts, decimal_mark, read_number
from conjoin.data.columns import NUMBER, ColumnNames, TableColumns, guess_columns, is_text, undecoded
from conjoin.data.pair_sources import open_source
from conjoin.processing.item_error import ItemError
from conjoin.retrieval.collection import OWN_COLUMNS
from conjoin.serving.columns import PRICE, column_kind

_ROWS = 50_000
"""Rows that the guesses read."""
_CODE = re.compile(r"0\d+|\d{10,}")
_MOST = 0.8
_SHOWN = 6


class Products(NamedTuple):
    """What a table of products holds.

    Attributes:
        columns: The parts of its rows.
        keep: The columns for `--keep`.
        lines: On what was found, for people.
        currency: Of the prices, as most of them write it.
    """

    columns: TableColumns
    keep: Sequence[str]
    lines: Sequence[str]
    currency: str | None = None

    @property
    def named(self) -> dict[str, str]:
        """The columns as `--columns` takes them."""
        image, text, id_, group, _ = self.columns
        return {"image": image or "", "text": ",".join(text), "id": id_ or "", "group": group or ""}


def find_products(table: str, columns: ColumnNames | None = None, keep: Sequence[str] = ()) -> Products:
    """Look at a table of products or a folder of pictures, and guess its columns by their values and names.

    Args:
        table: A CSV, TSV, JSON-lines or Parquet file, or a folder.
        columns: Those that are given, as for `load_pairs`.
        keep: Columns to keep beside that of the products, in place of those of numbers and of few texts.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no table, has no rows, no such column, neither pictures nor titles, or no row that can be
            used.
    """
    dataset: Any = undecoded(open_source(Path(table), "train", False)[0])
    chosen = guess_columns(dataset, columns)
    if chosen.image is None and not chosen.text:
        raise ValueError(
            f"{table!r}: none of its columns {', '.join(map(repr, dataset.column_names))} holds pictures (paths such "
            "as images/1.jpg, or URLs) or titles (texts of several words); name one by --columns"
        )
    free = _Columns(dataset)
    used = {chosen.image, *chosen.text[:1], chosen.id, chosen.group}  # further texts may be kept too
    unkept = [name for name in free.free if name in (*OWN_COLUMNS, "text", "image") and name not in used]
    free.free = [name for name in free.free if name not in (*used, *unkept)]
    numbers, choices = free.numbers(), free.choices()
    group = [chosen.group] if chosen.group else []
    found = Products(chosen, [*dict.fromkeys([*group, *(keep or [*numbers, *choices])])], (), free.currency())
    pairs: Any = load_pairs(table, on_error="skip", columns=found.named, keep=found.keep)
    problems = [problem for problem in pairs["problem"] if problem is not None]
    if len(problems) == len(pairs):
        raise ValueError(f"none of the {len(pairs)} rows of {table!r} can be used: {problems[0]}")
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for problem in problems:
        by_reason[re.sub(r"'[^']*'|\d+", "", problem.partition(": ")[2])].append(problem)
    parts = [part for part in ("image", "text") if part in pairs.column_names]
    cells = pairs.select_columns([*parts, "problem"]).with_format("arrow")[:]
    cells = cells.filter(cells["problem"].is_null())
    there = zip(*(cells[part].is_valid().to_pylist() for part in parts), strict=True)
    kinds = Counter("both" if len(row) == sum(row) == 2 else parts[row.index(True)] for row in there)
    plain = {name.partition(":")[0] for name in found.keep}
    described = {name.partition(":")[0]: line for name, line in (numbers | choices).items()}
    shown = [f"{name} ({free.example(name)!r:.40})" for name in (*unkept, *described, *free.free) if name not in plain]
    also = {role: f", not {', '.join(names)}" if names else "" for role, names in chosen.others.items()}
    lines = [
        f"{len(dataset):,} rows"
        + (f", {len(problems):,} of which cannot be used and are skipped" if problems else ""),
        *(f"  skipped     {len(some):,}, such as {some[0]}" for some in by_reason.values()),
        *(f"  {kind:<11} {count:,} rows" for kind, count in sorted(kinds.items()) if len(kinds) > 1),
        f"  pictures    {chosen.image or 'none'}{also['image']}",
        f"  titles      {', '.join(chosen.text) or 'none'}{also['text']}",
        f"  ids         {chosen.id or 'row numbers: no column has a value of its own in each row'}{also['id']}",
        *([f"  products    {chosen.group}: the app shows one row of each"] if group else []),
        *(line for name, line in described.items() if name in plain),
        *([f"  not kept    {', '.join(shown)}"] if shown else []),
        "A wrong guess: --columns image=... text=... id=... group=..., --keep.",
    ]
    return found._replace(lines=lines)


class _Columns:
    """The columns of a table that have no role yet, and their values in its first rows."""

    def __init__(self, dataset: datasets.Dataset) -> None:
        self.dataset = dataset
        self.first = dataset.select(range(min(_ROWS, len(dataset))))
        self.free = [*dataset.column_names]
        names = [name for name, feature in dataset.features.items() if is_text(feature)]
        cells = self.first.select_columns(names).with_format("arrow")[:]
        self.cells = {name: clean_texts(cells[name].combine_chunks()) for name in names}
        self.texts = {name: column.drop_null().to_pylist() for name, column in self.cells.items()}

    def take(self, name: str) -> None:
        """Give a column a role."""
        self.free = [free for free in self.free if free != name]

    def numbers(self) -> dict[str, str]:
        """Take the columns of numbers, prices first; each as `--keep` takes it, with a line on it."""
        lines = {}
        for name in sorted(self.free, key=lambda name: PRICE.search(name) is None):
            feature: Any = self.dataset.features[name]
            values, odd = _as_numbers(self.texts.get(name, ()))
            kind = NUMBER if values else ""
            if isinstance(feature, datasets.Value) and re.match("u?int|float", feature.dtype):
                values = [value for value in self.first[name][:] if value is not None and value == value]
            if len({*values}) > 1:
                line = f"  numbers     {name}: {min(values):,g} to {max(values):,g}"
                line += f", read as {name}{kind}" if kind else ""
                blank = len(self.first) - len(values) - len(odd)
                line += f", blank in {blank:,} rows" if blank else ""
                line += f", {len(odd):,} are no numbers, such as {odd[0]!r:.40}" if odd else ""
                lines[name + kind] = line
                self.take(name)
        return lines

    def choices(self) -> dict[str, str]:
        """Take the columns of short texts that repeat, and of dates; each with a line on it."""
        lines = {}
        for name in [name for name in self.free if len({*self.texts.get(name, ())}) > 1]:
            kind, values = column_kind(pa.chunked_array([self.cells[name]])), sorted({*self.texts[name]})
            if kind == "choice":
                more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
                lines[name] = f"  categories  {name}: {', '.join(values[:_SHOWN])}{more}"
                self.take(name)
            elif kind == "date":
                lines[name] = f"  dates       {name}: {values[0]} to {values[-1]}"
                self.take(name)
        return lines

    def currency(self) -> str | None:
        """The currency of the first column of texts that is named like a price."""
        prices: Sequence[str] = next((self.texts[name] for name in self.texts if PRICE.search(name)), ())
        found = Counter(filter(None, (Price.fromstring(price).currency for price in prices[:_SHOWN])))
        return found.most_common(1)[0][0] if found else None

    def example(self, name: str) -> str:
        """A value of a column of texts, one that is no number if there is any."""
        values = self.texts.get(name, ())
        return next((value for value in values if not _as_numbers([value])[0]), next(iter(values), ""))


def _as_numbers(values: Sequence[str]) -> tuple[list[float], list[str]]:
    """Return the numbers among texts, and the texts that are none; no numbers if these are more than one in five.

    Nor if a text is a code such as 007.
    """
    if any(map(_CODE.fullmatch, values)):
        return [], []
    mark = decimal_mark(values)
    numbers, odd = [], []
    for value in values:
        try:
            numbers.append(read_number(value, "", "", mark))
        except ItemError:
            odd.append(value)
    known = [number for number in numbers if number is not None]
    return (known, odd) if len(odd) <= (1 - _MOST) * len(values) else ([], [])
