"""The recipe section `data` for image-text pairs."""

from dataclasses import dataclass
from typing import Any

import datasets

from conjoin.data import SAMPLE_SOURCE, PairStream, load_training_pairs
from conjoin.data.pair_sources import SplitError
from conjoin.data.skipped import check_on_error


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
