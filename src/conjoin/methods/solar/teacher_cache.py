"""The states of frozen teachers for every row, computed once and read from disk while training.

The text teacher's tokens are stored as they are, and aligned to the student's while training, so that one cache serves
students with different tokenizers.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from conjoin.data import ROW_NAMES, TeacherRowCache
from conjoin.methods.solar.teachers import IMAGE_TARGETS, TEXT_TARGETS, TeacherCollator, Teachers
from conjoin.storage import differences, rows_digest, settings_digest, stable_id, tokenizer_digest, weights_digest

TOKENS, POOLED = TEXT_TARGETS
SHARD_SIZE = 1024
"""Rows per file of a cache."""


class TeacherCache(TeacherRowCache):
    """A complete cache; `cache[index]` holds the teachers' states of a row, for `TeacherCollator`.

    Args:
        folder: Where `cache_teachers` wrote it.

    Raises:
        FileNotFoundError: There is no cache.
        ValueError: It is unfinished, damaged, or of another kind or layout.
    """

    kind = "teacher cache"
    remedy = "run `conjoin teacher-cache`"
    named_by = "id or text"

    @staticmethod
    def row_name(row: Mapping[str, Any], index: int) -> int:
        """A digest of a row's id (its index, if it has none) and text."""
        return stable_id(f"{row.get('id', index)}\n{row.get('text')}")

    def check(self, teachers: Teachers, collator: TeacherCollator) -> None:
        """Refuse other teachers, or another grid of the student, than the cache was made for.

        Raises:
            ValueError: The message names what differs.
        """
        wanted = _teachers_key(teachers, collator)
        differing = differences({name: self.key.get(name) for name in wanted}, wanted)
        if differing:
            raise ValueError(
                f"the teacher cache in {str(self.folder)!r} is not of the teachers of the recipe: it was made with "
                f"{differing}"
            )


def cache_teachers(
    teachers: Teachers,
    collator: TeacherCollator,
    rows: Any,  # noqa: ANN401 - any sequence of rows
    folder: str | Path,
    *,
    batch_size: int = 32,
    dtype: torch.dtype | None = None,
    num_workers: int = 0,
    show_progress: bool = True,
) -> TeacherCache:
    """Compute a cache, or its missing and damaged shards; a complete one is only opened.

    With the teachers' own `dtype`, the cached states equal those of the same batch bit by bit. (Between batches of
    other rows, rounding may differ in the last bits.)

    Args:
        teachers: The teachers; they run where the vision teacher is.
        collator: Prepares their inputs; for a student of the same grid.
        rows: Pairs with a length and an order.
        folder: Where to write.
        batch_size: Rows per forward.
        dtype: What is stored; the teachers' own when None.
        num_workers: Processes that decode images ahead.
        show_progress: Show a progress bar.

    Raises:
        ValueError: The folder holds a cache of other teachers, data or grid, another process writes into it, or the
            rows cannot be cached.
    """
    device = teachers.vision.model.device

    def tensors(chosen: range) -> dict[str, Tensor | list[Tensor]]:
        collate = _NamingCollator(collator)
        loader = DataLoader(_NamedRows(rows, chosen), batch_size, collate_fn=collate, num_workers=num_workers)
        return _shard_tensors(teachers, loader, device, dtype)

    key = _key(teachers, collator, rows, dtype)
    description = "Teachers" if show_progress else None
    return TeacherCache.make(folder, len(rows), SHARD_SIZE, key, tensors, description=description)


class _NamedRows(Dataset[dict[str, Any]]):
    """Some of the rows, each with the digest of its name."""

    def __init__(self, rows: Any, chosen: range) -> None:  # noqa: ANN401
        self.rows, self.chosen = rows, chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, position: int) -> dict[str, Any]:
        index = self.chosen[position]
        row = self.rows[index]
        return {**row, ROW_NAMES: TeacherCache.row_name(row, index)}


class _NamingCollator:
    """The collator, and the names of its rows beside."""

    def __init__(self, collator: TeacherCollator) -> None:
        self.collator = collator

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self.collator(rows) | {ROW_NAMES: torch.tensor([row[ROW_NAMES] for row in rows])}


@torch.no_grad()
def _shard_tensors(
    teachers: Teachers, loader: DataLoader[Any], device: torch.device, dtype: torch.dtype | None
) -> dict[str, Tensor | list[Tensor]]:
    parts: dict[str, list[Tensor]] = {name: [] for name in (*IMAGE_TARGETS, POOLED, ROW_NAMES)}
    words: list[Tensor] = []
    for batch in loader:
        teacher_inputs = batch["pairs"]["teacher"]
        states = teachers.states({name: value.to(device) for name, value in teacher_inputs.items()})
        counts = teacher_inputs["attention_mask"].sum(1).tolist()
        words += [row[:count].to("cpu", dtype) for row, count in zip(states.pop(TOKENS), counts, strict=True)]
        for name, value in states.items():
            parts[name].append(value.to("cpu", dtype))
        parts[ROW_NAMES].append(batch[ROW_NAMES])
    return {TOKENS: words, **{name: torch.cat(part) for name, part in parts.items()}}


def _key(teachers: Teachers, collator: TeacherCollator, rows: Any, dtype: torch.dtype | None) -> dict[str, Any]:  # noqa: ANN401
    """What a cache is made from, each part under a name that an error message can use."""
    return _teachers_key(teachers, collator) | {
        "dtype": None if dtype is None else str(dtype),
        "data": rows_digest(rows),
    }


def _teachers_key(teachers: Teachers, collator: TeacherCollator) -> dict[str, Any]:
    vision, text = teachers.vision, teachers.text
    return {
        "vision teacher": weights_digest(vision.model),
        "text teacher": [weights_digest(text.model), text.max_length, tokenizer_digest(text.tokenizer)],
        "global text teacher": None if text.global_model is None else weights_digest(text.global_model),
        "grid": [
            settings_digest(collator.image_processor.to_dict()),
            collator.patch_size,
            collator.teacher_patch_size,
        ],
    }


def bytes_per_row(
    teachers: Teachers, collator: TeacherCollator, rows: Sequence[Mapping[str, Any]], dtype: torch.dtype
) -> float:
    """How much a row takes on disk, on average over `rows`."""
    teacher_inputs = collator(rows)["pairs"]["teacher"]
    states = teachers.states(teacher_inputs)
    numbers = sum(states[name].numel() for name in (*IMAGE_TARGETS, POOLED))
    numbers += int(teacher_inputs["attention_mask"].sum()) * states[TOKENS].shape[-1]
    return numbers * dtype.itemsize / len(rows)
