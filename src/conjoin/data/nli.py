"""Natural-language-inference triplets: sentence, entailed sentence and optional contradiction."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import datasets

from conjoin.data.pair_columns import unknown_column
from conjoin.data.pair_sources import open_source
from conjoin.processing.item_inputs import check_text

NLI_COLUMNS = {"query": "sent0", "positive": "sent1", "negative": "hard_neg"}
"""The column of each part, as in the published CSV; the negative may be absent."""

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
    source: str | PathLike[str] | datasets.Dataset, columns: Mapping[str, str] | None = None, split: str = "train"
) -> datasets.Dataset:
    """Load triplets as rows of `NLI_FEATURES`, ready for `RetrievalCollator` (PUMA stage 1).

    Args:
        source: A CSV (or TSV, JSON-lines, Parquet) file, a `datasets` dataset, or the id of a dataset on the Hub.
        columns: The columns of `"query"`, `"positive"` and `"negative"` where they differ from `NLI_COLUMNS`. A
            negative column given here must exist; the default one may be absent.
        split: The split, for sources with several.

    Raises:
        FileNotFoundError: No such file.
        ValueError: An unknown part, a missing column (with the nearest name), or an empty cell (with its row).
    """
    given = dict(columns or {})
    unknown = [part for part in given if part not in NLI_COLUMNS]
    if unknown:
        raise ValueError(f"unknown part {unknown[0]!r} in columns; expected one of {list(NLI_COLUMNS)}")
    table, _ = open_source(source, split, streaming=False)
    if not isinstance(table, datasets.Dataset):
        raise ValueError(f"expected a dataset with a length, got {type(table).__name__}")
    chosen = NLI_COLUMNS | given
    if "negative" not in given and NLI_COLUMNS["negative"] not in table.column_names:
        del chosen["negative"]
    for column in chosen.values():
        if column not in table.column_names:
            raise unknown_column(column, table.column_names)
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
    return [check_text(value, f"row {row}, column {column!r}") for row, value in enumerate(values)]
