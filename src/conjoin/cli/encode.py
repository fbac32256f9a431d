"""`conjoin encode`: a dataset through a model into a collection."""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conjoin.cli.commands import COMMANDS
from conjoin.cli.options import (
    DATA_HELP,
    MODEL_HELP,
    add_compute_options,
    add_data_options,
    add_image_options,
    add_options,
    add_revision,
    load_rows,
    make_encoder,
    read_options,
)
from conjoin.constants import AUTO
from conjoin.retrieval.options import EncodeOptions

if TYPE_CHECKING:
    from conjoin.retrieval import Collection

_LARGE = 200_000
"""Rows of 384 numbers that one core compares with a query in about 0.3 seconds."""


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "encode",
        help=COMMANDS["encode"],
        description="Encode every row of DATA with MODEL into the collection --out, one Lance table. The same command "
        "resumes it after an interruption, and later brings it up to date: rows that are new or changed are encoded, "
        "and readers see the old state until the end. Under `accelerate launch -m` or `torchrun -m` the processes "
        "share the rows.",
        epilog="example: conjoin encode runs/demo/model photos/ --only image --out runs/photos",
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_revision(parser)
    parser.add_argument("data", metavar="DATA", help=DATA_HELP)
    parser.add_argument("--out", required=True, metavar="URI", help="the collection: a folder, s3://, gs:// or az://")
    add_data_options(parser)
    add_image_options(parser)
    add_options(parser, "what rows get", ("--prompt", "--prompt-name"))
    writing = add_options(parser, "what to write", ("--dtype", "--on-error", "--keep-pictures", "--sync"))
    writing.add_argument(
        "--keep",
        nargs="+",
        default=[],
        metavar="COLUMN",
        help="further columns of DATA to keep, for filters and results (the text and the image's path always are); "
        "price:number reads the texts of a CSV file as numbers, price:decimal-comma such as 1.299,00 €",
    )
    add_compute_options(parser, bf16={"default": AUTO})
    group = parser.add_argument_group("where to compute")
    group.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="local: this process, or those of accelerate launch; ray: workers on a cluster (default: %(default)s)",
    )
    group.add_argument(
        "--ray-workers",
        type=int,
        metavar="N",
        help="workers on the cluster (default: one for each GPU, or for each CPU if there is no GPU)",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from conjoin.retrieval import encode_collection
    from conjoin.retrieval.encode import from_first, launched_processes

    if args.ray_workers is not None and args.engine != "ray":
        raise ValueError(f"--ray-workers {args.ray_workers} needs --engine ray")
    if args.keep_pictures is not None and args.keep_pictures < 1:
        raise ValueError(f"--keep-pictures must be at least 1, got {args.keep_pictures}")
    processes = launched_processes()
    if args.bf16 == AUTO:
        args.bf16 = from_first(processes, _is_bf16(args))
    is_first = processes is None or processes.process_index == 0
    options = read_options(EncodeOptions, args, settings={"only": args.only})
    options["show_progress"] = not args.quiet and is_first
    if args.engine == "ray":
        if processes is not None:
            raise ValueError("--engine ray starts its own workers: run `conjoin encode` without accelerate launch")
        _report(args, _encode_on_ray(args, options))
        return
    rows = load_rows(args, args.data, on_error=args.on_error, keep=args.keep)
    encoder = make_encoder(args, args.model, None if processes is None else _own_gpu(args))
    collection = encode_collection(rows, encoder, args.out, processes=processes, **options)
    if is_first:
        _report(args, collection)


def _is_bf16(args: argparse.Namespace) -> bool:
    """Whether to compute in bfloat16: as the collection was made, else as is faster here; not on a cluster."""
    from conjoin.devices import choose_bf16
    from conjoin.retrieval.collection_table import open_table, read_metadata

    try:
        return bool(read_metadata(open_table(args.out))["key"]["precision"] == "bfloat16")
    except FileNotFoundError:
        return args.engine == "local" and choose_bf16(AUTO, args.device)


def _encode_on_ray(args: argparse.Namespace, options: dict[str, Any]) -> "Collection":
    from conjoin.retrieval.encode_ray import encode_on_ray

    names = ("image_column", "text_column", "id_column", "group_column", "split", "only", "keep")
    reading = {name: vars(args)[name] for name in names if name in vars(args)}
    load = partial(make_encoder, args, args.model)
    return encode_on_ray(args.data, load, args.out, workers=args.ray_workers, reading=reading, **options)


def _report(args: argparse.Namespace, collection: "Collection") -> None:
    """Say what changed, what the collection holds, and what to do next."""
    changes = collection.changes
    if changes is not None:
        print(
            f"{changes.added} rows added, {changes.replaced} replaced, {changes.removed} removed, {changes.unchanged} "
            f"unchanged; {changes.encoded} encoded"
        )
    if changes is not None and changes.skipped:
        print(f"skipped {changes.skipped} rows that cannot be used: {Path(args.out) / 'skipped.jsonl'}")
    print(f"{len(collection)} vectors of {collection.dimension} dimensions in {args.out}")
    if len(collection) >= _LARGE and not collection.metadata["index"]:
        print(f"next: conjoin index {args.out} makes searches faster")
    print(f"next: conjoin search {args.out} --text ...")


def _own_gpu(args: argparse.Namespace) -> str | None:
    """The GPU of this process, if several share the machine."""
    import torch

    if args.device is not None or not torch.cuda.is_available():
        return None
    return f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}"
