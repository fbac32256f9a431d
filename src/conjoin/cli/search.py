"""`conjoin search`: one query against a collection."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from conjoin.cli.commands import COMMANDS
from conjoin.cli.options import (
    COLLECTION_HELP,
    add_compute_options,
    add_image_options,
    add_prompt_options,
    add_ranking_options,
    add_rerank_options,
    add_revision,
    encoder_options,
    make_reranker,
)

if TYPE_CHECKING:
    from conjoin.retrieval import Searchable, SearchResult

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
        help="folder or Hub name of the model that made the collection (default: the folder on this machine that the "
        "collection records)",
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
    parser.add_argument(
        "--title-column", metavar="COLUMN", help="column that names the results of --html (default: the text)"
    )
    add_prompt_options(parser)
    add_ranking_options(parser)
    add_image_options(parser)
    add_compute_options(parser, ("--device", "--trust-remote-code", "--input", "--pooling", "--preset"))
    add_rerank_options(parser)
    parser.set_defaults(func=run, quiet=True)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    image: Any = args.image[0] if len(args.image) == 1 else args.image or None
    query = {key: value for key, value in (("image", image), ("text", args.text)) if value is not None}
    _check(args, query)

    from conjoin.data.row_images import PLACEHOLDER, interleave
    from conjoin.retrieval import open_collection

    is_interleaved = args.text is not None and PLACEHOLDER in args.text
    item = interleave(args.text, args.image, "the query") if is_interleaved else query
    collection = open_collection(args.collection)
    result = _search(args, collection, item)
    shown, notes = result.ids[0], []
    scores = result.scores[0].tolist()[: len(shown)]  # an approximate index may find fewer
    if not shown:
        notes.append("nothing found: the condition holds for no row")
    elif args.min_score is not None:
        shown = [id_ for id_, score in zip(shown, scores, strict=True) if score >= args.min_score]
        notes += [] if shown else [f"nothing similar found (best score {scores[0]:.4f})"]
    rows = collection.rows(shown, pictures=args.html is not None)
    for row in rows:
        del row["id"]  # the results have it
    results = [
        {"rank": rank, "score": score, "id": id_, "row": row}
        for rank, (id_, score, row) in enumerate(zip(shown, scores, rows, strict=False), start=1)
    ]
    if args.html:
        _write_page(args, collection, item, results, notes)
    if args.json:
        import json

        given = {"where": args.where} if args.where is not None else {}
        if args.min_score is not None:
            given |= {"min_score": args.min_score, "best_score": max(scores, default=None)}
        print(json.dumps({"query": query, **given, "results": results}, ensure_ascii=False, indent=2, default=str))
        return
    for line in [*(_table(results) if results else []), *notes]:
        print(line)


def _check(args: argparse.Namespace, query: dict[str, Any]) -> None:
    """Refuse options that do not belong together, before anything is loaded."""
    if not query:
        raise ValueError("nothing to search for: pass --text, --image or both")
    if args.hybrid and args.text is None:
        raise ValueError("--hybrid finds the words of --text: pass one")
    if args.hybrid and args.min_score is not None:
        raise ValueError("--min-score needs scores of similarity; those of --hybrid only say the rank")
    if args.title_column is not None and args.html is None:
        raise ValueError("--title-column is for a page: pass --html FILE")


def _search(args: argparse.Namespace, collection: "Searchable", item: Any) -> "SearchResult":  # noqa: ANN401
    """Search the collection for the query, best first."""
    from conjoin.retrieval import search_items
    from conjoin.retrieval.reranker import first_results, rerank_rows
    from conjoin.retrieval.search import check_column, load_query_encoder

    reranker = make_reranker(args)
    if args.where is not None:
        collection.check(args.where)  # a mistake in it shows before the model is loaded
    for column in (args.group_by, args.title_column):
        if column is not None:
            check_column(collection, column)
    encoder = load_query_encoder(collection, args.model, **encoder_options(args))
    result = search_items(
        collection,
        encoder,
        [item],
        args.k if reranker is None else max(args.k, args.rerank_top),
        where=args.where,
        text=args.text if args.hybrid else None,
        weights=dict(args.weight) or None,
        group_by=args.group_by,
        prompt=args.prompt,
        prompt_name=args.prompt_name,
    )
    if reranker is None:
        return result
    return first_results(rerank_rows(collection, result, [item], reranker, args.rerank_top), args.k)


def _write_page(
    args: argparse.Namespace,
    collection: "Searchable",
    item: Any,  # noqa: ANN401
    results: list[dict[str, Any]],
    notes: list[str],
) -> None:
    """Write the page, and drop the thumbnails from the rows."""
    from conjoin.evaluation.report.search_page import write_search_page
    from conjoin.retrieval.pictures import hidden_pictures, picture_folders

    hidden = hidden_pictures(collection)
    if hidden is not None:
        print("conjoin:", hidden, file=sys.stderr)
        notes = [*notes, hidden]
    folders = picture_folders(collection.uri)
    write_search_page(item, results, args.html, args.where, folders, title=args.title_column, notes=notes)
    for result in results:
        result["row"].pop("picture", None)


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
