"""What a table of products holds: which columns are the pictures, the titles, the ids, the prices, the categories."""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import datasets

from conjoin.data import COMMON_COLUMNS, load_pairs
from conjoin.data.cells import decimal_mark, read_number
from conjoin.data.columns import (
    NUMBER,
    ColumnNames,
    element_of,
    holds_images,
    is_text,
    matching,
    named_columns,
    undecoded,
)
from conjoin.data.pair_sources import open_source
from conjoin.data.row_images import listed_images
from conjoin.processing.item_error import ItemError
from conjoin.processing.item_images import is_url
from conjoin.processing.item_inputs import PICTURE_SUFFIXES
from conjoin.retrieval.collection_table import OWN_COLUMNS
from conjoin.serving.columns import describe_column

_ROWS = 50_000
"""Rows that the guesses read."""
_TITLES = (
    "title", "name", "product_name", "product_title", "titel", "bezeichnung", "produktname", "artikelname",
    "artikelbezeichnung", "titre", "nom", "nombre", "titulo", "titolo", "nome",
)  # fmt: skip
_IDS = (*COMMON_COLUMNS["id"], "artikelnummer", "artikelnr", "art_nr", "ean", "gtin", "nr", "number")
_GROUPS = (
    "item_group_id", "group_id", "group", "product_group", "parent_id", "parent_sku", "parent", "product_id",
    "product", "style_id", "model", "produkt_id", "produkt", "modell",
)  # fmt: skip
_PRICE = re.compile(r"price|preis|prix|precio|prezzo|cost", re.IGNORECASE)
_CODE = re.compile(r"0\d+|\d{10,}")
_OFTEN, _MOST = 0.5, 0.8
_SHOWN = 6


