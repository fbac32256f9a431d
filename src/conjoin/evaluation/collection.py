"""How well a collection answers a table of queries: by vectors, by words and by the default ranking."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from conjoin.constants import RankBy
from conjoin.data.cells import as_id, is_missing, read_images
from conjoin.data.columns import ColumnNames, matching, named_columns
from conjoin.data.pair_sources import PairSource
from conjoin.data.query_rows import open_rows
from conjoin.data.row_images import RowImages, image_folders, row_item
from conjoin.evaluation.metrics import ranks_of_ids
from conjoin.evaluation.report import metric_name, score_table
from conjoin.evaluation.results import Headline, Results, Score, Table, TableRow, score_ranks
from conjoin.retrieval import ItemEncoder
from conjoin.retrieval.results import Searchable
from conjoin.retrieval.search import load_query_encoder, open_collection, rank_items

_NAMES = {
    "text": ("query", "text", "query_text", "words", "question"),
    "image": ("image", "query_image", "picture", "photo"),
    "id": ("ids", "id", "right", "relevant", "positive", "positives", "expected", "answer", "item_id", "sku"),
}
_KS, _MRR, _SHOWN, _WIDTH = (1, 10), 10, 50, 40
_SEPARATORS = (r"\|", ";", ",", r"\s")


def evaluate_collection(
    collection: Searchable | str | Path,
    queries: PairSource,
    encoder: ItemEncoder | None = None,
    *,
    columns: ColumnNames | None = None,
    prompt: str | None = None,
    prompt_name: str | None = None,
) -> Results:
    """Measure R@1, R@10 and MRR@10 of a collection, and list the queries whose right row is not found first.

    Wrong rows that tie with the best right one count as better. `"words"` is measured on the queries that have some.

    Args:
        collection: The collection, or its address.
        queries: A table, as `load_pairs` reads it: the words or the picture (or both) of each query, and the ids of
            the right rows: a list, or several with `|`, `;`, a comma or white space between them. Rows of one query
            are one.
        encoder: The model of the collection; the one that it records if None.
        columns: Which columns are the `text`, the `image` and the `id`, where their names do not say it.
        prompt: Of the queries, in place of the model's own.
        prompt_name: The name of one of the model's prompts, likewise.

    Raises:
        FileNotFoundError: There is no such collection, table or model.
        ValueError: The table has no such columns, a row no query or no right id, or an id is not in the collection.
    """
    opened = collection if isinstance(collection, Searchable) else open_collection(collection)
    items, right = _read_queries(opened, queries, columns)
    encoder = encoder or load_query_encoder(opened)
    results = Results(
        "Search", f"{len(items)} queries search the {len(opened):,} rows of {opened.uri}.", 0, benchmark="collection"
    )
    results.model = {"name": encoder.name, "fingerprint": encoder.fingerprint}
    has_text = np.array(["text" in item for item in items])
    rankings: tuple[RankBy, ...] = ("vectors", "words", "default")
    for ranking in rankings:
        if ranking != "vectors" and not (opened.has_words and has_text.any()):
            continue
        chosen = np.flatnonzero(has_text if ranking == "words" else np.ones_like(has_text))
        ids = [right[number] for number in chosen]
        depth = _MRR + max(map(len, ids)) + _MRR  # a tie that is longer holds more wrong rows than the last cut-off
        asked: dict[str, Any] = {"ranking": ranking, "prompt": prompt, "prompt_name": prompt_name}
        found = rank_items(opened, encoder, [items[number] for number in chosen], depth, **asked)
        ranks, _ = ranks_of_ids(found.ids, found.scores, ids)
        results.add_ranks(
            ranking, [f"{number}: {_shown(items[number])}" for number in chosen], ranks, found.scores.shape[1]
        )
        metrics = score_ranks(ranks, [len(each) for each in ids], len(opened), _KS, _MRR)
        results.scores.append(Score(ranking, len(ids), len(opened), metrics))
    results.tables = [score_table("Rankings", results.scores)]
    results.headline = [Headline(f"{each.name}, {metric_name('hit_rate@1')}", each.metrics["hit_rate@1"])
                        for each in results.scores]  # fmt: skip
    last = results.scores[-1].name
    misses = [number for number in range(len(ranks)) if ranks[number] > 1]
    rows: list[TableRow] = []
    for number in misses[:_SHOWN]:
        first = found.ids[number][:1]
        shown = [" · ".join(_shown(row) for row in opened.rows(names)) for names in (sorted(ids[number])[:3], first)]
        rank = results.queries[last]["rank"][number]
        rows.append([_shown(items[chosen[number]]), *(each or "nothing" for each in shown), rank])
    note = f"{len(misses)} of {len(ranks)} queries; the rank is that of the best right row, – where it is not found."
    results.tables.append(Table(f"Not found first, {last}", ["query", "wanted", "found first", "rank"], rows, note))
    return results


def _read_queries(
    collection: Searchable, source: PairSource, columns: ColumnNames | None
) -> tuple[list[dict[str, Any]], list[set[str]]]:
    """Read the queries as items, and the ids of the rows that are right for each."""
    table, folder = open_rows(source)
    named = named_columns(columns, table.column_names, tuple(_NAMES))
    chosen = {
        role: (named[role] if role in named else matching(_NAMES[role], table.column_names))[:1] for role in _NAMES
    }
    if not chosen["id"] or not (chosen["text"] or chosen["image"]):
        role = "id" if not chosen["id"] else "text"
        raise ValueError(
            f"found no column of {'the right ids' if role == 'id' else 'words or pictures'} among "
            f"{', '.join(table.column_names)}; name it by --columns {role}=COLUMN"
        )
    images = RowImages(folder, image_folders(source, folder))
    items: dict[str, dict[str, Any]] = {}
    right: dict[str, set[str]] = {}
    for index, row in enumerate(table):
        name = f"row {index} of the queries"
        cells = {role: row.get(names[0]) for role, names in chosen.items() if names}
        item: dict[str, Any] = {}
        if not is_missing(cells.get("image")):
            item["image"] = images.check(read_images(cells["image"]), name)
        if not is_missing(cells.get("text")):
            item["text"] = str(cells["text"]).strip()
        if not item or is_missing(cells["id"]):
            raise ValueError(f"{name} has no {'right id' if item else 'query'}")
        key = repr(item)
        items[key] = row_item(item, name) if isinstance(item.get("image"), list) else item
        right.setdefault(key, set()).update(_right_ids(collection, cells["id"], name))
    return [*items.values()], [*right.values()]


def _right_ids(collection: Searchable, cell: Any, name: str) -> list[str]:  # noqa: ANN401
    """The ids of a cell: itself if a row has it, else its parts."""
    parts = [*map(as_id, cell)] if isinstance(cell, list) else [as_id(cell)]
    for separator in ("", *_SEPARATORS):
        ids = parts if not separator else [part.strip() for part in re.split(separator, str(parts[0])) if part.strip()]
        try:
            collection.rows([str(each) for each in ids])
        except ValueError:
            continue
        return [str(each) for each in ids]
    raise ValueError(f"{name}: the collection has no row of the id {cell!r:.80}, nor of each of its parts")


def _shown(row: dict[str, Any]) -> str:
    """What a table says of a query or a row: its id, and the beginning of its text, else the name of its picture."""
    image = row.get("image")
    what = row.get("text") or (Path(image).name if isinstance(image, str) and len(image) < 1000 else "(picture)")
    return " ".join(f"{row.get('id', '')} {what}".split())[:_WIDTH]
