"""MERIT: its files on disk, its products, its queries, and the subsets of its out-of-distribution tests."""

import glob
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from conjoin.data.cells import parsed
from conjoin.data.columns import require_columns, undecoded
from conjoin.data.json_files import JsonLines, json_object
from conjoin.data.pair_sources import open_source
from conjoin.data.query_rows import Candidate, QueryDataset, QueryRow
from conjoin.data.row_checks import check_ids
from conjoin.data.row_images import PLACEHOLDER, RowImages, check_placeholders, folders_beside, interleave
from conjoin.processing.item_error import ItemError
from conjoin.processing.item_inputs import check_text

PRODUCT_FEATURES = datasets.Features(
    {
        "image": datasets.Image(),
        **dict.fromkeys(("title", "idx", "class", "country", "language", "attribute"), datasets.Value("string")),
    }
)
"""The columns of the published Parquet files; `attribute` is a JSON object as a text."""
OOD_VALUES: dict[str, tuple[str, ...]] = {
    "language": ("th", "ms", "id"),
    "attribute": ("brand", "pattern/print", "region of origin"),
    "class": ("drink", "table", "phone"),
}
"""What the out-of-distribution tests hold out (Table 7), in the order in which the authors assign queries."""
_TITLE = re.compile(rf"{PLACEHOLDER}(?:(?!{PLACEHOLDER}).)*?(?=</Product\s*\d+\s*>)", flags=re.DOTALL)


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


class MeritProducts(dict[str, MeritProduct]):
    """The products of a split, by id.

    Memory holds everything but the images. `datasets` keeps a copy of the files in its cache.

    Args:
        folder: The root of MERIT, with `data/{split}-*.parquet`.
        split: `"train"` or `"test"`; the miniature also has `"validation"`.

    Raises:
        FileNotFoundError: There are no files of the split.
        ValueError: A file is damaged, a column is missing, an id is missing or occurs twice, or a title is empty (the
            message names the product).
    """

    def __init__(self, folder: str | Path, split: str) -> None:
        self.folder, self.split = Path(folder), split
        files = f"{glob.escape(str(folder))}/data/{split}-*.parquet"
        rows: Any = open_source([files], "train", streaming=False)[0]
        require_columns(PRODUCT_FEATURES, rows.column_names)
        self._images = undecoded(rows.select_columns("image"))
        products = [self._product(row, index) for index, row in enumerate(rows.remove_columns("image"))]
        check_ids(product.id for product in products)
        super().__init__((product.id, product) for product in products)
        self._places = {pid: place for place, pid in enumerate(self)}

    def __str__(self) -> str:
        return f"the {self.split} products of {str(self.folder)!r}"

    def image(self, pid: str) -> Any:
        """Read the undecoded image of a product, `{"bytes", "path"}`, or return its path where there are no bytes.

        Raises:
            ItemError: It has none, or one outside of the folder.
        """
        image: dict[str, Any] = self._images[self._places[pid]]["image"] or {}
        if image.get("bytes"):
            return image
        inside = RowImages(self.folder, folders_beside(self.folder))
        return inside.check(image.get("path"), f"{self}: the product {pid!r}")

    def _product(self, row: dict[str, Any], index: int) -> MeritProduct:
        pid = product_id(row["idx"], f"{self}, row {index}")
        where = f"{self}, row {index}: the product {pid!r}"
        title = check_text(row["title"], f"{where}: title").strip()
        kind, country, language = (row[name] or "" for name in ("class", "country", "language"))
        attributes = parsed((row["attribute"] or "").strip() or "{}")  # the published files have JSON and Python
        if not isinstance(attributes, dict):
            raise ItemError(where, f"'attribute' is no object of JSON or Python: {row['attribute']!r:.80}")
        return MeritProduct(pid, title, kind, country, language, attributes)


def product_id(value: object, where: str) -> str:
    """Return a product id, an integer or a string in the data, as a string.

    Raises:
        ValueError: It is neither, or not one word.
    """
    if isinstance(value, bool) or not isinstance(value, int | str) or len(str(value).split()) != 1:
        raise ItemError(where, f"a product id must be an integer or a string of one word, got {value!r:.80}")
    return str(value)


