"""`conjoin encode`: a dataset through a model into an embedding store."""

import argparse
from typing import Any


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "encode",
        help="encode a dataset into shards of embeddings",
        description="Encode every row of DATA with MODEL and write the vectors to --out: shards (safetensors with the "
        "ids) and a manifest. Interrupted at any point, the same command goes on where it stopped and ends with the "
        "bytes of an uninterrupted run.",
        epilog="example: conjoin encode runs/demo/model photos/ --only image --out runs/photos-store",
    )
    parser.add_argument("model", metavar="MODEL", help="folder or Hub name of the model (its own code is run)")
    parser.add_argument(
        "data",
        metavar="DATA",
        help="a folder of images with captions, a CSV, TSV, JSONL or Parquet file, webdataset tar shards, "
        'a dataset on the Hub, or "emoji", the embedded sample',
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the store to write or to go on with")
    columns = parser.add_argument_group("what to read")
    columns.add_argument("--image-column", metavar="NAME", help="column of the images, when it cannot be guessed")
    columns.add_argument("--text-column", metavar="NAME", help="column of the texts, when it cannot be guessed")
    columns.add_argument("--id-column", metavar="NAME", help="column of the ids, when it cannot be guessed")
    columns.add_argument(
        "--split", default="train", metavar="NAME", help="split of a dataset that has several (default: %(default)s)"
    )
    columns.add_argument(
        "--only",
        choices=("image", "text"),
        help="encode this part of every row; the data need not have the other (default: image and text as one item)",
    )
    columns.add_argument("--streaming", action="store_true", help="read while encoding, without loading it first")
    storing = parser.add_argument_group("what to write")
    storing.add_argument(
        "--shard-size", type=int, default=4096, metavar="ROWS", help="rows per file (default: %(default)s)"
    )
    storing.add_argument(
        "--dtype",
        choices=("float32", "float16"),
        default="float32",
        help="type of the stored numbers; float16 halves the space (default: %(default)s)",
    )
    computing = parser.add_argument_group("how to compute")
    computing.add_argument(
        "--batch-size", type=int, default=32, metavar="N", help="items per forward pass (default: %(default)s)"
    )
    computing.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU when there is one)")
    computing.add_argument("--bf16", action="store_true", help="compute in bfloat16: faster, slightly less exact")
    computing.add_argument(
        "--workers", type=int, default=0, metavar="N", help="processes that decode images ahead (default: %(default)s)"
    )
    computing.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    import torch

    from conjoin.data import load_pairs
    from conjoin.retrieval import ItemEncoder, encode_corpus

    rows = load_pairs(
        args.data,
        image_column=args.image_column,
        text_column=args.text_column,
        id_column=args.id_column,
        split=args.split,
        streaming=args.streaming,
        only=args.only,
    )
    encoder = ItemEncoder.from_pretrained(
        args.model,
        batch_size=args.batch_size,
        device=args.device,
        dtype=torch.bfloat16 if args.bf16 else None,
        num_workers=args.workers,
    )
    store = encode_corpus(
        rows, encoder, args.out, shard_size=args.shard_size, dtype=args.dtype, show_progress=not args.quiet
    )
    print(f"{len(store)} vectors of {store.dimension} dimensions in {args.out}")
    print(f"next: conjoin index {args.out} --out ...")
