"""The states of an un-pruned model for queries and positives, computed once and read from disk while training."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import ProcessorMixin

from conjoin.data import ROW_NAMES, RetrievalCollator, TeacherRowCache
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.models.shortcuts import use_shortcuts
from conjoin.storage import content_digest, differences, processor_digest, stable_id, text_digest, weights_digest

TEACHER_PARTS = ("queries", "positives")
"""The parts of a batch that a teacher sees."""
SHARD_SIZE = 4096
"""Rows per file of a cache."""


class TeacherStates(TeacherRowCache):
    """A complete cache; `states[index]` is `{"queries": (D,), "positives": (D,)}` of a row.

    Args:
        folder: Where `cache_teacher_states` wrote it.

    Raises:
        FileNotFoundError: There is no cache.
        ValueError: It is unfinished, damaged, or of another kind or layout.
    """

    kind = "cache of a teacher's states"
    remedy = "call `cache_teacher_states`"
    named_by = "query, instruction or positive"

    @staticmethod
    def row_name(row: Mapping[str, Any], index: int = 0) -> int:
        """A digest of a row's query, instruction and positive, wherever it stands."""
        return stable_id(repr([_content(row.get(part)) for part in ("query", "instruction", "positive")]))

    def check_teacher(
        self, name: str | None, load: Callable[[], MllmRetrieverModel], processor: ProcessorMixin
    ) -> None:
        """Refuse the states of another teacher or processor.

        Args:
            name: Of the teacher; one of the recorded name is not loaded. None accepts any.
            load: Loads the teacher.
            processor: Its processor.

        Raises:
            ValueError: The message names what differs.
        """
        wanted = {"processor": processor_digest(processor)}
        if name not in (None, self.details.get("name")):
            wanted["teacher"] = weights_digest(load())
        differing = differences({part: self.key.get(part) for part in wanted}, wanted)
        if differing:
            raise ValueError(
                f"the states in {str(self.folder)!r} are not of the recipe's teacher and processor: they were "
                f"made with {differing}; remove the folder, or name another in teacher.cache"
            )

    def check_student(self, student: MllmRetrieverModel) -> None:
        """Raise a ValueError if the teacher was read elsewhere than the student, or is not deeper."""
        config, (readout, position_mode, depth) = student.config, self.key["readout"]
        if (readout, position_mode) != (config.readout, config.position_mode) or depth <= config.keep_layers:
            raise ValueError(
                f"the states in {str(self.folder)!r} are of {depth} layers with readout {readout!r} and positions "
                f"{position_mode!r}; the student has {config.keep_layers}, {config.readout!r} and "
                f"{config.position_mode!r}"
            )


class TeacherStatesCollator:
    """Adds the teacher's states `(N, D)` to a batch, as the part `teacher` of `queries` and of `positives`."""

    def __init__(self, collator: Callable[[list[Any]], dict[str, Any]]) -> None:
        self.collator = collator

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate a list of rows; those without states, as in evaluation, are left as they are."""
        batch = self.collator(list(rows))
        for part in TEACHER_PARTS if "teacher" in rows[0] else ():
            states = torch.stack([row["teacher"][part] for row in rows])
            batch[part] = {**batch[part], "teacher": {"states": states}}
        return batch


def cache_teacher_states(
    teacher: MllmRetrieverModel,
    processor: ProcessorMixin,
    rows: Any,  # noqa: ANN401 - any sequence of rows
    folder: str | Path,
    *,
    batch_size: int = 32,
    name: str | None = None,
    show_progress: bool = True,
) -> TeacherStates:
    """Compute the states of all rows, or the missing and damaged shards; a complete cache is only opened.

    Args:
        teacher: The un-pruned model, where it is to run.
        processor: Its processor.
        rows: Queries and positives with a length and an order, such as `load_nli` makes.
        folder: Where to write.
        batch_size: Rows per forward.
        name: The name of the teacher, by which `TeacherStates.check_teacher` knows it without loading it.
        show_progress: Show a progress bar.

    Raises:
        ValueError: The folder holds states of another teacher, processor or data, or another process writes into it.
    """
    teacher = teacher.eval()
    use_shortcuts(teacher)
    names = [TeacherStates.row_name(rows[index]) for index in range(len(rows))]
    key = {
        "teacher": weights_digest(teacher),
        "readout": [teacher.config.readout, teacher.config.position_mode, teacher.config.keep_layers],
        "processor": processor_digest(processor),
        "data": text_digest(str(names)),
    }
    collator = RetrievalCollator(processor)

    def tensors(chosen: range) -> dict[str, Tensor]:
        states = _states(teacher, collator, [rows[index] for index in chosen], batch_size)
        return states | {ROW_NAMES: torch.tensor(names[chosen.start : chosen.stop])}

    description = "Teacher" if show_progress else None
    return TeacherStates.make(
        folder, len(rows), SHARD_SIZE, key, tensors, details={"name": name}, description=description
    )


@torch.no_grad()
def _states(
    teacher: MllmRetrieverModel, collator: RetrievalCollator, rows: list[Mapping[str, Any]], batch_size: int
) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {part: [] for part in TEACHER_PARTS}
    for start in range(0, len(rows), batch_size):
        wanted = [{"query": row["query"], "positive": row["positive"], "instruction": row.get("instruction")}
                  for row in rows[start : start + batch_size]]  # fmt: skip
        batch = collator(wanted)
        for part in TEACHER_PARTS:
            states = teacher(**batch[part].to(teacher.device)).pooler_output
            parts[part].append(states.cpu())
    return {part: torch.cat(states) for part, states in parts.items()}


def _content(value: Any) -> Any:  # noqa: ANN401 - an item or a part of one
    if isinstance(value, Image.Image):
        return content_digest(value)
    if isinstance(value, Mapping):
        return sorted((part, _content(content)) for part, content in value.items() if content is not None)
    return value if value is None else str(value)
