"""`conjoin encode`: a dataset through a model into an embedding store."""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conjoin.cli.options import (
    AUTO,
    DATA_HELP,
    MODEL_HELP,
    add_compute_options,
    add_data_options,
    add_image_options,
    add_revision,
    add_storing_options,
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
        "uninterrupted run. Under `accelerate launch -m` or `torchrun -m` the processes share the shards; any number "
        "of them resumes. If --out holds a complete store, rows of DATA that are new there are added and those that "
        "changed are replaced; readers see the old state until the end.",
        epilog="example: conjoin encode runs/demo/model photos/ --only image --out runs/photos-store",
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_revision(parser)
    parser.add_argument("data", metavar="DATA", help=DATA_HELP)
    parser.add_argument("--out", required=True, metavar="DIR", help="the store to write or to resume")
    add_data_options(parser).add_argument(
        "--on-error",
        choices=("raise", "skip"),
        default="raise",
        help="what to do with a row that cannot be used: stop, or leave it out and list it in left_out.jsonl in --out "
        "(default: %(default)s)",
    )
    add_image_options(parser)
    add_storing_options(parser).add_argument(
        "--keep",
        nargs="+",
        default=[],
        metavar="COLUMN",
        help="further columns of DATA to store and to show in results (the text and the image's path always are); "
        "price:number reads the texts of a CSV file as numbers",
    )
    parser.add_argument(
        "--sync", action="store_true", help="also remove the rows of the store that are no longer in DATA"
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
    rank, world_size = _share()
    if args.engine == "ray" and world_size > 1:
        raise ValueError("--engine ray starts its own workers: run `conjoin encode` without accelerate launch")
    if args.ray_workers is not None and args.engine != "ray":
        raise ValueError(f"--ray-workers {args.ray_workers} needs --engine ray")
    rows = load_rows(args, args.data, on_error="keep" if args.on_error == "skip" else "raise", keep=args.keep)
    options: dict[str, Any] = {
        "source": {"data": args.data, "only": args.only} | ({"keep": args.keep} if args.keep else {}),
        "on_error": args.on_error,
        "show_progress": not args.quiet and rank == 0,
    }
    if _encode(args, rows, options, rank, world_size):
        _report(args)


def _encode(args: argparse.Namespace, rows: Any, options: dict[str, Any], rank: int, world_size: int) -> bool:  # noqa: ANN401
    """Encode the rows or update the store; returns whether the store is complete."""
    from conjoin.retrieval import encode_on_ray, encode_rank
    from conjoin.retrieval.store import UPDATES
    from conjoin.storage import DamagedError

    found = _manifest(args)
    is_shared = args.engine == "ray" or world_size > 1  # all processes must choose the same
    if args.bf16 == AUTO and (found is not None or is_shared):
        args.bf16 = found is not None and found.key["precision"] == "bfloat16"
    is_encoded = found is None or not (found.complete or args.sync)
    if found is not None and not is_encoded:
        if rank > 0:
            print(f"process {rank} of {world_size}: process 0 updates {args.out}")
            return False
        try:
            _update(args, rows, options)
        except DamagedError:
            if UPDATES in found.details:
                raise
            is_encoded = True  # encoding again mends it
    options |= {"shard_size": args.shard_size, "dtype": args.dtype}
    if is_encoded and args.engine == "ray":
        load = partial(_load_encoder, args)
        encode_on_ray(rows, load, args.out, workers=args.ray_workers, **options)
    elif is_encoded:
        encoder = make_encoder(args, args.model, _own_gpu(args, world_size))
        if encode_rank(rows, encoder, args.out, rank, world_size, **options) is None:
            print(f"process {rank} of {world_size} has ended; the last one completes {args.out}")
            return False
    return True


def _load_encoder(args: argparse.Namespace, device: str | None) -> "ItemEncoder":
    """Load the encoder, on a machine of the cluster."""
    return make_encoder(args, args.model, device)


def _report(args: argparse.Namespace) -> None:
    """Say what the store holds and what to do next."""
    from conjoin.retrieval import EmbeddingStore
    from conjoin.retrieval.store import LEFT_OUT_FILE

    store = EmbeddingStore.open(args.out)
    if store.left_out:
        print(f"left out {len(store.left_out)} rows that cannot be used: {Path(args.out) / LEFT_OUT_FILE}")
    print(f"{len(store)} vectors of {store.dimension} dimensions in {args.out}")
    print(f"next: conjoin index {args.out} --out ...")


def _share() -> tuple[int, int]:
    """The rank of this process and how many there are, as `accelerate launch` and `torchrun` tell.

    Raises:
        ValueError: What they tell is no number.
    """
    told = {name: os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))}
    for name, value in told.items():
        if not value.isdecimal():
            raise ValueError(f"the environment variable {name} must be a number, got {value!r}")
    return int(told["RANK"]), int(told["WORLD_SIZE"])


def _own_gpu(args: argparse.Namespace, world_size: int) -> str | None:
    """The GPU of this process, if several share the machine."""
    import torch

    if args.device is not None or world_size == 1 or not torch.cuda.is_available():
        return None
    return f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}"


def _manifest(args: argparse.Namespace) -> "Manifest | None":
    """What --out holds already, if it is a store.

    Raises:
        ValueError: It holds something else, or a store of another dtype.
    """
    from conjoin.retrieval.store import STORE
    from conjoin.storage import read_manifest
    from conjoin.storage.manifest import MANIFEST

    if not (Path(args.out) / MANIFEST).exists():
        return None
    manifest = read_manifest(Path(args.out), STORE)
    if not (manifest.complete or manifest.rows):  # it was just begun
        return None
    if manifest.key["dtype"] != args.dtype:
        raise ValueError(f"the store {args.out!r} has --dtype {manifest.key['dtype']}, not {args.dtype}")
    return manifest


def _update(args: argparse.Namespace, rows: Any, options: dict[str, Any]) -> None:  # noqa: ANN401
    """Bring a store up to date and say what changed."""
    from conjoin.retrieval import update_store

    changes = update_store(rows, make_encoder(args, args.model), args.out, sync=args.sync, **options)
    print(
        f"{changes.added} rows added, {changes.replaced} replaced, {changes.removed} removed, {changes.unchanged} "
        f"unchanged; {changes.encoded} encoded"
    )
