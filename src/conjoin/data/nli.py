"""Natural-language-inference triplets: sentence, entailed sentence and optional contradiction."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import datasets

from conjoin.data.columns import require_columns
from conjoin.data.pair_sources import open_source
from conjoin.processing.item_error import ItemError
from conjoin.processing.item_inputs import check_text

NLI_COLUMNS = {"query": "sent0", "positive": "sent1", "negative": "hard_neg"}
"""The column of each part, as in the published CSV."""

NLI_FEATURES = datasets.Features(
    {
        "id": datasets.Value("string"),
        "query": datasets.Value("string"),
        "positive": datasets.Value("string"),
        "negatives": datasets.List(datasets.Value("string")),
        "target_modality": datasets.Value("string"),
    }
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
    given = dict(columns or {})
    unknown = [part for part in given if part not in NLI_COLUMNS]
    if unknown:
        raise ValueError(f"unknown part {unknown[0]!r} in columns; expected one of {list(NLI_COLUMNS)}")
    if hard_negatives not in (0, 1):
        raise ValueError(f"hard_negatives={hard_negatives}; expected 0, or 1 to use the column of the negatives")
    if "negative" in given and not hard_negatives:
        raise ValueError(f"the negative column {given['negative']!r} is named, but hard_negatives=0; set it to 1")
    table, _ = open_source(source, split, streaming=False)
    if not isinstance(table, datasets.Dataset):
        raise ValueError(f"expected a dataset with a length, got {type(table).__name__}")
    chosen = NLI_COLUMNS | given
    if not hard_negatives:
        del chosen["negative"]
    require_columns(chosen.values(), table.column_names)
    texts = {part: _checked(table[column][:], column) for part, column in chosen.items()}
    negatives = [[text] for text in texts["negative"]] if "negative" in texts else [[]] * len(table)
    rows = {
        "id": [str(row) for row in range(len(table))],
        "query": texts["query"],
        "positive": texts["positive"],
        "negatives": negatives,
        "target_modality": ["text"] * len(table),
    }
    return datasets.Dataset.from_dict(rows, features=NLI_FEATURES)


def _checked(values: Sequence[Any], column: str) -> list[str]:
    for row, value in enumerate(values):
        if value is None:
            raise ItemError(f"row {row}, column {column!r}", "the text is missing")
        check_text(value, f"row {row}, column {column!r}")
    return list(values)
