"""`conjoin index`: an embedding store into a searchable index."""

import argparse
from typing import Any

from conjoin.cli.options import INDEX_KINDS


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "index",
        help="make a store of embeddings searchable",
        description="Build an index over the vectors that `conjoin encode` wrote to STORE. An index that is already "
        "in --out is replaced in one step: interrupted, the old one stays.",
        epilog="example: conjoin index runs/photos-store --out runs/photos-index --kind hnsw",
    )
    parser.add_argument("store", metavar="STORE", help="folder that `conjoin encode` wrote")
    parser.add_argument("--out", required=True, metavar="DIR", help="where to put the index")
    parser.add_argument(
        "--kind",
        choices=INDEX_KINDS,
        default="exact",
        help="exact: compares with every vector, ties in the order of the data; the others need faiss. flat: the same "
        "by FAISS; hnsw: a graph, fast and nearly exact; ivfpq: compressed, for millions (default: %(default)s)",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from conjoin.retrieval import build_index
    from conjoin.retrieval.index.base import INDEX
    from conjoin.storage import check_place

    check_place(args.out, INDEX)
    index = build_index(args.store, args.kind)
    index.save(args.out)
    print(f"{args.kind} index of {len(index.ids)} vectors in {args.out}")
    print(f"next: conjoin search {args.out} --text ...")
