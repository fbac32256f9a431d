"""`conjoin search`: one query against a collection."""

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from conjoin.cli.options import (
    EncoderOptions,
    ImageOptions,
    PromptOptions,
    RankingOptions,
    RerankOptions,
    option,
    pick,
)
from conjoin.constants import RankBy

if TYPE_CHECKING:
    from conjoin.retrieval import Hit

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
        kind: Search only rows with an image alone, a text alone, or both.
        ranking: Rank by vectors and the words of --text (default), or by one of them; words find ids, names and codes.
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
    kind: Literal["image", "text", "both"] | None = None
    ranking: RankBy = "default"
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

    from conjoin.data.row_images import PLACEHOLDER, interleave
    from conjoin.retrieval import open_collection, search_items
    from conjoin.retrieval.reranker import rerank_hits
    from conjoin.retrieval.search import check_column, load_query_encoder

    item = interleave(text, images, "the query") if text is not None and PLACEHOLDER in text else query
    collection, reranker = open_collection(options.collection), options.load_reranker()
    if options.title_column is not None:
        check_column(collection, options.title_column)
    encoder = None
    if options.ranking != "words":
        encoder = load_query_encoder(collection, options.model, **options.encoder_options())
    hits = search_items(
        collection,
        encoder,
        [item],
        options.k if reranker is None else max(options.k, options.rerank_top),
        pictures=options.html is not None,
        weights=dict(options.weight) or None,
        **pick(options, "ranking", "where", "kind", "group_by", "min_score", "prompt", "prompt_name"),
    )
    if reranker is not None:
        hits = rerank_hits(hits, [item], reranker, options.rerank_top)
    found, notes = hits[0][: options.k], []
    if not found:
        by_words = " or has one of the words" if options.ranking == "words" else ""
        notes = [f"nothing found: no row fulfils --where and --min-score{by_words}"]
    elif not any(hit.score for hit in found):
        notes = [
            "all scores are 0: this model does not compare what the query has with what the rows have; search by "
            "--image, or encode with a model that compares words with pictures"
        ]
    if options.html is not None:
        from conjoin.retrieval.pictures import picture_folders
        from conjoin.serving.search_page import write_search_page

        page: dict[str, Any] = {"title": options.title_column, "notes": notes}
        write_search_page(item, found, options.html, options.where, picture_folders(collection.uri), **page)
        for hit in found:
            hit.row.pop("picture", None)
    if options.json:
        results = [asdict(hit) for hit in found]
        print(json.dumps({"query": query, "results": results}, ensure_ascii=False, indent=2, default=str))
    else:
        print("\n".join([*_table(found), *notes]))


def _table(hits: "list[Hit]") -> list[str]:
    """The lines of a table: rank, score, id and the columns of the rows; the image's path last and whole."""
    names = dict.fromkeys(name for hit in hits for name in hit.row)
    columns = sorted(names, key=lambda name: name == "image")
    lines = [["rank", "score", "id", *columns]] if hits else []
    for rank, hit in enumerate(hits, 1):
        cells = [f"{rank:>4}", f"{hit.score:.4f}", hit.id]
        for name in columns:
            value = hit.row.get(name, "")
            text = ", ".join(map(str, value)) if isinstance(value, list) else " ".join(str(value).split())
            cells.append(text if name == "image" or len(text) <= _WIDEST else text[: _WIDEST - 1] + "…")
        lines.append(cells)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
