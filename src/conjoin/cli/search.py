"""`conjoin search`: one query against a collection."""

import argparse
from typing import Any

from conjoin.cli.commands import COMMANDS
from conjoin.cli.options import (
    COLLECTION_HELP,
    add_compute_options,
    add_image_options,
    add_rerank_options,
    add_revision,
    make_encoder,
    make_reranker,
)

_WIDEST = 60


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "search",
        help=COMMANDS["search"],
        description="Find what is most similar in COLLECTION to a text, an image, or images with a text. Each result "
        "comes with the text, the image's path and the columns that `conjoin encode` kept.",
        epilog='example: conjoin search runs/photos --image chair.jpg --text "the same in red" -k 5',
    )
    parser.add_argument("collection", metavar="COLLECTION", help=COLLECTION_HELP)
    parser.add_argument("--text", help="the text of the query")
    parser.add_argument(
        "--image",
        metavar="PATH",
        action="append",
        default=[],
        help="an image of the query; may be given several times, and <image> in the text marks the place of each",
    )
    parser.add_argument("-k", type=int, default=10, help="number of results (default: %(default)s)")
    parser.add_argument(
        "--model",
        help="folder or Hub name of the model that made the collection (default: the folder that the collection "
        "records, if it holds a model of this package)",
    )
    add_revision(parser)
    parser.add_argument(
        "--where",
        metavar="CONDITION",
        help="search only the rows that this SQL condition holds for: \"category = 'shoes' and price < 50\"",
    )
    parser.add_argument(
        "--hybrid",
        action="store_true",
        help="also find the words of --text in the texts, and fuse both rankings by rank",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with full texts, instead of a table")
    parser.add_argument("--html", metavar="FILE", help="also write a page of the results, with their pictures")
    add_image_options(parser)
    add_compute_options(parser, ("--device", "--trust-remote-code", "--input"))
    add_rerank_options(parser)
    parser.set_defaults(func=run, quiet=True)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    image: Any = args.image[0] if len(args.image) == 1 else args.image or None
    query = {key: value for key, value in (("image", image), ("text", args.text)) if value is not None}
    if not query:
        raise ValueError("nothing to search for: pass --text, --image or both")
    if args.hybrid and args.text is None:
        raise ValueError("--hybrid finds the words of --text: pass one")

    from conjoin.data.interleaved import PLACEHOLDER, interleave
    from conjoin.retrieval import open_collection, search_items
    from conjoin.retrieval.reranker import first_results, rerank_rows
    from conjoin.retrieval.search import recorded_model

    collection, reranker = open_collection(args.collection), make_reranker(args)
    args.input_type = args.input_type or collection.model.input_type
    is_interleaved = args.text is not None and PLACEHOLDER in args.text
    item = interleave(args.text, args.image, "the query") if is_interleaved else query
    if args.where is not None:
        collection.check(args.where)  # a mistake in it shows before the model is loaded
    encoder = make_encoder(args, args.model or recorded_model(collection))
    depth = args.k if reranker is None else max(args.k, args.rerank_top)
    words = args.text if args.hybrid else None
    found = search_items(collection, encoder, [item], depth, where=args.where, text=words)
    if reranker is not None:
        found = first_results(rerank_rows(collection, found, [item], reranker, args.rerank_top), args.k)
    rows = collection.rows(found.ids[0], pictures=args.html is not None)
    hits = zip(found.ids[0], found.scores[0].tolist(), rows, strict=False)  # an approximate index may find fewer
    results = [
        {"rank": rank, "score": score, "id": id_, "row": row} for rank, (id_, score, row) in enumerate(hits, start=1)
    ]
    if args.html:
        from conjoin.evaluation.report.search_page import write_search_page
        from conjoin.retrieval.pictures import picture_folders

        write_search_page(item, results, args.html, args.where, picture_folders(collection.uri))
        for row in rows:
            row.pop("picture", None)  # the bytes of its thumbnail
    if args.json:
        import json

        given = {"where": args.where} if args.where is not None else {}
        print(json.dumps({"query": query, **given, "results": results}, ensure_ascii=False, indent=2, default=str))
        return
    for line in _table(results) if results else ["nothing found: the condition holds for no row"]:
        print(line)


def _table(results: "list[dict[str, Any]]") -> list[str]:
    """The lines of a table: rank, score, id and the columns of the rows; the image's path last and whole."""
    names = dict.fromkeys(name for result in results for name in result["row"])
    columns = [name for name in names if name != "image"] + [name for name in names if name == "image"]
    cells = [["rank", "score", "id", *columns]]
    for result in results:
        values = [_text(result["row"].get(name, "")) for name in columns]
        shown = [value if name == "image" else _short(value) for name, value in zip(columns, values, strict=True)]
        cells.append([str(result["rank"]), f"{result['score']:.4f}", result["id"], *shown])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numbers = (str.rjust, str.rjust) + (str.ljust,) * (len(widths) - 2)
    return [
        "  ".join(align(cell, width) for align, cell, width in zip(numbers, row, widths, strict=True)).rstrip()
        for row in cells
    ]


def _text(value: Any) -> str:  # noqa: ANN401 - a value of a row
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _short(text: str) -> str:
    """A text on one line, its end left out if it is long."""
    line = " ".join(text.split())
    return line if len(line) <= _WIDEST else line[: _WIDEST - 1] + "…"
