"""Collation of pairs into one batch of model inputs, with ids that identify false negatives."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import ProcessorMixin

from conjoin.data.collator import ItemCollator
from conjoin.storage import name_ids


class PairCollator:
    """Collates rows `{"image", "text", "id"?, "group"?}` into `pairs`, their model inputs, and `ids` `(N,)`.

    Rows with the same `group` (by default the same `id`) show the same thing: they are positives in evaluation and are
    not negatives of one another in training. Without both columns there are no `ids`, and all rows are distinct.
    """

    def __init__(self, processor: ProcessorMixin) -> None:
        self.items = ItemCollator(processor)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate a list of rows.

        Raises:
            ValueError: A row cannot be used, or has neither group nor id although others do.
        """
        names = name_rows(rows)
        return {"pairs": dict(self.items(rows))} | ({} if names is None else {"ids": name_ids(names)})


def name_rows(rows: Iterable[Mapping[str, Any]]) -> list[str] | None:
    """Return the name of what each row shows: its `group`, else its `id`; None if no row has either.

    A group and an id are never the same name: the row with the id `1` is not of the group `1`.

    Raises:
        ValueError: Some rows have a name and others do not.
    """
    names = [_name(row) for row in rows]
    unnamed = [index for index, name in enumerate(names) if name is None]
    if unnamed and len(unnamed) < len(names):
        raise ValueError(f"rows {unnamed[:3]} have neither a group nor an id, but other rows do")
    return None if unnamed else [name for name in names if name is not None]


def _name(row: Mapping[str, Any]) -> str | None:
    if row.get("group") is not None:
        return f"group {row['group']}"
    return None if row.get("id") is None else f"id {row['id']}"
