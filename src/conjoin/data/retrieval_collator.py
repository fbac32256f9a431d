"""From rows of queries and candidates to model inputs."""

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from conjoin.data.collator import ItemProcessor

MODALITY_IDS = {"text": 0, "image": 1, "image,text": 2}
"""The integers that stand for modalities in a batch."""


class RetrievalCollator:
    """Collates rows `{"query", "instruction"?, "positive", "negatives"?, "target_modality"?, ...}`.

    `query`, `positive` and each of `negatives` are items `{"image"?, "text"?}`, or texts. Rows may also have `id` (to
    be named in errors), `positive_id` and `negative_ids` (so that equal candidates are no negatives), and
    `negative_modalities`; `MbeirTraining` and `load_nli` make such rows.

    The batch of `N` rows with `M` negatives in all has

    * `queries`, `positives` and, when M > 0, `negatives`: what the processor makes of each;
    * `candidate_modality` `(N + M,)`, of the positives and then the negatives, by `MODALITY_IDS`, if the rows say it;
    * `candidate_ids` `(N + M,)`, equal where the candidates are, likewise.

    Args:
        processor: Called as `processor(items, ids=ids)`. If it takes an argument `instruction` it gets a list with the
            instruction of each query, or None; otherwise instructions are put in front of the text.
    """

    def __init__(self, processor: ItemProcessor) -> None:
        self.processor = processor

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate `N` rows.

        Raises:
            ValueError: No rows, a row without query or positive, some rows with ids or modalities and some without,
                an unknown modality, or an item that cannot be used.
        """
        if not rows:
            raise ValueError("got an empty batch: no rows")
        names = [str(row.get("id", index)) for index, row in enumerate(rows)]
        queries = [_part(row, "query", name) for row, name in zip(rows, names, strict=True)]
        instructions = [row.get("instruction") for row in rows]
        batch: dict[str, Any] = {"queries": process_queries(self.processor, queries, instructions, names)}
        positives = [_part(row, "positive", name) for row, name in zip(rows, names, strict=True)]
        batch["positives"] = self.processor(positives, ids=[f"{name}, positive" for name in names])
        counts = [len(row.get("negatives") or ()) for row in rows]
        negatives = [as_item(negative) for row in rows for negative in row.get("negatives") or ()]
        if negatives:
            owners = [f"{name}, negative" for name, count in zip(names, counts, strict=True) for _ in range(count)]
            batch["negatives"] = self.processor(negatives, ids=owners)
        modalities = _per_candidate(rows, counts, "target_modality", "negative_modalities")
        if modalities is not None:
            batch["candidate_modality"] = torch.tensor([_modality_id(value) for value in modalities])
        ids = _per_candidate(rows, counts, "positive_id", "negative_ids")
        if ids is not None:
            batch["candidate_ids"] = torch.tensor([stable_id(str(value)) for value in ids])
        return batch


def process_queries(
    processor: Callable[..., Any],
    items: Sequence[Any],
    instructions: Sequence[str | None],
    ids: Sequence[str] | None = None,
) -> Any:  # noqa: ANN401 - the processor's batch
    """Process queries with their instructions, as `RetrievalCollator` does."""
    named = {} if ids is None else {"ids": ids}
    if takes_instruction(processor):
        return processor(items, instruction=list(instructions), **named)
    return processor([prefixed(item, text) for item, text in zip(items, instructions, strict=True)], **named)


def takes_instruction(processor: Callable[..., Any]) -> bool:
    """Whether a processor has an argument `instruction`."""
    return "instruction" in inspect.signature(processor).parameters


def prefixed(item: Any, instruction: str | None) -> Any:  # noqa: ANN401 - an item
    """An item `{"image"?, "text"?}` with the instruction in front of its text."""
    if instruction is None:
        return item
    text = item.get("text")
    return {**item, "text": instruction if text is None else f"{instruction} {text}"}


def as_item(value: Any) -> Any:  # noqa: ANN401 - an item
    """A text as an item, so that one like `cat.png` is no path; without the parts that are None."""
    if isinstance(value, Mapping):
        return {part: content for part, content in value.items() if content is not None}
    return {"text": value}


def _part(row: Mapping[str, Any], part: str, name: str) -> Any:  # noqa: ANN401 - an item
    if row.get(part) is None:
        raise ValueError(f"row with id {name!r} has no {part!r}; its columns are {', '.join(row)}")
    return as_item(row[part])


def _per_candidate(
    rows: Sequence[Mapping[str, Any]], counts: Sequence[int], positive: str, negatives: str
) -> list[Any] | None:
    """Values of the positives, then of all negatives; None if no row has them.

    Where rows have only the positive's value and it is a modality, negatives share it.
    """
    values = [row.get(positive) for row in rows]
    if all(value is None for value in values):
        return None
    others: list[Any] = []
    for row, count in zip(rows, counts, strict=True):
        shared = [row.get(positive)] * count if positive == "target_modality" else []
        others += row.get(negatives) or shared
    if None in values or len(others) != sum(counts):
        raise ValueError(f"some rows have {positive!r} (and {negatives!r} for their negatives), but others lack it")
    return values + others


def _modality_id(value: str) -> int:
    if value not in MODALITY_IDS:
        raise ValueError(f"unknown modality {value!r}; expected one of {', '.join(MODALITY_IDS)}")
    return MODALITY_IDS[value]


def stable_id(name: str) -> int:
    """A 63-bit id, equal exactly where the names are (up to hash collisions)."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
