"""`conjoin app`: a page that searches a collection."""

from dataclasses import MISSING, dataclass
from typing import Any

from conjoin.cli.options import RankingOptions, encoder_options, option
from conjoin.cli.serve import ServingOptions, check_collection


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
    k: int = 12
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
    for uri in collections:
        check_collection(uri)
    limits = options.limits()
    if not 1 <= options.k <= limits.results:
        raise ValueError(f"-k must be from 1 to {limits.results} (--max-results), got {options.k}")

    from conjoin.retrieval import open_collection
    from conjoin.retrieval.pictures import hidden_pictures
    from conjoin.retrieval.search import check_column
    from conjoin.serving.app import Asked, make_app
    from conjoin.serving.http import print_line, run_server
    from conjoin.serving.searcher import Searcher

    for uri in collections:
        for column in filter(None, (options.title_column, options.group_by)):
            check_column(open_collection(uri), column)
    how = {"prompt": options.prompt, "prompt_name": options.prompt_name, **encoder_options(options)}
    searchers = [Searcher.load(uri, model, limits, **how) for uri, model in zip(collections, models, strict=True)]
    for hidden in filter(None, dict.fromkeys(hidden_pictures(open_collection(uri)) for uri in collections)):
        print_line(hidden)
    weights = dict(options.weight)
    first = Asked(
        k=options.k, image_weight=weights.get("image"), text_weight=weights.get("text"), min_score=options.min_score
    )
    columns = {"title_column": options.title_column, "group_by": options.group_by}
    app = make_app(searchers, limits=limits, host=options.host, first=first, **columns)
    run_server(app, options.host, options.port)
