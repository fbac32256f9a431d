"""The options that `conjoin app` and `conjoin serve` share."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conjoin.cli.options import (
    add_compute_options,
    add_image_options,
    add_prompt_options,
    check_counts,
    encoder_options,
)

if TYPE_CHECKING:
    from conjoin.serving import Limits

_MIB = 2**20


def add_serving_options(parser: argparse.ArgumentParser, port: int) -> None:
    """Add where to listen, and the limits of requests."""
    where = parser.add_argument_group("where to listen")
    where.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="0.0.0.0 for all who can reach this machine; there are no passwords (default: %(default)s)",
    )
    where.add_argument("--port", type=int, default=port, metavar="N", help="0 for a free one (default: %(default)s)")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-upload", type=int, default=10, metavar="MIB", help="size of an image (default: %(default)s)"
    )
    limits.add_argument(
        "--max-megapixels", type=int, default=25, metavar="N", help="pixels of an image (default: %(default)s)"
    )
    limits.add_argument(
        "--max-results", type=int, default=100, metavar="N", help="results of a query (default: %(default)s)"
    )
    add_prompt_options(parser)
    add_image_options(parser)
    add_compute_options(parser, ("--device", "--bf16", "--trust-remote-code", "--input", "--pooling", "--preset"))


def read_limits(args: argparse.Namespace, **changes: int) -> "Limits":
    """The limits that the options stand for."""
    from conjoin.serving import Limits

    check_counts(args, max_upload=1, max_megapixels=1, max_results=1, port=0)
    upload = args.max_upload * _MIB
    given = {"image_bytes": upload, "image_pixels": args.max_megapixels * 10**6, "results": args.max_results}
    return Limits(body_bytes=max(Limits.body_bytes, 2 * upload), **given, **changes)


def check_collections(uris: Iterable[str]) -> None:
    """Make sure that folders hold collections, before anything is imported that takes seconds.

    Raises:
        FileNotFoundError: One does not.
    """
    for uri in uris:
        if "://" not in uri and ".db/" not in uri and not (Path(uri) / "data").is_dir():
            raise FileNotFoundError(f"there is no collection in {uri!r}: run `conjoin encode`")


def searcher_options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `Searcher.load` beside the collection, the model and the limits."""
    return encoder_options(args) | {"prompt": args.prompt, "prompt_name": args.prompt_name}
