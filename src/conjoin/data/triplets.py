"""Symmetric triplets: a query item, an item with the same meaning, and one that is only similar in form."""

from os import PathLike
from typing import Any

import datasets

from conjoin.data.cells import as_id
from conjoin.data.columns import require_columns
from conjoin.data.query_rows import open_rows
from conjoin.data.row_checks import check_ids, row_name
from conjoin.data.row_images import RowImages, folders_beside
from conjoin.processing.item_error import ItemError
from conjoin.processing.item_inputs import check_text

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

    Each row has `query_image`, `query_text`, `positive_image`, `positive_text`, `negative_image` and
    `negative_text`; optionally `id` (the row number otherwise), `variant_image`, `variant_text` and `kind`: the kind
    of negative, for which Precision is also reported by itself. Images are paths relative to the folder of the file,
    or URLs if they are allowed. The image or the text of an item may be null, but not both; an empty cell of a CSV or
    TSV is null.

    Raises:
        FileNotFoundError: The file or a listed image does not exist; the message names row and field.
        ValueError: A column is missing, an item is empty, a field has the wrong type (row and field are given), an id
            occurs twice, or the file has no rows.
    """
    rows, folder = open_rows(path)
    require_columns((name for name in TRIPLET_FEATURES if name not in _OPTIONAL), rows.column_names)
    images = RowImages(folder, folders_beside(folder))
    triplets = []
    for index, row in enumerate(rows):
        row_id, kind = as_id(row.get("id")) or str(index), row.get("kind")
        where = row_name(index, row_id)
        triplet: dict[str, Any] = {"id": row_id, "kind": None if kind is None else check_text(kind, f"{where}, kind")}
        for role in TRIPLET_ROLES:
            image_field, text_field = f"{role}_image", f"{role}_text"
            image, text = row.get(image_field), row.get(text_field)
            if image is None and text is None and role != "variant":
                raise ItemError(where, f"both {image_field} and {text_field} are null")
            if not isinstance(image, str | dict | None):  # Parquet holds images
                raise ItemError(f"{where}, {image_field}", f"expected a path or a URL, got {image!r:.80}")
            triplet[image_field] = None if image is None else images.check(image, f"{where}, {image_field}")
            triplet[text_field] = None if text is None else check_text(text, f"{where}, {text_field}")
        triplets.append(triplet)
    check_ids([triplet["id"] for triplet in triplets])
    return datasets.Dataset.from_list(triplets, features=TRIPLET_FEATURES)
