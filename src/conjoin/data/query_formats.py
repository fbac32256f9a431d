"""The published formats of queries and candidates that a recipe's `data.format` can name."""

from collections.abc import Callable
from typing import Any, NamedTuple

from conjoin.data.mbeir.rows import MbeirTraining
from conjoin.data.merit.rows import MeritTraining
from conjoin.data.nli import load_nli
from conjoin.data.pair_sources import SplitError


class QueryFormat(NamedTuple):
    """How to read one format.

    Args:
        load: Takes `source`, `split`, `hard_negatives` and the options; returns rows for `RetrievalCollator`.
        options: Fields of the section `data` that only some formats have.
        benchmark: Name of the benchmark that evaluates it, where evaluation during training cannot.
    """

    load: Callable[..., Any]
    options: tuple[str, ...] = ()
    benchmark: str | None = None


def _load_mbeir(source: str, *, split: str, datasets: tuple[str, ...], **options: Any) -> MbeirTraining:  # noqa: ANN401
    """Load all training queries, or those of some datasets.

    Raises:
        ValueError: Another split is asked for.
    """
    if split != "train":
        raise SplitError(split, "format mbeir")
    return MbeirTraining(source, datasets=datasets or None, **options)


QUERY_FORMATS = {
    "nli": QueryFormat(load_nli, ("columns",)),
    "mbeir": QueryFormat(_load_mbeir, ("datasets", "instructions"), benchmark="mbeir"),
    "merit": QueryFormat(MeritTraining, ("ood",)),
}
