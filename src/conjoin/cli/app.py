"""`conjoin app`: a page that searches a collection."""

import argparse
import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import product
from typing import TYPE_CHECKING, Any

from conjoin.cli.commands import COMMANDS
from conjoin.cli.options import add_ranking_options
from conjoin.cli.serving_options import add_serving_options, check_collections, read_limits, searcher_options

if TYPE_CHECKING:
    from conjoin.serving import Limits
    from conjoin.serving.searcher import Searcher


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "app",
        help=COMMANDS["app"],
        description="Open a page that shows what COLLECTION holds, searches it by text, images or both, with filters, "
        "and shows what a query and a result share. Two collections are shown side by side. Needs pip install "
        '"conjoin[app]" and no network.',
        epilog="examples: conjoin app runs/photos; conjoin app runs/a runs/b --port 7861",
    )
    parser.add_argument(
        "collections", metavar="COLLECTION", nargs="+", help="one or two: folders that `conjoin encode` wrote, or URIs"
    )
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        help="folder or Hub name of the model that made a collection, once for each (default: the folder on this "
        "machine that the collection records)",
    )
    parser.add_argument("-k", type=int, default=12, help="results at first (default: %(default)s)")
    parser.add_argument(
        "--title-column", metavar="COLUMN", help="column that names the results (default: the text, or else the id)"
    )
    add_ranking_options(parser)
    add_serving_options(parser, port=7860)
    parser.set_defaults(func=run, quiet=False)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if len(args.collections) > 2 or len(args.model) not in (0, len(args.collections)):
        raise ValueError(
            f"got {len(args.collections)} collections and {len(args.model)} models; expected one or two collections, "
            "and a model for each or none"
        )
    check_collections(args.collections)
    limits = read_limits(args)
    if not 1 <= args.k <= limits.results:
        raise ValueError(f"-k must be from 1 to {limits.results} (--max-results), got {args.k}")

    from conjoin.serving.app import PageOptions, make_app
    from conjoin.serving.http import print_line, run_server

    loaded: Future[list[Searcher]] = Future()
    options = PageOptions(
        k=args.k,
        title_column=args.title_column,
        group_by=args.group_by,
        weights=dict(args.weight),
        min_score=args.min_score,
    )
    app = make_app(loaded, len(args.collections), limits=limits, host=args.host, options=options)

    def load(url: str, stop: Callable[[], None]) -> None:
        try:
            searchers = _load(args, limits)
            loaded.set_result(searchers)
            print_line("the model is loaded")
            for hidden in filter(None, dict.fromkeys(searcher.hidden_pictures for searcher in searchers)):
                print_line(hidden)
        except BaseException as error:
            loaded.set_exception(error)
            stop()

    run_server(
        app, args.host, args.port, lambda *given: threading.Thread(target=load, args=given, daemon=True).start()
    )
    if loaded.done():
        loaded.result()  # raises what went wrong


def _load(args: argparse.Namespace, limits: "Limits") -> "list[Searcher]":
    from conjoin.retrieval import open_collection
    from conjoin.retrieval.search import check_column
    from conjoin.serving.searcher import Searcher

    for uri, column in product(args.collections, filter(None, (args.title_column, args.group_by))):
        check_column(open_collection(uri), column)
    models = args.model or [None] * len(args.collections)
    options = searcher_options(args)
    return [Searcher.load(uri, model, limits, **options) for uri, model in zip(args.collections, models, strict=True)]
