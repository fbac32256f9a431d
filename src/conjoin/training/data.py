"""The recipe section `data`: image-text pairs, or queries and candidates."""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import datasets

from conjoin.data import QUERY_FORMATS, SAMPLE_SOURCE, PairStream, QueryMix, QueryTable, load_training_pairs
from conjoin.data.pair_sources import SplitError
from conjoin.data.row_checks import check_on_error


@dataclass
class SourceArguments:
    """One of several sources.

    Args:
        source: As for `conjoin.data.QueryTable`, or for pairs as for `conjoin.data.load_pairs`.
        split: The split, for sources with several.
        columns: Columns by role; None for those of the section. The roles of pairs are image, text, id and group.
        weight: Of queries: how many times its rows are used in an epoch: 2 for twice, 0.5 for a random half. Of pairs:
            its share of the rows, relative to the other sources.
        instruction: For queries: of its rows that have none; None for that of the section.
        name: In place of the source's, for messages and `one_dataset_per_batch`.
    """

    source: str
    split: str = "train"
    columns: dict[str, str] | None = None
    weight: float = 1.0
    instruction: str | None = None
    name: str | None = None


@dataclass
class PairArguments:
    """The image-text pairs for training and evaluation.

    Args:
        source: A folder, a CSV, JSONL or Parquet file, webdataset shards, a dataset id, or the name of the embedded
            sample; any source of `conjoin.data.load_pairs`.
        split: Training split.
        eval_source: Pairs for R@k during training; None for `source`, if `eval_split` is set.
        eval_split: Evaluation split; without this and `eval_source` there is no evaluation.
        image_column: Column of the images; None guesses it from common names.
        text_column: Column of the captions, likewise.
        id_column: Column of unique names, likewise; "" for row numbers.
        group_column: Column of what a row shows; rows of one group are not each other's negatives, and right answers
            in evaluation. None makes a group of the rows of one image.
        streaming: Read rows during training; needs `training.max_steps`.
        sources: Several streamed sources, mixed evenly by weight; they replace `source`.
        shuffle_window: Rows of each stream that are held and shuffled; 1 keeps their order.
        on_error: `raise` stops at a row that cannot be used; `skip` skips it, counts it and lists it in
            `skipped.jsonl` in `training.output_dir`. Evaluation rows always raise.

    Raises:
        ValueError: A field has an unknown value, or `sources` are not streamed.
    """

    source: str = SAMPLE_SOURCE
    split: str = "train"
    eval_source: str | None = None
    eval_split: str | None = None
    image_column: str | None = None
    text_column: str | None = None
    id_column: str | None = None
    group_column: str | None = None
    streaming: bool = False
    sources: tuple[SourceArguments, ...] = ()
    shuffle_window: int = 1000
    on_error: str = "raise"

    def __post_init__(self) -> None:
        check_on_error(self.on_error)
        if self.shuffle_window < 1:
            raise ValueError(f"data: shuffle_window={self.shuffle_window} must be at least 1")
        if self.sources and not self.has_queries and not self.streaming:
            raise ValueError("data: several sources of pairs are streamed; set streaming: true")

    @property
    def has_queries(self) -> bool:
        """Whether the rows are queries with candidates, not pairs."""
        return False

    @property
    def evaluates(self) -> bool:
        """Whether the recipe names evaluation rows."""
        return self.eval_source is not None or self.eval_split is not None

    def load(self) -> tuple[Any, Any]:
        """Load the training rows and the evaluation rows (or None)."""
        if self.streaming:
            train = self._stream()
        else:
            train = self._pairs(SourceArguments(self.source, self.split), skip=self.on_error == "skip")
        if not self.evaluates:
            return train, None
        return train, self._evaluation_rows()

    def _evaluation_rows(self) -> Any:  # noqa: ANN401 - a dataset
        """Load the evaluation rows.

        Raises:
            ValueError: Their source has no such split.
        """
        try:
            return self.load_rows(self.eval_source or self.source, self.eval_split or self.split)
        except SplitError as error:
            raise ValueError(
                f"data.eval_split: {error}; name one of its splits by --data.eval_split, other evaluation rows by "
                "--data.eval_source, or pass --data.eval_split null --training.eval_strategy no for no evaluation"
            ) from error

    def _stream(self) -> PairStream:
        """Open the training rows as a stream."""
        sources, skip = self.sources or (SourceArguments(self.source, self.split),), self.on_error == "skip"
        opened: dict[str, datasets.IterableDataset] = {}
        for each in sources:
            name = each.name or each.source
            if name in opened:
                raise ValueError(f"data: two sources are called {name!r}; give one of them another name")
            rows = self._pairs(each, streaming=True, skip=skip)
            opened[name] = rows.to_iterable_dataset() if isinstance(rows, datasets.Dataset) else rows
        return PairStream(opened, [each.weight for each in sources], self.shuffle_window, skip)

    def load_rows(self, source: str, split: str, streaming: bool = False) -> Any:  # noqa: ANN401 - a dataset
        """Load the rows of one source with the columns of this section."""
        return self._pairs(SourceArguments(source, split), streaming)

    def _pairs(self, source: SourceArguments, streaming: bool = False, skip: bool = False) -> Any:  # noqa: ANN401
        roles = ("image", "text", "id", "group")
        columns = {f"{role}_column": vars(self)[f"{role}_column"] for role in roles}
        if source.columns is not None:
            unknown = sorted(source.columns.keys() - {*roles})
            if unknown:
                raise ValueError(f"data: unknown roles {unknown} in columns of {source.source!r}; expected {roles}")
            columns = {f"{role}_column": source.columns.get(role) for role in roles}
        on_error = {"on_error": "skip"} if skip else {}
        return load_training_pairs(source.source, split=source.split, streaming=streaming, **columns, **on_error)


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
