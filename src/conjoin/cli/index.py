"""`conjoin index`: faster searches of a large collection."""

import argparse
from typing import Any

from conjoin.cli.commands import COMMANDS
from conjoin.constants import INDEX_KINDS


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "index",
        help=COMMANDS["index"],
        description="Index the vectors of COLLECTION, the words of its texts and its kept columns, and measure the "
        "recall@10: the share of the ten nearest that a search finds. Without it, a search compares with every "
        "vector. Rows that come later are found as well.",
        epilog="example: conjoin index runs/photos --kind ivf_pq",
    )
    parser.add_argument("collection", metavar="COLLECTION", help="a collection that `conjoin encode` wrote")
    parser.add_argument(
        "--kind",
        choices=("none", *INDEX_KINDS),
        default="ivf_hnsw_sq",
        help="Lance's index of vectors; hnsw is faster, sq, pq and rq are smaller; none: words and columns only "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--probes", type=int, default=20, metavar="N", help="partitions to look into (default: %(default)s)"
    )
    parser.add_argument(
        "--refine",
        type=int,
        default=10,
        metavar="N",
        help="candidates to score again with their whole vectors, for each result (default: %(default)s)",
    )
    parser.add_argument(
        "--faiss",
        nargs="?",
        const="",
        metavar="FACTORY",
        help='index in memory with FAISS instead, by its factory string, such as "IVF4096,PQ64" or "HNSW32"; without '
        "one, clusters of float16 vectors. Build it again after each update",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from conjoin.cli.options import check_counts
    from conjoin.retrieval import Collection

    check_counts(args, probes=1, refine=1)
    collection = Collection.open(args.collection)
    if args.faiss is not None:
        recall = collection.index_faiss(args.faiss or None)
        factory = collection.faiss.settings["factory"] if collection.faiss else ""
        print(f"FAISS index {factory} of {len(collection)} vectors in {args.collection}, recall@10 {recall:.3f}")
    else:
        kind = None if args.kind == "none" else args.kind
        measured = collection.index(kind, probes=args.probes, refine=args.refine)
        print(f"{len(collection)} rows indexed" + ("" if measured is None else f" ({kind}), recall@10 {measured:.3f}"))
    print(f"next: conjoin search {args.collection} --text ...")
