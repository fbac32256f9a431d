"""Collation of rows into a batch of model inputs: items, pairs, and queries with candidates."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

import torch

from conjoin.constants import Role
from conjoin.data.cells import as_id, is_missing, read_images
from conjoin.data.row_images import row_item
from conjoin.processing.item_error import ItemError
from conjoin.storage import name_ids, stable_id

TEXT_IDS = "text_ids"
"""The input `(N,)` of a batch of pairs that is equal for equal texts; -1 without a text."""
MODALITY_IDS = {"text": 0, "image": 1, "image,text": 2}
"""The integer of each modality in a batch."""
PAIR_COLUMNS = {"image", "text", "id", "group", "ids", "pairs"}
QUERY_COLUMNS = {"query", "positive", "negatives", "instruction", "id", "positive_id", "negative_ids", "ids"} | {
    "queries", "positives", "target_modality", "negative_modalities", "candidate_modality", "num_negatives", "dataset",
}  # fmt: skip
"""What the collators read, and the names in their batches."""


class PairCollator:
    """Collates rows `{"image", "text", "id"?, "group"?}` into `pairs`, their model inputs, and `ids` `(N,)`.

    A row without an image is a text item, and vice versa; a row with a list of images may be interleaved, see
    `load_pairs`. Rows with the same `group` (by default the same `id`) show the same thing: they are positives in
    evaluation and are not negatives of one another in training. Without both columns, rows with the same text do.
    Other columns of numbers come by their names, for a loss that takes them.

    Args:
        processor: Called as `processor(items, ids=ids)`.
    """

    def __init__(self, processor: Callable[..., Any]) -> None:
        self.processor = processor

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate a list of rows.

        Raises:
            ValueError: No rows; or a row cannot be used, or has neither group nor id although others do.
        """
        ids = [str(row.get("id", index)) for index, row in enumerate(rows)]
        items = []
        for row, row_id in zip(rows, ids, strict=True):
            name = f"row with id {row_id!r}"
            if row.get("image") is None and row.get("text") is None:
                raise ItemError(name, f"neither 'image' nor 'text'; its columns are {', '.join(row)}")
            items.append(row_item({"image": read_images(row.get("image")), "text": row.get("text")}, name))
        batch = number_columns(rows, PAIR_COLUMNS) | {"pairs": dict(self.processor(items, ids=ids))}
        batch["ids"] = name_ids(name_rows(rows))
        texts = [row.get("text") for row in rows]
        batch[TEXT_IDS] = torch.tensor([stable_id(text) if isinstance(text, str) else -1 for text in texts])
        return batch


