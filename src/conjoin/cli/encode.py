"""`conjoin encode`: a dataset through a model into an embedding store."""

import argparse
from typing import Any

from conjoin.cli.options import (
    DATA_HELP,
    MODEL_HELP,
    add_compute_options,
    add_data_options,
    add_storing_options,
    add_url_options,
    load_rows,
    make_encoder,
)


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "encode",
        help="encode a dataset into shards of embeddings",
        description="Encode every row of DATA with MODEL and write the vectors to --out: shards (safetensors with the "
        "ids) and a manifest. After an interruption, the same command resumes and ends with the bytes of an "
        "uninterrupted run.",
        epilog="example: conjoin encode runs/demo/model photos/ --only image --out runs/photos-store",
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("data", metavar="DATA", help=DATA_HELP)
    parser.add_argument("--out", required=True, metavar="DIR", help="the store to write or to resume")
    add_data_options(parser)
    add_url_options(parser)
    add_storing_options(parser)
    add_compute_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from conjoin.retrieval import encode_corpus

    rows = load_rows(args, args.data)
    encoder = make_encoder(args, args.model)
    store = encode_corpus(
        rows,
        encoder,
        args.out,
        shard_size=args.shard_size,
        dtype=args.dtype,
        source={"data": args.data, "only": args.only},
        show_progress=not args.quiet,
    )
    print(f"{len(store)} vectors of {store.dimension} dimensions in {args.out}")
    print(f"next: conjoin index {args.out} --out ...")
