"""MERIT as rows: queries as items that interleave images and texts, products as items, training rows."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from conjoin.data.interleaved import PLACEHOLDER, row_item
from conjoin.data.json_files import JsonLines
from conjoin.data.merit.layout import (
    MeritQuery,
    check_ood,
    check_products,
    is_held_out,
    ood_values,
    query_file,
    read_query,
    without_titles,
)
from conjoin.data.merit.products import MeritProducts, product_id
from conjoin.data.query_rows import draw_ids
from conjoin.processing.item_error import ItemError

MODALITY = "image,text"
"""Of every query and product."""


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
    captions: dict[str, str] | None = field(default=None, repr=False)
    titles: bool = True

    def __post_init__(self) -> None:
        if self.captions is None:
            return
        absent = [product.id for product in self.products if product.id not in self.captions]
        if absent:
            raise ValueError(f"there is no caption for the product {absent[0]!r} of {self.products}")

    def __len__(self) -> int:
        return len(self.products)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"id": product.id} | self.product(product.id) for product in self.products)

    def query(self, query: MeritQuery) -> dict[str, Any]:
        """Return a query as a row for `encode_collection`: its images, and its text with `<image>` in their places."""
        text = query.instruction if self.titles else without_titles(query.instruction)
        if self.captions is None:
            return {"id": query.id, "image": [self.products.image(pid) for pid in query.products], "text": text}
        captions = (self.captions[pid] for pid in query.products)
        return {"id": query.id, "text": re.sub(PLACEHOLDER, lambda _: next(captions), text)}

    def product(self, pid: str) -> dict[str, Any]:
        """Return a product as an item: its image, then its title."""
        title = self.products[pid].title if self.titles else None
        if self.captions is not None:
            return {"text": "\n".join(text for text in (self.captions[pid], title) if text)}
        return {"image": self.products.image(pid)} | ({"text": title} if title else {})


class MeritQueryRows:
    """The rows of queries for `encode_collection`, whose images are read when they are needed.

    Args:
        items: Makes the rows.
        queries: The queries.
    """

    def __init__(self, items: MeritItems, queries: Sequence[MeritQuery]) -> None:
        self.items, self.queries = items, queries

    def __len__(self) -> int:
        return len(self.queries)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.items.query, self.queries)


class MeritTraining(Dataset[dict[str, Any]]):
    """Training queries as rows for `RetrievalCollator`.

    A row has `id`, `query` (a chat with images and texts in turn), `positive` (an item), `negatives` (a list
    of items), `positive_id`, `negative_ids`, `target_modality`, `negative_modalities` and `dataset`. Each access
    samples among several positives and negatives with torch's generator.

    Args:
        folder: The root of MERIT.
        hard_negatives: Number of negatives per row, from the hard negatives of the query; a query without any has
            none.
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
        if hard_negatives < 0:
            raise ValueError(f"hard_negatives={hard_negatives} must not be negative")
        values = ood_values(folder)
        check_ood(ood, values)
        self.hard_negatives = hard_negatives
        self.lines = JsonLines(query_file(folder, split))
        self.items = MeritItems(MeritProducts(folder, split))
        products = self.items.products
        held_out = {each.id for each in products if ood is not None and is_held_out(each, ood, values)}
        self.positives: list[tuple[str, ...]] = []
        self._places: list[int] = []
        for place, query in enumerate(_read(self.lines, products)):
            if held_out.isdisjoint(query.touched):
                self.positives.append(query.positives)
                self._places.append(place)
        if not self._places:
            raise ValueError(f"{str(self.lines.path)!r}: the out-of-distribution test of {ood} leaves no query")
        self.sources = ["merit"] * len(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def query(self, index: int) -> MeritQuery:
        """Read the query of a row."""
        place = self._places[index]
        return read_query(self.lines[place], self.lines.path, place + 1)

    def __getitem__(self, index: int) -> dict[str, Any]:
        query = self.query(index)
        positive_id = draw_ids(query.positives, 1)[0]
        negative_ids = draw_ids(query.negatives, self.hard_negatives) if query.negatives else []
        row = self.items.query(query)
        return {
            "id": query.id,
            "query": row_item({part: row[part] for part in ("image", "text")}, query.where),
            "positive": self.items.product(positive_id),
            "positive_id": positive_id,
            "negatives": [self.items.product(pid) for pid in negative_ids],
            "negative_ids": negative_ids,
            "target_modality": MODALITY,
            "negative_modalities": [MODALITY] * len(negative_ids),
            "dataset": "merit",
        }


def merit_queries(folder: str | Path, products: MeritProducts) -> list[MeritQuery]:
    """Read and check the queries of the split of `products`, in order.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A malformed query; the message starts with file and line.
    """
    return list(_read(JsonLines(query_file(folder, products.split)), products))


def read_captions(path: str | Path) -> dict[str, str]:
    """Read captions of products: JSON lines with `idx` and `caption`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line is malformed or its caption is empty; the message names file and line.
    """
    captions = {}
    for line, row in enumerate(JsonLines(path), start=1):
        where = f"{str(path)!r}, line {line}"
        caption = row.get("caption")
        if "idx" not in row or not isinstance(caption, str) or not caption.strip():
            raise ItemError(where, f"expected 'idx' and a 'caption' that is not empty, got {json.dumps(row):.80}")
        captions[product_id(row["idx"], where)] = caption.strip()
    return captions


def _read(lines: JsonLines, products: MeritProducts) -> Iterator[MeritQuery]:
    for line, row in enumerate(lines, start=1):
        query = read_query(row, lines.path, line)
        check_products(query, products)
        yield query
