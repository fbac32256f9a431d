"""`conjoin app`: a page that searches a collection."""

from dataclasses import MISSING, dataclass
from typing import Any

from conjoin.cli.options import RankingOptions, option, pick
from conjoin.cli.serve import ServingOptions, serve


@dataclass(kw_only=True)
class Options(RankingOptions, ServingOptions):
    """Open a page that shows what COLLECTION holds, and searches it by text, images or both, with filters.

    It is `conjoin serve COLLECTION` with the page at its address. New versions of a collection are shown as they are
    published. Two collections are shown side by side. Needs pip install "conjoin[serve]" and no network.

    Args:
        collections: One or two: folders that `conjoin encode` wrote, or URIs.
        model: Folder or Hub name of the model that made a collection, once for each (default: the folder on this
            machine that the collection records).
        k: Results of a page.
        heading: Name of the catalogue, above the page (default: the last part of the address of COLLECTION).
        title_column: Column that names the results (default: the text, or else the id).
        show: Columns on each card beside title and price (default: the first two with few values).
        currency: Of the prices, such as EUR or €.
        port: 0 for a free one.

    Example:
        conjoin app runs/photos; conjoin app runs/a runs/b --port 7861
    """

    collections: list[str] = option(MISSING, metavar="COLLECTION")
    model: list[str] = option([], action="append")
    k: int = option(24, least=1)
    heading: str | None = None
    title_column: str | None = None
    show: list[str] = option([], metavar="COLUMN")
    currency: str | None = None
    port: int = option(7860, least=0)


def run(options: Options) -> None:
    """Run the command."""
    collections = options.collections
    models: list[Any] = options.model or [None] * len(collections)
    if len(collections) > 2 or len(models) != len(collections):
        raise ValueError(
            f"got {len(collections)} collections and {len(models)} models; expected one or two collections, and a "
            "model for each or none"
        )
    searchers = [options.load(uri, model) for uri, model in zip(collections, models, strict=True)]
    from conjoin.retrieval.search import check_column
    from conjoin.serving.page import Page

    columns = pick(options, "title_column", "group_by")
    for searcher in searchers:
        collection: Any = searcher.collection
        for column in filter(None, [*columns.values(), *options.show]):
            check_column(collection, column)
    page = Page(
        **columns,
        **pick(options, "heading", "currency", "min_score", "k"),
        show=options.show or None,
        weights=dict(options.weight),
        beside=searchers[1] if len(searchers) > 1 else None,
    )
    serve(searchers, options, page=page)
