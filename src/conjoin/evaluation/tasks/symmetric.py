"""The symmetric multimodal-to-multimodal protocol (sym-MM2MM; SOLAR section 4) on triplets (X, X⁺, X⁻).

X⁺ has the meaning of X, and X⁻ looks similar but has another meaning. Precision: the share of triplets whose X⁺ is
more similar to X than X⁻. R@k: X⁺ among the first k of the items of all triplets and the distractors, without X. mR:
the mean of R@1, R@5 and R@10; Avg: the mean of mR and Precision. Ties are failures.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conjoin.evaluation.tasks import Cell, Rows, Task

if TYPE_CHECKING:
    import datasets


@dataclass(kw_only=True)
class SymmetricOptions:
    """Which triplets.

    Args:
        data: File of the triplets.
        distractors: Further candidates, as for conjoin encode.
        streaming: Read the distractors while encoding, without loading first.
        instruction: Instruction for every item, for models that follow instructions.
    """

    data: str
    distractors: str | None = None
    streaming: bool = False
    instruction: str | None = None


class _Joined:
    """The rows of two sources, one after the other, at every reading."""

    def __init__(self, *sources: Iterable[Mapping[str, Any]]) -> None:
        self.sources = sources

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return itertools.chain(*self.sources)


def triplet_cell(
    name: str,
    triplets: "datasets.Dataset",
    distractors: "datasets.Dataset | datasets.IterableDataset | None" = None,
    instruction: str | None = None,
) -> Cell:
    """The cell of triplets. An item of several triplets, with the same image and text, is one candidate.

    Args:
        name: Of the cell.
        triplets: Columns `TRIPLET_FEATURES`, as `load_triplets` and `symmetric_triplets` return them. A variant of the
            query takes its place in the comparison of Precision, nowhere else.
        distractors: Rows as `load_pairs` returns them.
        instruction: For every item, distractors included (the paper's is "Represent the given image with related text
            information:").

    Raises:
        ValueError: Two equal items in a triplet.
    """
    from conjoin.data.columns import undecoded
    from conjoin.storage.fingerprints import text_digest

    items: dict[str, dict[str, Any]] = {}
    queries, variants = [], []
    qrels, negatives, excluded, kinds = {}, {}, {}, dict[str, list[str]]()
    for row in triplets.to_list():
        id_, keys = row["id"], []
        for role in ("query", "positive", "negative", "variant"):
            item = {part: row[f"{role}_{part}"] for part in ("image", "text") if row[f"{role}_{part}"] is not None}
            if role == "query":
                queries.append({"id": id_, **item})
            if role != "variant":
                keys.append(text_digest(json.dumps(item, sort_keys=True, default=bytes.hex)))
                items.setdefault(keys[-1], {"id": keys[-1], **item})
            elif item:
                variants.append({"id": id_, **item})
        if len(set(keys)) < 3:
            raise ValueError(f"triplet {id_!r}: two of query, positive and negative are the same item")
        excluded[id_], qrels[id_], negatives[id_] = [keys[0]], [keys[1]], keys[2]
        if row["kind"] is not None:
            kinds.setdefault(row["kind"].replace("_", " "), []).append(id_)
    others = Rows("distractors", [] if distractors is None else undecoded(distractors))
    corpus = _Joined(items.values(), others.rows)
    return Cell(
        name,
        Rows(f"{name}, query", queries, instruction),
        Rows(f"{name}, candidates", corpus, instruction, lambda id_: items[id_] if id_ in items else others.row(id_)),
        qrels,
        excluded=excluded,
        negatives=negatives,
        variants=Rows(f"{name}, variant", variants, instruction) if variants else None,
        groups={"kind of negative": dict(sorted(kinds.items()))} if kinds else {},
    )


def symmetric_cells(options: SymmetricOptions) -> list[Cell]:
    """The cell of a file of triplets, or of triplets that are loaded."""
    from conjoin.data import load_pairs, load_triplets

    more = options.distractors and load_pairs(options.distractors, streaming=options.streaming)
    is_file = isinstance(options.data, str | Path)
    triplets = load_triplets(options.data) if is_file else options.data
    return [triplet_cell(Path(options.data).stem if is_file else "triplets", triplets, more, options.instruction)]


TASK = Task(
    "symmetric",
    "Symmetric triplets",
    str(__doc__),
    SymmetricOptions,
    symmetric_cells,
    mrr=None,
    headline=("average", "mean_recall", "precision"),
)
