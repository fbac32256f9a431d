"""`conjoin search`: one query against a collection."""

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conjoin.cli.options import (
    EncoderOptions,
    ImageOptions,
    PromptOptions,
    RankingOptions,
    RerankOptions,
    encoder_options,
    make_reranker,
    option,
)

if TYPE_CHECKING:
    from conjoin.retrieval import Searchable, SearchResult

_WIDEST = 60


@dataclass(kw_only=True)
class Options(PromptOptions, RankingOptions, ImageOptions, EncoderOptions, RerankOptions):
    """Find what is most similar in COLLECTION to a text, an image, or images with a text.

    Each result comes with the text, the image's path and the columns that `conjoin encode` kept.

    Args:
        collection: The collection: a folder that `conjoin encode` wrote, s3://, gs:// or az://,
            hf://datasets/OWNER/NAME, or http://HOST:PORT/NAME in Milvus.
        text: The text of the query.
        image: An image of the query; may be given several times, and <image> in the text marks the place of each.
        k: Number of results.
        model: Folder or Hub name of the model that made the collection (default: the folder on this machine that the
            collection records).
        where: Search only the rows that this SQL condition holds for: "category = 'shoes' and price < 50".
        hybrid: Also find the words of --text in the texts, and add the scores of both.
        json: Print JSON, with full texts, instead of a table.
        html: Also write a page of the results, with their pictures.
        title_column: Column that names the results of --html (default: the text).

    Example:
        conjoin search runs/photos --image chair.jpg --text "the same in red" -k 5
    """

    collection: str
    text: str | None = None
    image: list[str] = option([], action="append")
    k: int = 10
    model: str | None = None
    where: str | None = None
    hybrid: bool = False
    json: bool = False
    html: str | None = None
    title_column: str | None = None
    quiet: bool = True


def run(options: Options) -> None:
    """Run the command."""
    text, images = options.text, options.image
    given = {"image": images[0] if len(images) == 1 else images or None, "text": text}
    query = {part: value for part, value in given.items() if value is not None}
    if not query:
        raise ValueError("nothing to search for: pass --text, --image or both")
    if options.hybrid and text is None:
        raise ValueError("--hybrid finds the words of --text: pass one")
    if options.hybrid and options.min_score is not None:
        raise ValueError("--min-score needs scores of similarity; those of --hybrid compare the results of one query")
    if options.title_column is not None and options.html is None:
        raise ValueError("--title-column is for a page: pass --html FILE")

    from conjoin.data.row_images import PLACEHOLDER, interleave
    from conjoin.retrieval import open_collection

    item = interleave(text, images, "the query") if text is not None and PLACEHOLDER in text else query
    collection = open_collection(options.collection)
    result = _search(options, collection, item)
    shown, notes = result.ids[0], []
    scores = result.scores[0].tolist()[: len(shown)]  # an approximate index may find fewer
    if not shown:
        notes.append("nothing found: the condition holds for no row")
    elif options.min_score is not None:
        shown = [id_ for id_, score in zip(shown, scores, strict=True) if score >= options.min_score]
        notes += [] if shown else [f"nothing similar found (best score {scores[0]:.4f})"]
    if shown and not any(scores):
        notes.append(
            "all scores are 0: this model does not compare what the query has with what the rows have; search by "
            "--image, or encode with a model that compares words with pictures"
        )
    rows = collection.rows(shown, pictures=options.html is not None)
    for row in rows:
        del row["id"]  # the results have it
    results = [
        {"rank": rank, "score": score, "id": id_, "row": row}
        for rank, (id_, score, row) in enumerate(zip(shown, scores, rows, strict=False), start=1)
    ]
    if options.html is not None:
        from conjoin.evaluation.report.search_page import write_search_page
        from conjoin.retrieval.pictures import hidden_pictures, picture_folders

        hidden = hidden_pictures(collection)
        if hidden is not None:
            print("conjoin:", hidden, file=sys.stderr)
        said = notes if hidden is None else [*notes, hidden]
        folders = picture_folders(collection.uri)
        write_search_page(item, results, options.html, options.where, folders, title=options.title_column, notes=said)
        for row in rows:
            row.pop("picture", None)
    if options.json:
        facts: dict[str, Any] = {} if options.where is None else {"where": options.where}
        if options.min_score is not None:
            facts |= {"min_score": options.min_score, "best_score": max(scores, default=None)}
        found = {"query": query, **facts, "results": results}
        print(json.dumps(found, ensure_ascii=False, indent=2, default=str))
        return
    for line in [*(_table(results) if results else []), *notes]:
        print(line)


def _search(options: Options, collection: "Searchable", item: Any) -> "SearchResult":  # noqa: ANN401
    """Search the collection for the query, best first."""
    from conjoin.retrieval import search_items
    from conjoin.retrieval.reranker import first_results, rerank_rows
    from conjoin.retrieval.search import check_column, load_query_encoder

    reranker = make_reranker(options)
    if options.where is not None:
        collection.check(options.where)  # a mistake in it shows before the model is loaded
    for column in (options.group_by, options.title_column):
        if column is not None:
            check_column(collection, column)
    encoder = load_query_encoder(collection, options.model, **encoder_options(options))
    result = search_items(
        collection,
        encoder,
        [item],
        options.k if reranker is None else max(options.k, options.rerank_top),
        where=options.where,
        text=options.text if options.hybrid else None,
        weights=dict(options.weight) or None,
        group_by=options.group_by,
        prompt=options.prompt,
        prompt_name=options.prompt_name,
    )
    if reranker is None:
        return result
    return first_results(rerank_rows(collection, result, [item], reranker, options.rerank_top), options.k)


def _table(results: "list[dict[str, Any]]") -> list[str]:
    """The lines of a table: rank, score, id and the columns of the rows; the image's path last and whole."""
    names = dict.fromkeys(name for result in results for name in result["row"])
    columns = [name for name in names if name != "image"] + [name for name in names if name == "image"]
    cells = [["rank", "score", "id", *columns]]
    for result in results:
        values = [_shown(result["row"].get(name, ""), name) for name in columns]
        cells.append([str(result["rank"]), f"{result['score']:.4f}", result["id"], *values])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numbers = (str.rjust, str.rjust) + (str.ljust,) * (len(widths) - 2)
    return [
        "  ".join(align(cell, width) for align, cell, width in zip(numbers, row, widths, strict=True)).rstrip()
        for row in cells
    ]


def _shown(value: Any, column: str) -> str:  # noqa: ANN401 - a value of a row
    """A value on one line, its end left out if it is long; but a path whole."""
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    line = text if column == "image" else " ".join(text.split())
    return line if column == "image" or len(line) <= _WIDEST else line[: _WIDEST - 1] + "…"
