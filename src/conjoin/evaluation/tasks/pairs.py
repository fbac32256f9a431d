"""Image-text pairs: text → image and image → text, as on Flickr30k and COCO (PUMA Tables 4 and 10).

Each text searches all images, and each image searches all texts; any of its partners is right. In text → image+text,
each text searches the rows with both, as `conjoin start` does; all rows of the text are right. Wrong candidates that
tie with the best right one count as better.
"""

import unicodedata
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from conjoin.evaluation.tasks import Cell, Rows, Task

if TYPE_CHECKING:
    from conjoin.evaluation.benchmark import CellScores
    from conjoin.evaluation.results import Table, TableRow

CELLS = ("text → image", "image → text", "text → image+text")
_WRONG_SHARE = 0.95
_SCORES_NOTE = (
    "The score that 95 % of the best wrong answers lie below, for `conjoin search --min-score`: 95 of 100 queries "
    "without a right answer then show nothing. The last column is the share of queries whose right answer still shows."
)


@dataclass(kw_only=True)
class PairsOptions:
    """Which pairs.

    Args:
        data: The pairs, as for conjoin encode.
        split: Split of the data.
        columns: Columns that are not guessed right, such as image=photo text=name,brand id=sku.
        gallery: Further candidates: the catalogue of which the data are the held-out part.
        cells: Only these, of "text → image", "image → text" and "text → image+text".
    """

    data: str
    split: str = "train"
    columns: list[str] = field(default_factory=list)
    gallery: str | None = None
    cells: list[str] | None = None


def pairs_cells(options: PairsOptions) -> list[Cell]:
    """Each text searches all images, each image all texts; and each text all rows, seen with image and text.

    An image (its file, or its bytes) or a text (whatever its case, spacing and Unicode form) of several pairs is
    one item, and each of its partners is right. So an image may have several captions. Rows are right for their text.

    Raises:
        ValueError: An unknown cell, or a source that cannot be read.
    """
    import datasets

    from conjoin.data import load_pairs
    from conjoin.data.columns import undecoded
    from conjoin.storage.fingerprints import row_digest

    names = options.cells or list(CELLS)
    if not set(names) <= set(CELLS):
        raise ValueError(f"unknown cells {names}; expected some of {CELLS}")
    pairs = load_pairs(options.data, split=options.split, columns=options.columns)
    rows = pairs.select_columns(["id", "image", "text"])
    if options.gallery is not None:
        gallery = load_pairs(options.gallery, columns=options.columns)
        ids = [f"gallery/{id_}" for id_ in gallery["id"][:]]
        named = gallery.select_columns(["image", "text"]).add_column("id", ids).select_columns(rows.column_names)
        rows = datasets.concatenate_datasets([rows, named.cast(rows.features)])
    keys: dict[str, list[Hashable]] = {
        "image": [row_digest(row) for row in undecoded(rows.select_columns(["image"]))],
        "text": [" ".join(unicodedata.normalize("NFKC", text).casefold().split()) for text in rows["text"][:]],
        "image+text": list(range(len(rows))),
    }
    ids, item_of, items = rows["id"][:], dict[str, list[str]](), dict[str, Rows]()
    for part, of_part in keys.items():
        first: dict[Hashable, str] = {}
        item_of[part] = [first.setdefault(key, id_) for key, id_ in zip(of_part, ids, strict=True)]
        chosen = [row for row, id_ in enumerate(ids) if item_of[part][row] == id_]
        items[part] = Rows(part, rows.select(chosen).select_columns(["id", *part.split("+")]))
    cells = []
    for name in names:
        source, target = name.split(" → ")
        qrels: dict[str, set[str]] = {query: set() for query in item_of[source][: len(pairs)]}
        for query, partner in zip(item_of[source], item_of[target], strict=True):
            if query in qrels:
                qrels[query].add(partner)
        cells.append(Cell(name, items[source], items[target], {id_: sorted(right) for id_, right in qrels.items()}))
    return cells


def wrong_scores(scores: "Sequence[CellScores]") -> "list[Table]":
    """Of each cell the score that 95 % of the best wrong answers lie below, and the share of right ones above it."""
    import numpy as np

    from conjoin.evaluation.results import Metric, Table

    rows: list[TableRow] = []
    for each in scores:
        found = zip(each.cell.qrels.values(), each.results.ids, strict=True)
        is_right = np.array([[name in right for name in names] for right, names in found])
        right, wrong = (np.where(chosen, each.results.scores, -np.inf).max(axis=1) for chosen in (is_right, ~is_right))
        wrong = wrong[np.isfinite(wrong)]
        if len(wrong):
            threshold = float(np.quantile(wrong, _WRONG_SHARE))
            rows.append([each.cell.name, len(wrong), f"{threshold:.4f}", Metric(float(np.mean(right > threshold)))])
    columns = ["", "n", "95 % are below", "right answers above, %"]
    return [Table("Scores of wrong answers", columns, rows, _SCORES_NOTE)]


TASK = Task(
    "pairs", "Image-text pairs", str(__doc__), PairsOptions, pairs_cells, headline=("hit_rate@5",), tables=wrong_scores
)
