"""The products of MERIT: their facts in memory, their images on disk until they are read."""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from conjoin.data.columns import undecoded, without_bytes
from conjoin.data.image_files import path_inside
from conjoin.data.row_checks import repeated_id
from conjoin.processing.item_error import ItemError

PRODUCT_FEATURES = datasets.Features(
    {
        "image": datasets.Image(),
        **{name: datasets.Value("string") for name in ("title", "idx", "class", "country", "language", "attribute")},
    }
)
"""The columns of the published Parquet files; `attribute` is a JSON object as a text."""


@dataclass(frozen=True)
class MeritProduct:
    """A product without its image.

    Attributes:
        id: Its `idx`.
        title: Its title, in its language.
        kind: Its `class`, such as `phone`.
        country: Where it is sold.
        language: Language of the title, such as `th`.
        attributes: A text, or a list of texts, by name.
    """

    id: str
    title: str
    kind: str
    country: str
    language: str
    attributes: dict[str, Any]


class MeritProducts:
    """The products of a split, by id.

    Memory holds everything but the images. `datasets` keeps a copy of the files in its cache.

    Args:
        folder: The root of MERIT, with `data/{split}-*.parquet`.
        split: `"train"` or `"test"`; the miniature also has `"validation"`.

    Raises:
        FileNotFoundError: There are no files of the split.
        ValueError: A file is damaged, a column is missing, an id is missing or occurs twice, a title is empty, an
            attribute is empty, or a product has no image or one outside of the folder (the message names the product).
    """

    def __init__(self, folder: str | Path, split: str) -> None:
        self.folder, self.split = Path(folder), split
        files = sorted((self.folder / "data").glob(f"{split}-*.parquet"))
        if not files:
            raise FileNotFoundError(f"MERIT: no such files: {str(self.folder / 'data' / f'{split}-*.parquet')!r}")
        rows = _read_files(files)
        missing = [name for name in PRODUCT_FEATURES if name not in rows.column_names]
        if missing:
            raise ValueError(f"{self}: no column {missing[0]!r}; the columns are {rows.column_names}")
        self._images = undecoded(rows.select_columns("image"))
        facts = rows.remove_columns("image")
        self._products = [self._product(row, index) for index, row in enumerate(facts)]
        self._indices = {product.id: index for index, product in enumerate(self._products)}
        if len(self._indices) < len(self._products):
            repeated = next(p.id for index, p in enumerate(self._products) if self._indices[p.id] != index)
            raise repeated_id(repeated, str(self))
        for index, image in enumerate(without_bytes(self._images)):
            if image["bytes"] is None:
                name = f"{self}, row {index}: the product {self._products[index].id!r}"
                if not image["path"]:
                    raise ItemError(name, "it has no image")
                path_inside(self.folder, image["path"], name)

    def __str__(self) -> str:
        return f"the {self.split} products of {str(self.folder)!r}"

    def __len__(self) -> int:
        return len(self._products)

    def __iter__(self) -> Iterator[MeritProduct]:
        return iter(self._products)

    def __contains__(self, pid: object) -> bool:
        return pid in self._indices

    def __getitem__(self, pid: str) -> MeritProduct:
        if pid not in self._indices:
            raise ValueError(f"the product {pid!r} is not among {self}")
        return self._products[self._indices[pid]]

    def image(self, pid: str) -> dict[str, Any]:
        """Read the undecoded image of a product, `{"bytes", "path"}`."""
        image = self._images[self._indices[pid]]["image"]
        if image["bytes"] is None:
            image["path"] = str(self.folder / image["path"])
        return image

    def _product(self, row: dict[str, Any], index: int) -> MeritProduct:
        where = f"{self}, row {index}"
        pid = product_id(row["idx"], where)
        where = f"{where}: the product {pid!r}"
        if not (row["title"] or "").strip():
            raise ItemError(where, "it has no title")
        kind, country, language = (row[name] or "" for name in ("class", "country", "language"))
        attributes = check_attributes(_read_attributes(row["attribute"], where), where)
        return MeritProduct(pid, row["title"].strip(), kind, country, language, attributes)


def _read_files(files: Sequence[Path]) -> datasets.Dataset:
    """Read Parquet files; each is opened first, so that a damaged one is named."""
    for file in files:
        try:
            pq.read_schema(file)
        except pa.ArrowException as error:
            raise ValueError(f"{str(file)!r} cannot be read as Parquet: {error}") from error
    return datasets.Dataset.from_parquet([str(file) for file in files])


def product_id(value: object, where: str) -> str:
    """Return a product id, an integer or a string in the data, as a string.

    Raises:
        ValueError: It is neither, or not one word.
    """
    if isinstance(value, bool) or not isinstance(value, int | str) or len(str(value).split()) != 1:
        raise ItemError(where, f"a product id must be an integer or a string of one word, got {value!r:.80}")
    return str(value)


def check_attributes(attributes: object, where: str) -> dict[str, Any]:
    """Return attributes, a text or a list of texts by name.

    Raises:
        ValueError: They are no mapping, or a name or a value is empty.
    """
    if not isinstance(attributes, Mapping):
        raise ItemError(where, f"expected attributes as {{name: value}}, got {attributes!r:.80}")
    for name, value in attributes.items():
        texts = [name, *(value if isinstance(value, list) and value else [value])]
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise ItemError(where, f"the attribute {name!r} is empty or no text: {value!r:.80}")
    return dict(attributes)


def _read_attributes(value: object, where: str) -> object:
    """Parse attributes that are written as JSON or as a Python literal; nothing is no attributes."""
    if not isinstance(value, str):
        return {} if value is None else value
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(value) if value.strip() else {}
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    raise ItemError(where, f"'attribute' is neither JSON nor a Python literal: {value!r:.80}")
