"""The recipe section `data` for queries and candidates."""

from dataclasses import dataclass, field
from typing import Any

from conjoin.data import MbeirTraining, MeritTraining, load_nli

from .data import PairArguments

FORMATS = ("nli", "mbeir", "merit")


@dataclass
class QueryArguments(PairArguments):
    """The queries and candidates for training and evaluation.

    Args:
        format: `nli`, a sentence table for `conjoin.data.load_nli`; `mbeir`, a folder for
            `conjoin.data.MbeirTraining`; or `merit`, a folder for `conjoin.data.MeritTraining`.
        source: The table, or the root folder of M-BEIR or MERIT.
        columns: For `nli`: the columns of `query`, `positive` and `negative`.
        datasets: For `mbeir`: names of the datasets to use; empty for all.
        hard_negatives: Number of negatives per row, from the negatives in the data; for `nli` at most 1.
        instructions: For `mbeir`: whether queries include their instruction.
        ood: For `merit`: drop the queries that an out-of-distribution test holds out: `language`, `attribute` or
            `class`.

    Raises:
        ValueError: The format is unknown, or `ood` is set for another format than `merit`.
    """

    format: str = "nli"
    columns: dict[str, str] = field(default_factory=dict)
    datasets: tuple[str, ...] = ()
    hard_negatives: int = 0
    instructions: bool = True
    ood: str | None = None

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"data: unknown format {self.format!r}; expected one of {FORMATS}")
        if self.ood is not None and self.format != "merit":
            raise ValueError(f"data: ood={self.ood!r} is for format merit, not {self.format}")

    def load(self) -> tuple[Any, Any]:
        """Load the training rows and the evaluation rows (or None).

        Raises:
            ValueError: The recipe names evaluation rows of M-BEIR, which is a separate benchmark.
        """
        if self.format != "mbeir":
            return super().load()
        if self.evaluates:
            raise ValueError(
                "data: M-BEIR is evaluated after training, by `conjoin evaluate --benchmark mbeir`; remove "
                "eval_source and eval_split"
            )
        rows = MbeirTraining(
            self.source,
            datasets=self.datasets or None,
            hard_negatives=self.hard_negatives,
            instructions=self.instructions,
        )
        return rows, None

    def load_rows(self, source: str, split: str, streaming: bool = False) -> Any:  # noqa: ANN401 - a dataset
        """Load one sentence table, or one split of MERIT."""
        if self.format == "merit":
            return MeritTraining(source, hard_negatives=self.hard_negatives, ood=self.ood, split=split)
        return load_nli(source, self.columns, split, self.hard_negatives)