@dataclass(frozen=True)
class MeritQuery:
    """A query.

    Attributes:
        id: Its line in the file of queries, from 1; published queries have no id.
        conditions: The attributes (name to value) that the answer shares with each product of the query, by id.
        positives: Ids of the products that answer it.
        negatives: Ids of products that nearly do; a product that the file lists as both is a positive.
        instruction: The text, with `<image>` for the image of each product in order, and titles as plain text.
    """

    id: str
    conditions: dict[str, dict[str, Any]]
    positives: tuple[str, ...]
    negatives: tuple[str, ...]
    instruction: str

    @property
    def products(self) -> tuple[str, ...]:
        """Ids of the products that it shows."""
        return tuple(self.conditions)

    @property
    def touched(self) -> tuple[str, ...]:
        """Ids of all products that it names: its own, positives and negatives."""
        return (*self.conditions, *self.positives, *self.negatives)

    @property
    def attributes(self) -> set[str]:
        """Names of its attributes."""
        return {name for condition in self.conditions.values() for name in condition}


def query_file(folder: str | Path, split: str) -> Path:
    """Return the file of a split's queries."""
    return Path(folder) / f"queries-{split}.json"


def read_query(row: Mapping[str, Any], path: str | Path, line: int) -> MeritQuery:
    """Check one line of a file of queries.

    `query` is `{product id: {attribute: value}}`, or a list of product ids whose attributes are not known. In the
    queries of the cold start, the attribute is `others`, and further conditions are text only.

    Raises:
        ValueError: A field is missing or malformed, there is no positive, a positive is a product of the query, or the
            placeholders are not as many as the products. The message starts with file and line.
    """
    where, query = f"{str(path)!r}, line {line}", row.get("query")
    if isinstance(query, list):
        conditions: dict[str, dict[str, Any]] = {pid: {} for pid in _ids(query, f"{where}: query")}
    elif isinstance(query, Mapping) and all(isinstance(each, Mapping) for each in query.values()):
        conditions = {product_id(pid, f"{where}: query"): dict(condition) for pid, condition in query.items()}
    else:
        expected = "{product id: {attribute: value}} or a list of product ids"
        raise ItemError(where, f"query must be {expected}, got {query!r:.80}")
    positives = _ids(row.get("pos_candidate") or [], f"{where}: pos_candidate")
    negatives = _ids(row.get("hard_negative") or [], f"{where}: hard_negative")
    if not conditions or not positives:
        raise ItemError(where, "the query has no product or no positive")
    for pid in conditions.keys() & positives:
        raise ItemError(where, f"the positive {pid!r} is a product of its own query")
    negatives = tuple(pid for pid in negatives if pid not in positives)
    instruction = check_text(row.get("query instruction"), f"{where}: query instruction")
    check_placeholders(instruction, len(conditions), where)
    return MeritQuery(str(line), conditions, positives, negatives, instruction)


def without_titles(instruction: str) -> str:
    """Remove the titles: the text from each image to the `</Product n>` that follows it."""
    return _TITLE.sub(PLACEHOLDER, instruction)


def ood_values(folder: str | Path) -> dict[str, tuple[str, ...]]:
    """Return the values that the out-of-distribution tests hold out: `OOD_VALUES`, or `ood.json` of a miniature.

    Raises:
        ValueError: That file is no JSON.
    """
    path = Path(folder) / "ood.json"
    if not path.is_file():
        return OOD_VALUES
    held_out = json_object(path.read_bytes(), repr(str(path)))
    return {kind: tuple(values) for kind, values in held_out.items()}


def subset_names(values: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the names of the subsets of the out-of-distribution tests, such as `language:th`."""
    return [f"{kind}:{value}" for kind, held_out in values.items() for value in held_out]


def ood_subsets(query: MeritQuery, products: MeritProducts, values: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the subsets that a test query is in, at most one of each kind, as the authors assign them.

    A query is in `language:X` if all products that it names have the language, in `attribute:X` if one of its own
    attributes is X, and in `class:X` if any product that it names is of the class. The first value that fits counts.
    """
    touched = [products[pid] for pid in query.touched]
    fits = {
        "language": lambda value: all(product.language == value for product in touched),
        "attribute": lambda value: value in query.attributes,
        "class": lambda value: any(product.kind == value for product in touched),
    }
    first = ((kind, next(filter(fits[kind], held_out), None)) for kind, held_out in values.items())
    return [f"{kind}:{value}" for kind, value in first if value is not None]


def is_held_out(product: MeritProduct, kind: str, values: Mapping[str, Iterable[str]]) -> bool:
    """Whether the out-of-distribution test of a kind keeps a product out of training."""
    if kind == "attribute":
        return any(value in product.attributes for value in values[kind])
    return (product.language if kind == "language" else product.kind) in values[kind]


def _ids(values: object, where: str) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise ItemError(where, f"expected a list of product ids, got {values!r:.80}")
    return tuple(dict.fromkeys(product_id(value, where) for value in values))


@dataclass
class MeritItems:
    """Makes items of queries and products, in full or with a part left out (Fig. 6).

    Iteration yields all products as rows for `encode_collection`.

    Args:
        products: The products.
        captions: A caption by product id, shown in place of every image; None shows the images.
        titles: Whether products have their titles.

    Raises:
        ValueError: A product has no caption.
    """

    products: MeritProducts
    captions: dict[str, str] | None = None
    titles: bool = True

    def __post_init__(self) -> None:
        missing = set() if self.captions is None else self.products.keys() - self.captions.keys()
        if missing:
            raise ValueError(f"there is no caption for the product {min(missing)!r} of {self.products}")

    def __len__(self) -> int:
        return len(self.products)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"id": pid} | self.product(pid) for pid in self.products)

    def query(self, query: MeritQuery) -> dict[str, Any]:
        """Return a query as a row for `encode_collection`: its images, and its text with `<image>` in their places."""
        text = query.instruction if self.titles else without_titles(query.instruction)
        if self.captions is None:
            return {"id": query.id, "image": [self.products.image(pid) for pid in query.products], "text": text}
        captions = map(self.captions.__getitem__, query.products)
        return {"id": query.id, "text": re.sub(PLACEHOLDER, lambda _: next(captions), text)}

    def product(self, pid: str) -> dict[str, Any]:
        """Return a product as an item: its image, then its title."""
        title = self.products[pid].title if self.titles else None
        if self.captions is not None:
            return {"text": "\n".join(text for text in (self.captions[pid], title) if text)}
        return {"image": self.products.image(pid)} | ({"text": title} if title else {})


