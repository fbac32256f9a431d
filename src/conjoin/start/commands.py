"""`conjoin start`: from a table of products to the search app, by commands that each stand alone."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from conjoin.constants import SAMPLE_MODEL
from conjoin.data.csv_files import csv_rows

if TYPE_CHECKING:
    from conjoin.start.products import Products

PUBLIC_MODEL = "openai/clip-vit-base-patch32"
ABOUT = {
    PUBLIC_MODEL: "It comes from the Hub (600 MB, once), and compares words (English best) and pictures with both.",
    SAMPLE_MODEL: "It is two small towers from pip. It compares words (English best) with titles, "
    "and pictures with pictures: words find no picture by what it shows. --model names one that does, such as CLIP.",
}
EXPECTED = "expected a CSV, TSV, JSONL or Parquet file, a row for each product, or a folder of pictures"


def check_table(table: str) -> None:
    """Find out whether a table can be read before anything is imported that takes seconds.

    Raises:
        FileNotFoundError: There is no such file or folder.
        ValueError: It is of another kind, or a line of a CSV file is at fault.
    """
    path = Path(table)
    if not path.exists():
        raise FileNotFoundError(f"{table!r} does not exist; {EXPECTED}")
    kind = Path(path.name.lower().removesuffix(".gz")).suffix
    if not path.is_dir() and kind not in (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet"):
        raise ValueError(f"{table!r} is of another kind; {EXPECTED}")
    if kind in (".csv", ".tsv") and not path.is_dir():
        try:
            is_empty = sum(1 for _ in csv_rows(path)) < 2
        except ValueError as error:
            raise ValueError(f"{table!r} cannot be read: {error}") from error
        if is_empty:
            raise ValueError(f"{table!r} is empty: it has no rows")


def choose_model(out: str, model: str | None = None) -> tuple[str, str]:
    """Choose the model, and say why.

    Args:
        out: The collection; it keeps the model that made it.
        model: The one that is asked for.

    Returns:
        Its name, and the reason.
    """
    from conjoin.hub.folder import check_model
    from conjoin.retrieval import Collection

    if model is not None:
        return model, "as asked for"
    if (collection := Collection.newest(out)) is not None:
        return str(collection.metadata["details"]["model"]), f"which made {out}"
    try:
        check_model(PUBLIC_MODEL)
    except FileNotFoundError as error:
        return SAMPLE_MODEL, f"because conjoin {error}"
    return PUBLIC_MODEL, "the default"


def start_commands(
    table: str, products: "Products", out: str, model: str, encoding: str | None = None
) -> list[list[str]]:
    """The commands that encode a table and open the app, as words behind `conjoin`.

    Args:
        table: Its path.
        products: What it holds.
        out: The collection.
        model: Its name.
        encoding: Of the table, if it is a CSV file.
    """
    from conjoin.data.row_images import ALLOW_ROOTS
    from conjoin.processing.urls import ALLOW_URLS

    encode = ["encode", model, table, "--out", out]
    encode += [] if encoding is None else ["--encoding", encoding]
    parts = {part: name for part, name in products.named.items() if name or part != "group"}
    encode += ["--columns", *(f"{part}={name}" for part, name in parts.items())]
    encode += ["--keep", *products.keep] if products.keep else []
    encode += ["--keep-pictures"] if products.columns.image else []
    encode += ["--on-error", "skip", "--sync"]
    for root in filter(None, os.environ.get(ALLOW_ROOTS, "").split(os.pathsep)):
        encode += ["--root", root]
    allowed = {"public": ["--allow-urls"], "private": ["--allow-private-urls"]}
    encode += allowed.get(os.environ.get(ALLOW_URLS, ""), [])
    app = ["app", out, "--model", model]
    app += ["--group-by", products.columns.group] if products.columns.group else []
    app += ["--currency", products.currency] if products.currency else []
    return [encode, app]
