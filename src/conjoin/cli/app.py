"""`conjoin app`: a page that searches a collection."""

from dataclasses import MISSING, dataclass
from typing import Any

from conjoin.cli.options import RankingOptions, option, pick
from conjoin.cli.serve import ServingOptions


@dataclass(kw_only=True)
class Options(RankingOptions, ServingOptions):
    """Open a page that shows what COLLECTION holds, and searches it by text, images or both, with filters.

    The page shows what a query and a result share. Two collections are shown side by side. Needs pip install
    "conjoin[app]" and no network.

    Args:
        collections: One or two: folders that `conjoin encode` wrote, or URIs.
        model: Folder or Hub name of the model that made a collection, once for each (default: the folder on this
            machine that the collection records).
        k: Results at first.
        title_column: Column that names the results (default: the text, or else the id).
        port: 0 for a free one.

    Example:
        conjoin app runs/photos; conjoin app runs/a runs/b --port 7861
    """

    collections: list[str] = option(MISSING, metavar="COLLECTION")
    model: list[str] = option([], action="append")
    k: int = option(12, least=1)
    title_column: str | None = None
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

    from conjoin.retrieval.search import check_column
    from conjoin.serving.app import Asked, make_app
    from conjoin.serving.http import run_server

    searchers = [options.load(uri, model) for uri, model in zip(collections, models, strict=True)]
    columns, weights = pick(options, "title_column", "group_by"), dict(options.weight)
    for searcher in searchers:
        collection: Any = searcher.collection
        for column in filter(None, columns.values()):
            check_column(collection, column)
    first = Asked(
        k=options.k, image_weight=weights.get("image"), text_weight=weights.get("text"), min_score=options.min_score
    )
    app = make_app(searchers, limits=searchers[0].limits, host=options.host, first=first, **columns)
    run_server(app, options.host, options.port)
