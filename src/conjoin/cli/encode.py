"""`conjoin encode`: a dataset through a model into an embedding store."""

import argparse
from pathlib import Path
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
    add_data_options(parser).add_argument(
        "--on-error",
        choices=("raise", "skip"),
        default="raise",
        help="what to do with a row that cannot be used: stop, or leave it out and list it in left_out.jsonl in --out "
        "(default: %(default)s)",
    )
    add_url_options(parser)
    add_storing_options(parser).add_argument(
        "--keep",
        nargs="+",
        default=[],
        metavar="COLUMN",
        help="further columns of DATA to store and to show in results (the text and the image's path always are)",
    )
    add_compute_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from conjoin.retrieval import encode_corpus
    from conjoin.retrieval.store import LEFT_OUT_FILE

    rows = load_rows(args, args.data, on_error="keep" if args.on_error == "skip" else "raise", keep=args.keep)
    encoder = make_encoder(args, args.model)
    store = encode_corpus(
        rows,
        encoder,
        args.out,
        shard_size=args.shard_size,
        dtype=args.dtype,
        source={"data": args.data, "only": args.only} | ({"keep": args.keep} if args.keep else {}),
        on_error=args.on_error,
        show_progress=not args.quiet,
    )
    if store.left_out:
        print(f"left out {len(store.left_out)} rows that cannot be used: {Path(args.out) / LEFT_OUT_FILE}")
    print(f"{len(store)} vectors of {store.dimension} dimensions in {args.out}")
    print(f"next: conjoin index {args.out} --out ...")
