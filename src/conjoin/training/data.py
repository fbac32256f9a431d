"""The recipe section `data` for image-text pairs."""

from dataclasses import dataclass
from typing import Any

from conjoin.data import SAMPLE_SOURCE, load_training_pairs


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
        train = self.load_rows(self.source, self.split, self.streaming)
        if not self.evaluates:
            return train, None
        return train, self.load_rows(self.eval_source or self.source, self.eval_split or self.split)

    def load_rows(self, source: str, split: str, streaming: bool = False) -> Any:  # noqa: ANN401 - a dataset
        """Load the rows of one source with the columns of this section."""
        return load_training_pairs(
            source,
            image_column=self.image_column,
            text_column=self.text_column,
            id_column=self.id_column,
            group_column=self.group_column,
            split=split,
            streaming=streaming,
        )
