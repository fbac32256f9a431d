"""`conjoin index`: an embedding store into a searchable index."""

import argparse
from pathlib import Path
from typing import Any

from conjoin.cli.options import INDEX_KINDS


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "index",
        help="build a search index over encoded vectors",
        description="Build an index over the vectors that `conjoin encode` wrote to STORE. An index that is already "
        "in --out is replaced in one step: interrupted, the old one stays.",
        epilog="example: conjoin index runs/photos-store --out runs/photos-index --kind hnsw",
    )
    parser.add_argument("store", metavar="STORE", help="folder that `conjoin encode` wrote")
    parser.add_argument("--out", required=True, metavar="DIR", help="where to put the index")
    parser.add_argument(
        "--kind",
        choices=INDEX_KINDS,
        help="exact: compares with every vector, ties in the order of the data; the others need faiss. flat: the same "
        "by FAISS; hnsw: a graph, fast and nearly exact; ivfpq: compressed, for millions (default: exact, "
        "or the kind that --update finds)",
    )
    parser.add_argument(
        "--update",
        action="store_true",
        help="add, replace and remove in the index at --out what changed in STORE since, in place of building it "
        "again; if there is none, build it",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from conjoin.retrieval import build_index, load_index, update_index
    from conjoin.retrieval.index.base import INDEX
    from conjoin.storage import check_place
    from conjoin.storage.manifest import MANIFEST

    check_place(args.out, INDEX)
    is_update = args.update and (Path(args.out) / MANIFEST).exists()
    if is_update:
        index = load_index(args.out)
        if args.kind not in (None, index.kind):
            raise ValueError(
                f"the index {args.out!r} is of kind {index.kind!r}, not {args.kind!r}: leave out --update"
            )
        changes = update_index(index, args.store)
        print(f"{changes.added} vectors added, {changes.replaced} replaced, {changes.removed} removed")
    else:
        index = build_index(args.store, args.kind or "exact")
    index.save(args.out)
    print(f"{index.kind} index of {len(index.ids)} vectors in {args.out}")
    print(f"next: conjoin search {args.out} --text ...")
