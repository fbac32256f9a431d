"""The products of a split as a Parquet file of the published layout, images inside."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from conjoin.data.merit.products import PRODUCT_FEATURES
from conjoin.data.row_checks import row_name
from conjoin.processing.item_error import ItemError
from conjoin.progress import progress
from conjoin.storage import atomic_path

from .catalogue import Catalogue

_GROUP = 256


def products_file(folder: Path, split: str) -> Path:
    """The file of a split's products."""
    return folder / "data" / f"{split}-00000-of-00001.parquet"


def write_products(path: Path, catalogue: Catalogue, rows: np.ndarray, split: str, show_progress: bool) -> None:
    """Write products; the bytes of their image files are copied as they are.

    Raises:
        FileNotFoundError: An image file is gone.
        ValueError: An image is a URL.
    """
    schema = PRODUCT_FEATURES.arrow_schema
    path.parent.mkdir(exist_ok=True)
    numbers = progress(rows.tolist(), f"{split} products", unit="product", show=show_progress)
    with atomic_path(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        group: list[dict[str, Any]] = []
        for place, row in enumerate(numbers, start=1):
            group.append(_product(catalogue, row))
            if len(group) == _GROUP or place == len(rows):
                writer.write_table(pa.Table.from_pylist(group, schema))
                group.clear()


def _product(catalogue: Catalogue, row: int) -> dict[str, Any]:
    name = row_name(row, catalogue.ids[row])
    return {
        "image": {"bytes": _read_bytes(catalogue.rows[row]["image"], name), "path": None},
        "title": catalogue.titles[row],
        "idx": catalogue.ids[row],
        "class": catalogue.classes[row],
        "country": catalogue.countries[row],
        "language": catalogue.languages[row],
        "attribute": json.dumps(catalogue.described(row), ensure_ascii=False),
    }


def _read_bytes(image: dict[str, Any], name: str) -> bytes:
    if image["bytes"] is not None:
        return bytes(image["bytes"])
    path = image["path"]
    if "://" in path or path.startswith("data:"):
        raise ItemError(name, f"image {path!r:.80}: expected a file; download the images first")
    return Path(path).read_bytes()
