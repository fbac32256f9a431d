"""A ranking metric as a class for `evaluate.load`, shared by the scripts of this folder."""

from collections.abc import Callable
from typing import Any

import datasets
import evaluate

_INPUTS = (
    "predictions: for each query the ids found, best first; references: for each query the relevant ids; k: cut-off, "
    "by default 10. Returns a float by the name of the metric."
)


def ranking_metric(metric: Callable[..., float]) -> Any:  # noqa: ANN401 - the library is untyped
    """Make a class of `metric(ranked_ids, relevant_ids, k)`."""

    class RankingMetric(evaluate.Metric):
        def _info(self) -> Any:  # noqa: ANN401
            ids = datasets.List(datasets.Value("string"))
            features = datasets.Features({"predictions": ids, "references": ids})
            described = str(metric.__doc__)
            return evaluate.MetricInfo(
                description=described, citation="", inputs_description=_INPUTS, features=features
            )

        def _compute(self, predictions: list[list[str]], references: list[list[str]], k: int = 10) -> dict[str, float]:
            return {metric.__name__: metric(predictions, references, k)}

    RankingMetric.__name__ = metric.__name__  # the library derives its name and its files from it
    return RankingMetric
