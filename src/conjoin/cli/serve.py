"""`conjoin serve`: embeddings and search over HTTP."""

import argparse
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conjoin.cli.commands import COMMANDS
from conjoin.cli.options import check_counts
from conjoin.cli.serving_options import add_serving_options, check_collections, read_limits, searcher_options

if TYPE_CHECKING:
    from conjoin.serving.searcher import Searcher


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
        help="folder or Hub name of the model (default: the folder on this machine that the collection records)",
    )
    parser.add_argument(
        "--max-items", type=int, default=64, metavar="N", help="items of a request (default: %(default)s)"
    )
    _add_network_options(parser)
    add_serving_options(parser, port=8000)
    parser.set_defaults(func=run, quiet=False)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.collection is None and args.model is None:
        raise ValueError("there is nothing to serve: pass COLLECTION, --model or both")
    check_counts(args, max_items=1, max_connections=1, grace=0)
    check_collections([] if args.collection is None else [args.collection])
    limits = read_limits(args, items=args.max_items)

    keys = _read_keys(args.api_key_file)

    from conjoin.serving.http import Stopping, missing, run_server

    try:
        from conjoin.serving.endpoint import make_endpoint
    except ModuleNotFoundError as error:
        missing("serve", error)
    from conjoin.serving.searcher import Searcher

    searcher = Searcher.load(args.collection, args.model, limits, **searcher_options(args))
    _watch(searcher, args.watch)
    stopping = Stopping(args.grace, searcher.batcher.stop)
    app = make_endpoint(searcher, args.host, keys=keys, origins=args.cors, stopping=stopping)
    options = {"connections": args.max_connections, "access_log": args.access_log, "is_open": not keys}
    run_server(app, args.host, args.port, stopping=stopping, **options)
    searcher.batcher.stop()
    if not searcher.batcher.has_ended(1):
        os._exit(0)  # the interpreter cannot end while the model computes; all requests are answered


def _add_network_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("on a network")
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="keys, one in each line: requests need one of them, as `Authorization: Bearer KEY` or `X-API-Key: KEY`",
    )
    group.add_argument(
        "--cors", metavar="ORIGIN", nargs="+", default=[], help="sites whose pages may ask, as https://example.org"
    )
    group.add_argument(
        "--max-connections", type=int, default=256, metavar="N", help="at one time (default: %(default)s)"
    )
    group.add_argument(
        "--grace",
        type=int,
        default=30,
        metavar="SECONDS",
        help="when it is terminated (SIGTERM), time to answer what is in flight (default: %(default)s)",
    )
    group.add_argument(
        "--watch",
        action="store_true",
        help="serve a new version of the collection within a second of its publication; without it, SIGHUP does so",
    )
    group.add_argument("--access-log", action="store_true", help="write a line of JSON to stdout for each request")


def _read_keys(path: str | None) -> list[str]:
    """The keys of a file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It has none.
    """
    if path is None:
        return []
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ValueError(f"there is no key in {path!r}: write one in each line, such as `openssl rand -hex 32` gives")
    return keys


def _watch(searcher: "Searcher", always: bool) -> None:
    """Serve new versions of the collection: those that are looked for twice a second, or at each SIGHUP."""
    from conjoin.serving.http import print_line

    changed = threading.Event()

    def run() -> None:
        while True:
            changed.wait(0.5 if always else None)
            changed.clear()
            try:
                if searcher.refresh():
                    print_line(f"serving a new version of {searcher.source}")
            except (ValueError, OSError) as error:
                print_line(f"the version before is served: {error}")

    threading.Thread(target=run, name="conjoin-watch", daemon=True).start()
    if hasattr(signal, "SIGHUP"):  # not on Windows
        signal.signal(signal.SIGHUP, lambda *_: changed.set())
