"""`conjoin encode`: a dataset through a model into an embedding store."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from conjoin.retrieval import ItemEncoder
    from conjoin.storage import Manifest


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "encode",
        help="encode a dataset into a store of vectors",
        description="Encode every row of DATA with MODEL and write the vectors to --out: shards (safetensors with the "
        "ids) and a manifest. After an interruption, the same command resumes and ends with the bytes of an "
        "uninterrupted run. If --out holds a complete store, rows of DATA that are new there are added and those that "
        "changed are replaced; readers see the old state until the end.",
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
    parser.add_argument(
        "--sync", action="store_true", help="also remove the rows of the store that are no longer in DATA"
    )
    add_compute_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from conjoin.retrieval import EmbeddingStore, encode_corpus
    from conjoin.retrieval.store import LEFT_OUT_FILE, UPDATES
    from conjoin.storage import DamagedError

    rows = load_rows(args, args.data, on_error="keep" if args.on_error == "skip" else "raise", keep=args.keep)
    encoder = make_encoder(args, args.model)
    options: dict[str, Any] = {
        "source": {"data": args.data, "only": args.only} | ({"keep": args.keep} if args.keep else {}),
        "on_error": args.on_error,
        "show_progress": not args.quiet,
    }
    found = _manifest(args)
    is_encoded = found is None or not (found.complete or args.sync)
    if found is not None and not is_encoded:
        try:
            _update(args, rows, encoder, options)
        except DamagedError:
            if UPDATES in found.details:
                raise
            is_encoded = True  # encoding again mends it
    if is_encoded:
        encode_corpus(rows, encoder, args.out, shard_size=args.shard_size, dtype=args.dtype, **options)
    store = EmbeddingStore.open(args.out)
    if store.left_out:
        print(f"left out {len(store.left_out)} rows that cannot be used: {Path(args.out) / LEFT_OUT_FILE}")
    print(f"{len(store)} vectors of {store.dimension} dimensions in {args.out}")
    print(f"next: conjoin index {args.out} --out ...")


def _manifest(args: argparse.Namespace) -> "Manifest | None":
    """What --out holds already, if it is a store.

    Raises:
        ValueError: It holds something else, or a store of another dtype.
    """
    from conjoin.retrieval.store import STORE
    from conjoin.storage import read_manifest, recorded_rows

    if not recorded_rows(Path(args.out), STORE):
        return None
    manifest = read_manifest(Path(args.out), STORE)
    if manifest.key["dtype"] != args.dtype:
        raise ValueError(f"the store {args.out!r} has --dtype {manifest.key['dtype']}, not {args.dtype}")
    return manifest


def _update(args: argparse.Namespace, rows: Any, encoder: "ItemEncoder", options: dict[str, Any]) -> None:  # noqa: ANN401
    """Bring a store up to date and say what changed."""
    from conjoin.retrieval import update_store

    changes = update_store(rows, encoder, args.out, sync=args.sync, **options)
    print(
        f"{changes.added} rows added, {changes.replaced} replaced, {changes.removed} removed, {changes.unchanged} "
        f"unchanged; {changes.encoded} encoded"
    )
