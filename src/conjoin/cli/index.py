"""`conjoin index`: an embedding store into a searchable index."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conjoin.cli.options import INDEX_KINDS, add_options

if TYPE_CHECKING:
    from conjoin.retrieval import Index


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "index",
        help="build a search index over encoded vectors",
        description="Build an index over the vectors that `conjoin encode` wrote to STORE. An index that is already "
        "in --out is replaced in one step: interrupted, the old one stays.",
        epilog="example: conjoin index runs/photos-store --out runs/photos-index --backend hnsw",
    )
    parser.add_argument("store", metavar="STORE", help="folder that `conjoin encode` wrote")
    parser.add_argument("--out", required=True, metavar="DIR", help="where to put the index")
    parser.add_argument(
        "--backend",
        "--kind",
        dest="kind",
        choices=INDEX_KINDS,
        help="exact: compares with every vector, ties in the order of the data. FAISS: flat, the same; hnsw, a graph; "
        "ivfpq, compressed; ivfpqr, rabitq and binary, compressed and rescored. lancedb: a database on disk, for more "
        "than the memory holds; milvus: a server or a cluster, with --uri (default: exact, lancedb beyond half of the "
        "memory, or the kind that --update finds)",
    )
    parser.add_argument("--uri", help="address of a Milvus server, or a file for Milvus Lite")
    add_options(
        parser,
        "vectors",
        ("--dims", "--dtype"),
        dtype={
            "default": None,
            "help": "how --backend exact holds numbers; int8 and binary (signs) are compact (default: as the store)",
        },
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
    from conjoin.retrieval import load_index, update_index
    from conjoin.retrieval.index.base import INDEX, INDEX_FILES
    from conjoin.storage import check_place
    from conjoin.storage.manifest import MANIFEST

    check_place(args.out, INDEX, INDEX_FILES)
    changes = None
    if args.update and (Path(args.out) / MANIFEST).exists():
        index = load_index(args.out)
        _check_same(args, index)
        changes = update_index(index, args.store)
    else:
        index = _build(args)
    index.save(args.out)
    if changes is not None:
        print(f"{changes.added} vectors added, {changes.replaced} replaced, {changes.removed} removed")
    recall = "" if index.recall is None or changes is not None else f", recall@10 {index.recall:.3f}"
    print(f"{index.kind} index of {len(index)} vectors in {args.out}{recall}")
    print(f"next: conjoin search {args.out} --text ...")


def _check_same(args: argparse.Namespace, index: "Index") -> None:
    """Refuse options that the index to update was not built with.

    Raises:
        ValueError: The message names the option.
    """
    if args.kind not in (None, index.kind):
        raise ValueError(f"the index {args.out!r} is of kind {index.kind!r}, not {args.kind!r}: leave out --update")
    if args.dims not in (None, index.dimension):
        raise ValueError(
            f"the index {args.out!r} has {index.dimension} dimensions, not --dims {args.dims}: leave out --update"
        )
    uri = args.uri if args.uri is None or "://" in args.uri else str(Path(args.uri).resolve())
    for name, asked in (("dtype", args.dtype), ("uri", uri)):
        found = getattr(index, name, None)
        if asked not in (None, found):
            raise ValueError(
                f"the index {args.out!r} was built with --{name} {found}, not {asked}: leave out --update"
            )


def _build(args: argparse.Namespace) -> "Index":
    """Build a new index by the options."""
    from conjoin.retrieval import EmbeddingStore, build_index
    from conjoin.retrieval.index.build import default_kind

    store = EmbeddingStore.open(args.store, dims=args.dims)
    kind = args.kind or default_kind(store)
    options: dict[str, Any] = {"directory": args.out} if kind == "lancedb" else {}
    for name, owner in (("uri", "milvus"), ("dtype", "exact")):
        if vars(args)[name] is not None:
            if kind != owner:
                raise ValueError(f"--{name} is for --backend {owner}, not {kind}")
            options[name] = vars(args)[name]
    if kind == "milvus" and args.uri is None:
        raise ValueError("--backend milvus needs --uri: http://host:19530, or a file for Milvus Lite")
    return build_index(store, kind, **options)