class Products(NamedTuple):
    """What a table of products holds.

    Attributes:
        image: The column of the pictures; None without one.
        texts: The columns of the titles; empty without one.
        id: The column of the ids; "" for row numbers.
        group: A column with one value for all rows of a product; None without one.
        keep: The columns for `--keep`.
        lines: On what was found, for people.
    """

    image: str | None
    texts: Sequence[str]
    id: str
    group: str | None
    keep: Sequence[str]
    lines: Sequence[str]

    @property
    def only(self) -> Literal["image", "text"] | None:
        """The part of a row that there is, for `--only`; None for both."""
        return "text" if self.image is None else None if self.texts else "image"


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
    try:
        dataset: Any = undecoded(open_source(Path(table), "train", False)[0])
    except ValueError:
        if not Path(table).is_dir():
            raise
        dataset = open_source(Path(table), "train", False, captions=False)[0]
    named = named_columns(columns, dataset.column_names)
    if Path(table).is_dir() and "id" not in named and "id" in dataset.column_names:
        named["id"] = ["id"]  # the name of the picture, which may have spaces
    free = _Columns(dataset)
    image = free.take(named["image"][0] if named.get("image") else free.image())
    texts = named.get("text") or [*filter(None, [free.title()])]
    free.take(texts[0] if texts else None)  # further ones may be kept too
    if image is None and not texts:
        raise ValueError(
            f"{table!r}: none of its columns {', '.join(map(repr, dataset.column_names))} holds pictures (paths such "
            "as images/1.jpg, or URLs) or titles (texts of several words); name one by --columns"
        )
    id_ = free.take(next(iter(named["id"]), None) if "id" in named else free.id()) or ""
    unkept = [name for name in free.free if name in (*OWN_COLUMNS, "text", "image")]
    free.free = [name for name in free.free if name not in unkept]
    group = free.take(named["group"][0] if named.get("group") else free.named(_GROUPS, free.repeats))
    numbers, choices = free.numbers(), free.choices()
    kept = [*dict.fromkeys([*([group] if group else []), *(keep or [*numbers, *choices])])]
    found = Products(image, texts, id_, group, kept, ())
    pairs: Any = load_pairs(
        table, columns={"image": image or "", "text": texts, "id": id_}, only=found.only, on_error="skip", keep=kept
    )
    problems = [problem for problem in pairs["problem"] if problem is not None]
    if len(problems) == len(pairs):
        raise ValueError(f"none of the {len(pairs)} rows of {table!r} can be used: {problems[0]}")
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for problem in problems:
        by_reason[re.sub(r"'[^']*'|\d+", "", problem.partition(": ")[2])].append(problem)
    plain = {name.partition(":")[0] for name in kept}
    described = {name.partition(":")[0]: line for name, line in (numbers | choices).items()}
    others = [name for name in (*unkept, *described, *free.free) if name not in plain]
    shown = [f"{name} ({free.example(name)!r:.40})" for name in others]
    values = {name: len({*dataset[name][:]}) for name in matching(_IDS, dataset.column_names)}
    repeats = [f"{name} has {count:,} values in {len(dataset):,} rows" for name, count in values.items()]
    why = ", ".join(repeats) or "no column has a value of its own in each row"
    lines = [
        f"{len(dataset):,} rows"
        + (f", {len(problems):,} of which cannot be used and are skipped" if problems else ""),
        *(f"  skipped     {len(some):,}, such as {some[0]}" for some in by_reason.values()),
        f"  pictures    {image or 'none'}",
        f"  titles      {', '.join(texts) or 'none'}",
        f"  ids         {id_ or f'row numbers, as {why}'}",
        *([f"  products    {group}: the app shows one row of each"] if group else []),
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
        self.texts = {
            name: [value.strip() for value in self.first[name][:] if value and value.strip()]
            for name, feature in dataset.features.items()
            if is_text(feature)
        }

    def take(self, name: str | None) -> str | None:
        """Give a column a role."""
        self.free = [free for free in self.free if free != name]
        return name

    def named(self, names: Sequence[str], fits: Callable[[str], object]) -> str | None:
        """The first of some names, in any case, that a column has and that fits."""
        known = {name.lower().replace(" ", "_"): name for name in reversed(self.free)}
        return next(filter(fits, (known[name] for name in names if name in known)), None)

    def image(self) -> str | None:
        """The column of the pictures."""
        return self.named(COMMON_COLUMNS["image"], self._is_image) or next(filter(self._is_image, self.free), None)

    def _is_image(self, name: str) -> bool:
        """Whether most values are paths or URLs of pictures, or the column holds pictures."""
        feature: Any = self.dataset.features[name]
        kind: Any = element_of(feature) or feature
        if not is_text(kind):
            return holds_images(feature)
        values = self.texts.get(name) or [path for paths in self.first[name][:] for path in paths or ()]
        known = name.lower() in COMMON_COLUMNS["image"]
        return _share(values, lambda value: _is_picture(value) or (known and is_url(value))) > _OFTEN

    def title(self) -> str | None:
        """The column of the titles: by its name, else most values are several words, and most differ."""
        for name in self.free:
            values = self.texts.get(name, ())
            if _share(values, lambda value: " " in value) > _OFTEN and len({*values}) > _OFTEN * len(values):
                break
        else:
            name = ""
        return self.named((*_TITLES, *COMMON_COLUMNS["text"]), self.texts.get) or name or None

    def id(self) -> str | None:
        """The column of the ids."""
        own = (name for name in self.free if self._is_id(name) and not _PRICE.search(name))
        return self.named(_IDS, self._is_id) or next(own, None)

    def _is_id(self, name: str) -> bool:
        """Whether each row has a value of its own, without spaces; of a name such as `sku`, all but a few rows."""
        feature: Any = self.dataset.features[name]
        if name not in self.texts and not (isinstance(feature, datasets.Value) and "int" in feature.dtype):
            return False
        values = [str(value) for value in self.dataset[name][:] if value not in (None, "")]
        least = _MOST if name in matching(_IDS, self.dataset.column_names) else 1.0
        return len({*values}) >= least * len(self.dataset) and not any(
            " " in value or re.search(r"\d[.,]\d", value) for value in values
        )

    def repeats(self, name: str) -> bool:
        """Whether several rows have the same value, and not all."""
        values = self.first[name][:]
        return 1 < len({*values}) < len(values)

    def numbers(self) -> dict[str, str]:
        """Take the columns of numbers, prices first; each as `--keep` takes it, with a line on it."""
        lines = {}
        for name in sorted(self.free, key=lambda name: _PRICE.search(name) is None):
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
        """Take the columns with few, short texts; each with a line on it."""
        lines = {}
        for name in [name for name in self.free if len({*self.texts.get(name, ())}) > 1]:
            column = self.first.select_columns(name).with_format("arrow")[:][name]
            values = describe_column(name, column, is_whole=True).values
            if values is not None:
                more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
                lines[name] = f"  categories  {name}: {', '.join(values[:_SHOWN])}{more}"
                self.take(name)
        return lines

    def example(self, name: str) -> str:
        """A value of a column of texts, one that is no number if there is any."""
        values = self.texts.get(name, ())
        return next((value for value in values if not _as_numbers([value])[0]), next(iter(values), ""))


def _is_picture(value: str) -> bool:
    """Whether a cell names a picture or a list of them."""
    paths = listed_images(value)
    several = paths if isinstance(paths, list) else [paths]
    return bool(several) and all(
        path.startswith("data:image/") or path.partition("?")[0].lower().endswith(PICTURE_SUFFIXES) for path in several
    )


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


def _share(values: Sequence[str], test: Callable[[str], bool]) -> float:
    return sum(map(test, values)) / len(values) if values else 0.0
