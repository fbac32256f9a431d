"""Natural-language-inference triplets: sentence, entailed sentence and optional contradiction."""

from collections.abc import Mapping
from os import PathLike
from typing import Any

import datasets

from conjoin.data.columns import require_columns
from conjoin.data.pair_sources import open_source
from conjoin.processing.item_inputs import check_text

NLI_COLUMNS = {"query": "sent0", "positive": "sent1", "negative": "hard_neg"}
"""The column of each part, as in the published CSV."""

_TEXT = datasets.Value("string")
NLI_FEATURES = datasets.Features(
    dict.fromkeys(("id", "query", "positive", "target_modality"), _TEXT) | {"negatives": datasets.List(_TEXT)}
)


def load_nli(
    source: str | PathLike[str] | datasets.Dataset,
    columns: Mapping[str, str] | None = None,
    split: str = "train",
    hard_negatives: int = 0,
) -> datasets.Dataset:
    """Load triplets as rows of `NLI_FEATURES`, ready for `RetrievalCollator` (PUMA stage 1).

    Args:
        source: A CSV (or TSV, JSON-lines, Parquet) file, a `datasets` dataset, or the id of a dataset on the Hub.
        columns: The columns of `"query"`, `"positive"` and `"negative"` where they differ from `NLI_COLUMNS`.
        split: The split, for sources with several.
        hard_negatives: Negatives per row: 0 (PUMA Eq. 3) or 1, from the column of the negatives.

    Raises:
        FileNotFoundError: No such file.
        ValueError: An unknown part, a missing column (with the nearest name), an empty cell (with its row), another
            number of negatives, or a negative column without negatives.
    """
    chosen = NLI_COLUMNS | dict(columns or {})
    if len(chosen) > len(NLI_COLUMNS):
        raise ValueError(f"unknown part {[*chosen][-1]!r} in columns; expected one of {list(NLI_COLUMNS)}")
    if hard_negatives not in (0, 1):
        raise ValueError(f"hard_negatives={hard_negatives}; expected 0 or 1")
    if not hard_negatives:
        if "negative" in (columns or {}):
            raise ValueError(f"the negative column {chosen['negative']!r} is named, but hard_negatives=0; set it to 1")
        del chosen["negative"]
    table, _ = open_source(source, split, streaming=False)
    require_columns(chosen.values(), list(table.column_names or ()))
    rows: dict[str, list[Any]] = {}
    for part, column in chosen.items():
        rows[part] = [
            check_text(text or "", f"row {row}, column {column!r}") for row, text in enumerate(table[column])
        ]
    count = len(rows["query"])
    rows["id"] = [*map(str, range(count))]
    rows["negatives"] = [[text] for text in rows.pop("negative")] if hard_negatives else [[]] * count
    rows["target_modality"] = ["text"] * count
    return datasets.Dataset.from_dict(rows, features=NLI_FEATURES)
