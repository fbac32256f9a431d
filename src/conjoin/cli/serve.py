"""`conjoin serve`: embeddings and search over HTTP."""

import argparse
from typing import Any

from conjoin.cli.commands import COMMANDS
from conjoin.cli.options import check_counts
from conjoin.cli.serving_options import add_serving_options, check_collections, encoder_options, read_limits


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "serve",
        help=COMMANDS["serve"],
        description="Answer POST /embed, POST /search and GET /health as JSON; the reference is at /docs. The "
        'items of concurrent requests share forward passes. Needs pip install "conjoin[serve]".',
        epilog="examples: conjoin serve runs/photos; conjoin serve --model runs/demo/model",
    )
    parser.add_argument(
        "collection",
        metavar="COLLECTION",
        nargs="?",
        help="folder that `conjoin encode` wrote, or a URI; without it, only /embed works",
    )
    parser.add_argument(
        "--model",
        help="folder or Hub name of the model (default: the folder that the collection records, if it holds a model "
        "of this package)",
    )
    parser.add_argument(
        "--max-items", type=int, default=64, metavar="N", help="items of a request (default: %(default)s)"
    )
    add_serving_options(parser, port=8000)
    parser.set_defaults(func=run, quiet=False)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.collection is None and args.model is None:
        raise ValueError("there is nothing to serve: pass COLLECTION, --model or both")
    check_counts(args, max_items=1)
    check_collections([] if args.collection is None else [args.collection])
    limits = read_limits(args, items=args.max_items)

    from conjoin.serving.http import missing, run_server

    try:
        from conjoin.serving.endpoint import make_endpoint
    except ModuleNotFoundError as error:
        missing("serve", error)
    from conjoin.serving.searcher import Searcher

    searcher = Searcher.load(args.collection, args.model, limits, **encoder_options(args))
    run_server(make_endpoint(searcher, args.host), args.host, args.port)
