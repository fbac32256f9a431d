"""`conjoin copy`: a collection to another place."""

import argparse
from typing import Any

from conjoin.cli.commands import COMMANDS
from conjoin.cli.options import add_image_options, check_counts


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "copy",
        help=COMMANDS["copy"],
        description="Copy COLLECTION with its indexes to URI: a folder, s3://, gs:// or az://; or "
        'http://HOST:PORT/NAME, a collection in Milvus (needs pip install "conjoin[milvus]"), which is '
        "replaced if it is there. Readers of what is there see it until the copy is whole.",
        epilog="examples: conjoin copy runs/photos s3://bucket/photos; "
        "conjoin copy runs/photos http://host:19530/photos",
    )
    parser.add_argument("collection", metavar="COLLECTION", help="folder that `conjoin encode` wrote, or a URI")
    parser.add_argument("uri", metavar="URI", help="where to")
    parser.add_argument(
        "--keep-pictures", type=int, metavar="PX", help="make thumbnails of at most PX pixels, if it has none"
    )
    parser.add_argument("--replace", action="store_true", help="replace the collection that is there")
    add_image_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.keep_pictures is not None:
        check_counts(args, keep_pictures=1)

    from conjoin.retrieval import Collection, copy_to_milvus
    from conjoin.retrieval.collection_copy import copy_collection
    from conjoin.retrieval.milvus import is_milvus

    collection = Collection(args.collection)
    if is_milvus(args.uri):
        copy: Any = copy_to_milvus(collection, args.uri, show_progress=True)
    else:
        options = {"side": args.keep_pictures, "replace": args.replace}
        copy = copy_collection(collection, args.uri, show_progress=True, **options)
    print(f"copied {len(copy):,} rows to {args.uri}")
