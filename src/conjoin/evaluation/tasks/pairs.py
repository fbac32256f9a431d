"""Image-text pairs: text → image and image → text, as on Flickr30k and COCO (PUMA Tables 4 and 10).

Each text searches all images, and each image searches all texts; any of its partners is right. In text → image+text,
each text searches the rows with both, as `conjoin start` does; all rows of the text are right. With a gallery, nothing
else is searched. Wrong candidates that tie with the best right one count as better.
"""

import unicodedata
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
        gallery: What is searched in place of the data: the catalogue, which has their images or their texts too.
        cells: Only these, of "text → image", "image → text" and "text → image+text".
    """

    data: str
    split: str = "train"
    columns: list[str] = field(default_factory=list)
    gallery: str | None = None
    cells: list[str] | None = None


def pairs_cells(options: PairsOptions) -> list[Cell]:
    """Each text searches all images, each image all texts; and each text all rows, seen with image and text.

    An image (its bytes) or a text (whatever its case, spacing and Unicode form) of several rows is one item, and each
    of its partners is right. So an image may have several captions. Only the gallery is searched, if there is one: its
    items with the image or the text of a query's row are right. Rows are right for their text; where the gallery has
    the text nowhere, for their image.

    Raises:
        ValueError: An unknown cell, a source that cannot be read, or a row of the data whose image and text are not in
            the gallery.
    """
    from conjoin.data import load_pairs

    names = options.cells or list(CELLS)
    if not set(names) <= set(CELLS):
        raise ValueError(f"unknown cells {names}; expected some of {CELLS}")
    pool = asked = _Pairs("", load_pairs(options.data, split=options.split, columns=options.columns, only="both"))
    if options.gallery is not None:
        pool = _Pairs("gallery ", load_pairs(options.gallery, columns=options.columns, only="both"))
    places: dict[tuple[str, Hashable], list[int]] = {}
    for part in ("image", "text"):
        for number, key in enumerate(pool.keys[part]):
            places.setdefault((part, key), []).append(number)
    cells = []
    for name in names:
        source, target = name.split(" → ")
        qrels: dict[str, set[str]] = {}
        for number, query in enumerate(asked.item_of[source]):
            parts = ("image", "text") if source == "image" else ("text", "image")
            own, other = (places.get((part, asked.keys[part][number]), []) for part in parts)
            if not own and not other:
                raise ValueError(f"row {asked.ids[number]!r} of the data: the gallery has neither its image nor text")
            rows = own or other if target == "image+text" else [*own, *other]
            qrels.setdefault(query, set()).update(pool.item_of[target][each] for each in rows)
        right = {query: sorted(ids) for query, ids in qrels.items()}
        cells.append(Cell(name, asked.items[source], pool.items[target], right))
    return cells


class _Pairs:
    """The distinct images, texts and rows of some pairs: `item_of` has the id of each row's, `items` their rows."""

    def __init__(self, name: str, pairs: Any) -> None:  # noqa: ANN401 - as `load_pairs` returns them
        from conjoin.data.columns import undecoded
        from conjoin.storage.fingerprints import item_digest

        rows = pairs.select_columns(["id", "image", "text"])
        self.ids: list[str] = rows["id"][:]
        self.keys: dict[str, list[Hashable]] = {
            "image": [item_digest(row) for row in undecoded(rows.select_columns(["image"]))],
            "text": [" ".join(unicodedata.normalize("NFKC", text).casefold().split()) for text in rows["text"][:]],
            "image+text": list(range(len(rows))),
        }
        self.item_of: dict[str, list[str]] = {}
        self.items: dict[str, Rows] = {}
        for part, keys in self.keys.items():
            first: dict[Hashable, str] = {}
            self.item_of[part] = [first.setdefault(key, id_) for key, id_ in zip(keys, self.ids, strict=True)]
            chosen = [row for row, id_ in enumerate(self.ids) if self.item_of[part][row] == id_]
            self.items[part] = Rows(f"{name}{part}", rows.select(chosen).select_columns(["id", *part.split("+")]))


def wrong_scores(scores: "Sequence[CellScores]") -> "list[Table]":
    """Of each cell the score that 95 % of the best wrong answers lie below, and the share of right ones above it."""
    import numpy as np

    from conjoin.evaluation.metrics import ranks_of_ids
    from conjoin.evaluation.results import Metric, Table

    rows: list[TableRow] = []
    for each in scores:
        _, is_right = ranks_of_ids(*each.results, each.cell.qrels.values())
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