@dataclass
class MeritQueryRows:
    """The rows of queries for `encode_collection`, whose images are read when they are needed."""

    items: MeritItems
    queries: Sequence[MeritQuery]

    def __len__(self) -> int:
        return len(self.queries)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.items.query, self.queries)


class MeritTraining(QueryDataset):
    """Training queries of MERIT, chats with images and texts in turn, see `QueryDataset`.

    Queries stay on disk until they are used.

    Args:
        folder: The root of MERIT.
        hard_negatives: Negatives of each row, from the hard negatives of the query.
        ood: Drop every query that touches a product which the out-of-distribution test of this kind holds out:
            `"language"`, `"attribute"` or `"class"`.
        split: The split to train on.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A malformed query or product (it is named), an unknown `ood`, a negative `hard_negatives`, or no
            query is left.
    """

    def __init__(
        self, folder: str | Path, *, hard_negatives: int = 0, ood: str | None = None, split: str = "train"
    ) -> None:
        super().__init__(hard_negatives)
        values = ood_values(folder)
        if ood is not None and ood not in values:
            raise ValueError(f"unknown out-of-distribution test {ood!r}; expected one of {', '.join(values)}")
        products = MeritProducts(folder, split)
        self.items = MeritItems(products)
        held_out = {pid for pid, each in products.items() if ood is not None and is_held_out(each, ood, values)}
        kept = [query for query in merit_queries(folder, products) if held_out.isdisjoint(query.touched)]
        if not kept:
            raise ValueError(f"the out-of-distribution test of {ood} leaves no query of {products}")
        self.lines = JsonLines(query_file(folder, split))
        self._numbers = [int(query.id) for query in kept]
        self.positives = [query.positives for query in kept]
        self.sources = ["merit"] * len(kept)

    def read(self, index: int) -> QueryRow:
        """Read the row of a query; its candidates are products by id."""
        line = self._numbers[index]
        query = read_query(self.lines[line - 1], self.lines.path, line)
        row = self.items.query(query)
        return QueryRow(query.id, interleave(row["text"], row["image"]), query.positives, query.negatives)

    def candidate(self, name: str) -> Candidate:
        """Return a product as a candidate."""
        return Candidate(name, self.items.product(name), "image,text")


def merit_queries(folder: str | Path, products: MeritProducts) -> list[MeritQuery]:
    """Read and check the queries of the split of `products`, in order.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A malformed query; the message starts with file and line.
    """
    path, queries = query_file(folder, products.split), []
    for line, row in enumerate(JsonLines(path), start=1):
        query = read_query(row, path, line)
        for pid in query.touched:
            if pid not in products:
                raise ItemError(
                    f"{str(path)!r}, line {line}", f"the query names the unknown product {pid!r}; {products} lack it"
                )
        queries.append(query)
    return queries


def read_captions(path: str | Path) -> dict[str, str]:
    """Read captions of products: JSON lines with `idx` and `caption`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line is malformed or its caption is empty; the message names file and line.
    """
    captions = {}
    for line, row in enumerate(JsonLines(path), start=1):
        where = f"{str(path)!r}, line {line}"
        caption = check_text(row.get("caption"), f"{where}: caption")
        captions[product_id(row.get("idx"), where)] = caption.strip()
    return captions
