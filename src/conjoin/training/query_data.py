"""The recipe section `data` for queries and candidates."""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from conjoin.data import QUERY_FORMATS, QueryMix, QueryTable

from .data import PairArguments, SourceArguments

PAIR_FIELDS = ("image_column", "text_column", "id_column", "group_column")
OPTIONS = {
    "queries": ("sources", "columns", "instruction"),
    "pairs": ("sources",),
    **{name: each.options for name, each in QUERY_FORMATS.items()},
}
"""The fields that only some formats have."""


@dataclass
class QueryArguments(PairArguments):
    """The queries and candidates for training and evaluation.

    Args:
        format: `queries`, rows of your own for `conjoin.data.QueryTable`; or one of `conjoin.data.QUERY_FORMATS`.
        source: The table, or the root folder of a published data set.
        sources: For `queries`: several tables, which replace `source`; for `pairs`: several streams.
        columns: Of sentence tables: the columns of `query`, `positive` and `negative`; of `queries` also of the others
            in `conjoin.data.QUERY_COLUMNS`.
        datasets: Of a collection: names of the data sets to use; empty for all.
        hard_negatives: Number of negatives per row, from the negatives in the data; of a sentence table at most 1.
        instruction: For `queries`: the instruction of the rows that have none.
        instructions: Of a collection: whether queries include their instruction.
        ood: Drop the queries that an out-of-distribution test holds out: `language`, `attribute` or `class`.

    Raises:
        ValueError: The format is unknown, or a field is set for another format than its own.
    """

    formats: ClassVar[tuple[str, ...]] = ("queries", *QUERY_FORMATS)

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
        self._check_options()
        super().__post_init__()
        if self.on_error != "raise" and self.has_queries:
            raise ValueError(f"data: on_error={self.on_error!r} is for pairs, not for format {self.format}")
        if self.format == "queries":
            self._check_queries()

    def _check_options(self) -> None:
        """Refuse fields of other formats."""
        restricted = {name for names in OPTIONS.values() for name in names}
        for each in fields(self):
            value, is_switch = vars(self)[each.name], each.default is True
            is_set = value != each.default and (value or is_switch)
            if each.name in restricted and is_set and each.name not in OPTIONS[self.format]:
                formats = " or ".join(other for other in self.formats if each.name in OPTIONS[other])
                raise ValueError(f"data: {each.name}={value!r} is for format {formats}, not {self.format}")

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
            ValueError: The recipe names evaluation rows of a format that a separate benchmark evaluates.
        """
        if not self.has_queries:
            return super().load()
        if self.sources:
            mix = QueryMix([self._table(source) for source in self.sources], [each.weight for each in self.sources])
            return mix, self._evaluation()
        benchmark = None if self.format == "queries" else QUERY_FORMATS[self.format].benchmark
        if benchmark is not None and self.evaluates:
            raise ValueError(
                f"data: format {self.format} is evaluated after training, by `conjoin evaluate --benchmark "
                f"{benchmark}`; remove eval_source and eval_split"
            )
        rows = self.load_rows(self.source, self.split)
        if not self.evaluates:
            return rows, None
        return rows, self._evaluation_rows()

    def load_rows(self, source: str, split: str, streaming: bool = False) -> Any:  # noqa: ANN401 - a dataset
        """Load one table of queries or sentences, or one split of a published data set."""
        if self.format == "pairs":
            return super().load_rows(source, split, streaming)
        if self.format == "queries":
            return self._table(SourceArguments(source, split))
        chosen = QUERY_FORMATS[self.format]
        options = {name: vars(self)[name] for name in chosen.options}
        return chosen.load(source, split=split, hard_negatives=self.hard_negatives, **options)

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
