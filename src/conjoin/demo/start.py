"""`conjoin start`: from a table of products to the search app, by commands that each stand alone."""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from conjoin.constants import SAMPLE_MODEL
from conjoin.data.row_images import ALLOW_ROOTS
from conjoin.demo.products import Products
from conjoin.hub.load import check_model
from conjoin.processing.item_images import ALLOW_URLS
from conjoin.retrieval.collection_table import open_table, read_metadata

PUBLIC_MODEL = "openai/clip-vit-base-patch32"
ABOUT = {
    PUBLIC_MODEL: "It comes from the Hub (600 MB, once), and compares words (English best) and pictures with both.",
    SAMPLE_MODEL: "It is two small towers from pip. It compares words (English best) with titles, "
    "and pictures with pictures: words find no picture by what it shows. --model names one that does, such as CLIP.",
}
_SHOWN = 6
_LONGEST = 30


def choose_model(out: str, model: str | None = None) -> tuple[str, str]:
    """Choose the model, and say why.

    Args:
        out: The collection; it keeps the model that made it.
        model: The one that is asked for.

    Returns:
        Its name, and the reason.
    """
    if model is not None:
        return model, "as asked for"
    try:
        return str(read_metadata(open_table(out))["details"]["model"]), f"which made {out}"
    except FileNotFoundError:
        pass
    try:
        check_model(PUBLIC_MODEL)
    except FileNotFoundError as error:
        return SAMPLE_MODEL, f"because conjoin {error}"
    return PUBLIC_MODEL, "the default"


def start_commands(
    table: str, products: Products, out: str, model: str, loading: Mapping[str, str | None] = MappingProxyType({})
) -> list[list[str]]:
    """The commands that encode a table and open the app, as words behind `conjoin`.

    Args:
        table: Its path.
        products: What it holds.
        out: The collection.
        model: Its name.
        loading: Options that its loading needs, by flag; the app reads them from the collection.
    """
    encode = ["encode", model, table, "--out", out]
    for option, value in (
        *loading.items(),
        ("--image-column", products.image),
        ("--text-column", products.text),
        ("--id-column", products.id),
        ("--only", products.only),
    ):
        encode += [] if value is None else [option, value]
    encode += ["--keep", *products.keep] if products.keep else []
    encode += ["--keep-pictures"] if products.image else []
    encode += ["--on-error", "skip", "--sync"]
    for root in filter(None, os.environ.get(ALLOW_ROOTS, "").split(os.pathsep)):
        encode += ["--root", root]
    allowed = {"public": ["--allow-urls"], "private": ["--allow-private-urls"]}
    encode += allowed.get(os.environ.get(ALLOW_URLS, ""), [])
    app = ["app", out, "--model", model]
    app += ["--group-by", products.group] if products.group else []
    return [encode, app]


def command_line(words: Sequence[str]) -> str:
    """A command as a shell takes it."""
    return shlex.join(["conjoin", *words])


def describe(products: Products) -> Iterator[str]:
    """Lines on what a table holds, for people."""
    skipped = len(products.unusable)
    yield f"{products.rows:,} rows" + (f", {skipped:,} of which cannot be used and are skipped" if skipped else "")
    for problem in products.unusable[:_SHOWN]:
        yield f"  skipped     {problem}"
    yield f"  pictures    {products.image or 'none'}"
    yield f"  titles      {products.text or 'none'}"
    yield f"  ids         {products.id or 'row numbers, as no column has a value of its own in each row'}"
    if products.group:
        yield f"  products    {products.group}: the app shows one row of each"
    for name, column in products.numbers.items():
        read = f", read as {name}{column.kind}" if column.kind else ""
        blank = f", blank in {column.blank:,} rows" if column.blank else ""
        odd = f", {len(column.odd):,} are no numbers, such as {column.odd[0]!r:.40}" if column.odd else ""
        yield f"  numbers     {name}: {column.least:,g} to {column.greatest:,g}{read}{blank}{odd}"
    for name, values in products.choices.items():
        more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
        yield f"  categories  {name}: {', '.join(values[:_SHOWN])}{more}"
    if products.others:
        shown = (f"{name} ({value[:_LONGEST]!r})" if value else name for name, value in products.others.items())
        yield f"  not kept    {', '.join(shown)}"
    yield "A wrong guess: --image-column, --text-column, --id-column."


def default_out(table: str) -> str:
    """The collection of a table, unless another is named."""
    return f"runs/{Path(table).name.partition('.')[0]}"


def has_app() -> bool:
    """Whether the packages of the app are installed."""
    return find_spec("gradio") is not None
