"""The recipe section `data` for queries and candidates."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from conjoin.data import MbeirTraining, MeritTraining, QueryMix, QueryTable, load_nli

from .data import PairArguments, SourceArguments

PAIR_FIELDS = ("image_column", "text_column", "id_column", "group_column")


@dataclass
class QueryArguments(PairArguments):
    """The queries and candidates for training and evaluation.

    Args:
        format: `queries`, rows of your own for `conjoin.data.QueryTable`; `nli`, a sentence table for
            `conjoin.data.load_nli`; `mbeir`, a folder for `conjoin.data.MbeirTraining`; or `merit`, a folder for
            `conjoin.data.MeritTraining`.
        source: The table, or the root folder of M-BEIR or MERIT.
        sources: For `queries`: several tables, which replace `source`; for `pairs`: several streams.
        columns: For `nli`: the columns of `query`, `positive` and `negative`; for `queries` also of the others in
            `conjoin.data.QUERY_COLUMNS`.
        datasets: For `mbeir`: names of the datasets to use; empty for all.
        hard_negatives: Number of negatives per row, from the negatives in the data; for `nli` at most 1.
        instruction: For `queries`: the instruction of the rows that have none.
        instructions: For `mbeir`: whether queries include their instruction.
        ood: For `merit`: drop the queries that an out-of-distribution test holds out: `language`, `attribute` or
            `class`.

    Raises:
        ValueError: The format is unknown, or a field is set for another format than its own.
    """

    formats: ClassVar[tuple[str, ...]] = ("queries", "nli", "mbeir", "merit")

    format: str = "nli"
    sources: tuple[SourceArguments, ...] = ()
    columns: dict[str, str] = field(default_factory=dict)
    datasets: tuple[str, ...] = ()
    hard_negatives: int = 0
    instruction: str | None = None
    instructions: bool = True
    ood: str | None = None

    def __post_init__(self) -> None:
        if self.format not in self.formats:
            raise ValueError(f"data: unknown format {self.format!r}; expected one of {self.formats}")
        if self.ood is not None and self.format != "merit":
            raise ValueError(f"data: ood={self.ood!r} is for format merit, not {self.format}")
        super().__post_init__()
        for name in ("sources", "instruction"):
            if vars(self)[name] and self.format != "queries" and (name, self.format) != ("sources", "pairs"):
                raise ValueError(f"data: {name} is for format queries, not {self.format}")
        if self.on_error != "raise" and self.has_queries:
            raise ValueError(f"data: on_error={self.on_error!r} is for pairs, not for format {self.format}")
        if self.format == "queries":
            self._check_queries()

    def _check_queries(self) -> None:
        """Refuse fields of pairs."""
        for name in PAIR_FIELDS:
            if vars(self)[name] is not None:
                raise ValueError(f"data: {name}={vars(self)[name]!r} is for pairs; name columns of queries in columns")
        if self.streaming:
            raise ValueError("data: streaming is for pairs; JSON lines of queries stay on disk without it")

    @property
    def has_queries(self) -> bool:
        """Whether the rows are queries with candidates, not pairs."""
        return self.format != "pairs"

    def load(self) -> tuple[Any, Any]:
        """Load the training rows and the evaluation rows (or None).

        Raises:
            ValueError: The recipe names evaluation rows of M-BEIR, which is a separate benchmark.
        """
        if self.sources and self.has_queries:
            mix = QueryMix([self._table(source) for source in self.sources], [each.weight for each in self.sources])
            return mix, self._evaluation()
        if not self.has_queries:
            return super().load()
        if self.format != "mbeir":
            rows = self.load_rows(self.source, self.split, self.streaming)
            return rows, self.load_rows(
                self.eval_source or self.source, self.eval_split or self.split
            ) if self.evaluates else None
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
        """Load one table of queries or sentences, or one split of MERIT."""
        if self.format == "pairs":
            return super().load_rows(source, split, streaming)
        if self.format == "queries":
            return self._table(SourceArguments(source, split))
        if self.format == "merit":
            return MeritTraining(source, hard_negatives=self.hard_negatives, ood=self.ood, split=split)
        return load_nli(source, self.columns, split, self.hard_negatives)

    def _evaluation(self) -> Any:  # noqa: ANN401 - a dataset
        if self.eval_source is None and self.eval_split is not None:
            raise ValueError("data: eval_split without eval_source; with several sources name the eval_source")
        return None if self.eval_source is None else self.load_rows(self.eval_source, self.eval_split or "train")

    def _table(self, source: SourceArguments) -> QueryTable:
        return QueryTable(
            source.source,
            columns=self.columns if source.columns is None else source.columns,
            split=source.split,
            hard_negatives=self.hard_negatives,
            instruction=source.instruction or self.instruction,
            name=source.name,
            show_progress=True,
        )
