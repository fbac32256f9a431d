"""Symmetric triplets: a query item, an item with the same meaning, and one that is only similar in form."""

from collections.abc import Mapping
from os import PathLike

import datasets

from conjoin.data.columns import require_columns
from conjoin.data.queries import QueryTable
from conjoin.data.row_checks import row_name
from conjoin.processing.item_error import ItemError

TRIPLET_ROLES = ("query", "positive", "negative", "variant")
TRIPLET_FEATURES = datasets.Features(
    {"id": datasets.Value("string")}
    | {
        f"{role}_{part}": datasets.Image(decode=False) if part == "image" else datasets.Value("string")
        for role in TRIPLET_ROLES
        for part in ("image", "text")
    }
    | {"kind": datasets.Value("string")}
)
"""`id`, then `{role}_image` and `{role}_text` for query, positive, negative and the optional variant of the query,
then the optional kind of the negative."""
_OPTIONAL = ("id", "variant_image", "variant_text", "kind")


def load_triplets(path: str | PathLike[str]) -> datasets.Dataset:
    """Load triplets from a JSON-lines file (or a CSV, or Parquet that holds the images), columns `TRIPLET_FEATURES`.

    The rows are a `QueryTable` with `query_image`, `query_text`, `positive_image`, `positive_text`, `negative_image`
    and `negative_text`; optionally `id` (the row number otherwise), `variant_image`, `variant_text` and `kind`: the
    kind of negative, for which Precision is also reported by itself. The image or the text of an item may be null, but
    not both.

    Raises:
        FileNotFoundError: The file or a listed image does not exist; the message names row and field.
        ValueError: A column is missing, an item is empty, a field has the wrong type (row and field are given), an id
            occurs twice, or the file has no rows.
    """
    table = QueryTable(path, hard_negatives=1)
    require_columns((name for name in TRIPLET_FEATURES if name not in _OPTIONAL), table.rows.column_names)
    triplets = []
    for index in range(len(table)):
        row = table.read(index)
        if len(row.positives) + len(row.negatives) != 2:
            raise ItemError(row_name(index, row.id), "expected one positive and one negative")
        items = (row.query, row.positives[0].item, row.negatives[0].item, row.variant or {})
        triplet = {"id": row.id, "kind": row.kind or None}
        for role, item in zip(TRIPLET_ROLES, items, strict=True):
            if not isinstance(item, Mapping) or isinstance(item.get("image"), list):
                raise ItemError(row_name(index, row.id), f"{role} has several images; expected one")
            triplet |= {f"{role}_{part}": item.get(part) for part in ("image", "text")}
        triplets.append(triplet)
    return datasets.Dataset.from_list(triplets, features=TRIPLET_FEATURES)
