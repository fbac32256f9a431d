"""What frozen models say of each row, computed once by `Dataset.map` and read from disk while training."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
from transformers import TrainingArguments

from conjoin.storage import settings_digest

SHARD_SIZE = 1024
"""Rows per file: an interrupted computation goes on after the last complete one."""


def precompute(
    rows: Any,
    compute: Callable[[list[Any]], Mapping[str, Any]],
    folder: str | Path,
    *,
    key: Mapping[str, Any],
    features: datasets.Features,
    batch_size: int = 32,
    args: TrainingArguments | None = None,
) -> datasets.Dataset:
    """Return what `compute` says of each row, as torch tensors; from `folder`, where it was computed before.

    Args:
        rows: Rows with a length and an order.
        compute: Maps some rows to columns of NumPy arrays or lists, one entry for each row. It is only called for rows
            that are not in the folder.
        folder: Where the files are kept, under a digest of `key`; other keys have other files.
        key: All that the result depends on, as JSON holds it: digests of weights, processor and rows, settings.
        features: The columns: `List(Value("float32"), length=D)` for vectors, `Array2D((None, D), "float32")` ...
        batch_size: Rows for each call.
        args: Of a trainer with several processes: the main one computes, the others wait.
    """
    folder, digest = Path(folder), settings_digest(dict(key))
    folder.mkdir(parents=True, exist_ok=True)

    def shard(start: int) -> datasets.Dataset:
        chosen = datasets.Dataset.from_dict({"row": list(range(start, min(start + SHARD_SIZE, len(rows))))})
        return chosen.map(
            lambda batch: dict(compute([rows[index] for index in batch["row"]])),
            batched=True,
            batch_size=batch_size,
            remove_columns=["row"],
            features=features,
            cache_file_name=str(folder / f"{digest}-{start}.arrow"),
            new_fingerprint=f"{digest}-{start}",
            desc=f"Precomputing in {folder.name}",
        )

    if args is None:
        parts = [shard(start) for start in range(0, len(rows), SHARD_SIZE)]
    else:
        with args.main_process_first(local=False, desc="precomputing"):
            parts = [shard(start) for start in range(0, len(rows), SHARD_SIZE)]
    return datasets.concatenate_datasets(parts).with_format("torch")