def number_columns(rows: Sequence[Mapping[str, Any]], known: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the columns of numbers `(N,)`, or of equally long lists of numbers `(N, K)`, that a loss may name.

    Args:
        rows: `N` rows.
        known: The columns that a collator reads itself.
    """
    columns = {}
    for name in rows[0].keys() - known if rows else ():
        values = [row.get(name) for row in rows]
        numbers = [number for value in values for number in (value if isinstance(value, list) else [value])]
        if all(isinstance(number, int | float) for number in numbers):
            with suppress(ValueError, TypeError, RuntimeError):  # lists of several lengths, or integers beyond 64 bits
                columns[name] = torch.tensor(values)
    return columns


def name_rows(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the name of what each row shows: its `group`, else its `id`, else, if no row has either, its text.

    A group and an id are never the same name: the row with the id `1` is not of the group `1`.

    Raises:
        ValueError: Some rows have a name and others do not.
    """
    names, unnamed, texts = [], [], []
    for index, row in enumerate(rows):
        group, id_ = as_id(row.get("group")), as_id(row.get("id"))
        texts.append(f"text {row['text']}" if isinstance(row.get("text"), str) else uuid4().hex)
        if group is None and id_ is None:
            unnamed.append(index)
        else:
            names.append(f"id {id_}" if group is None else f"group {group}")
    if unnamed and names:
        raise ValueError(f"rows {unnamed[:3]} have neither a group nor an id, but other rows do")
    return names or texts


class RetrievalCollator:
    """Collates rows `{"query", "instruction"?, "positive", "negatives"?, "target_modality"?, ...}`.

    `query`, `positive` and each of `negatives` are items `{"image"?, "text"?}` (with a list of images perhaps
    interleaved, see `load_pairs`), chat messages, pictures, or texts. Rows may also have `id` (for
    error messages), `positive_id` and `negative_ids` (so that equal candidates are not negatives; candidates that are
    all plain texts are known by their texts), and `negative_modalities`. `QueryDataset` gives such rows.

    The batch of `N` rows with `M` negatives in total has

    * `queries`, `positives` and, when M > 0, `negatives`: the processor's output for each;
    * `candidate_modality` `(N + M,)`, of positives, then negatives, as in `MODALITY_IDS`, if the rows have modalities;
    * `ids` `(N + M,)` in the same order, equal for equal candidates, if the rows have ids;
    * `num_negatives` `(N,)` of each query, when M > 0;
    * other columns of numbers, such as the scores of a teacher, by their names.

    Args:
        processor: Called as `processor(items, ids=ids)`, and for queries with instructions as
            `processor(items, ids=ids, instruction=instructions)`, with a text or None per query.
    """

    def __init__(self, processor: Callable[..., Any]) -> None:
        self.processor = processor

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate `N` rows.

        Raises:
            ValueError: No rows, a row without query or positive, some rows with ids or modalities and some without,
                an unknown modality, or an item that cannot be used.
        """
        names = [str(row.get("id", index)) for index, row in enumerate(rows)]
        for row, name in zip(rows, names, strict=True):
            for part in ("query", "positive"):
                if row.get(part) is None:
                    raise ItemError(f"row with id {name!r}", f"no {part!r}; its columns are {', '.join(row)}")
        instructions = [row.get("instruction") for row in rows]
        given = {} if all(text is None for text in instructions) else {"instruction": instructions}
        batch: dict[str, Any] = number_columns(rows, QUERY_COLUMNS)
        batch["queries"] = self._process([row.get("query") for row in rows], names, "query", **given)
        positives = [row.get("positive") for row in rows]
        batch["positives"] = self._process(positives, [f"{name}, positive" for name in names], "document")
        counts = [len(row.get("negatives") or ()) for row in rows]
        negatives = [negative for row in rows for negative in row.get("negatives") or ()]
        if negatives:
            owners = [f"{name}, negative" for name, count in zip(names, counts, strict=True) for _ in range(count)]
            batch["negatives"] = self._process(negatives, owners, "document")
            batch["num_negatives"] = torch.tensor(counts)
        modalities = _per_candidate(rows, counts, "target_modality", "negative_modalities")
        if modalities is not None:
            if unknown := set(modalities) - MODALITY_IDS.keys():
                raise ValueError(f"unknown modality {min(unknown)!r}; expected one of {', '.join(MODALITY_IDS)}")
            batch["candidate_modality"] = torch.tensor([MODALITY_IDS[value] for value in modalities])
        ids = _per_candidate(rows, counts, "positive_id", "negative_ids")
        if ids is None and all(isinstance(text, str) for text in positives + negatives):
            ids = positives + negatives
        if ids is not None:
            batch["ids"] = torch.tensor([stable_id(str(value)) for value in ids])
        return batch

    def _process(self, values: Sequence[Any], names: Sequence[str], role: Role, **instructions: Any) -> Any:
        items = [as_item(value, f"item {name!r}") for value, name in zip(values, names, strict=True)]
        if getattr(self.processor, "takes_role", False):  # of a model with prompts or sides of its own
            instructions["role"] = role
        return self.processor(items, ids=names, **instructions)


def as_item(value: Any, name: str = "item") -> Any:
    """Return a text as an item, so that `cat.png` is not a path; a dict without its None parts; other items as is.

    Raises:
        ValueError: As `row_item`.
    """
    if isinstance(value, Mapping):
        return value if "role" in value else row_item(value, name)
    return {"text": value} if isinstance(value, str) else value


def _per_candidate(
    rows: Sequence[Mapping[str, Any]], counts: Sequence[int], positive: str, negatives: str
) -> list[Any] | None:
    """Return the values of the positives, then of all negatives; None if no row has them.

    If rows have only the positive's modality, their negatives share it.
    """
    values = [None if is_missing(value := row.get(positive)) else value for row in rows]
    if all(value is None for value in values):
        return None
    others: list[Any] = []
    for row, count in zip(rows, counts, strict=True):
        shared = [row.get(positive)] * count if positive == "target_modality" else []
        others += row.get(negatives) or shared
    if None in values or len(others) != sum(counts):
        raise ValueError(f"some rows have {positive!r} (and {negatives!r} for their negatives), but others lack it")
    return values + others
