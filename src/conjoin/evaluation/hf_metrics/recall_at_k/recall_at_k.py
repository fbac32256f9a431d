"""`recall_at_k` for `evaluate.load`: a shell around `conjoin.evaluation.recall_at_k`."""

from typing import Any

import datasets
import evaluate

from conjoin.evaluation.metrics import recall_at_k

_INPUTS = """
Args:
    predictions: For each query the ids found, best first (strings).
    references: For each query the relevant ids (strings).
    k: Cut-off, 10 unless given.

Returns:
    {"recall_at_k": float}
"""


class RecallAtK(evaluate.Metric):
    """Mean fraction of the relevant ids of a query among the first k."""

    def _info(self) -> Any:  # noqa: ANN401 - the library is untyped
        ids = datasets.List(datasets.Value("string"))
        return evaluate.MetricInfo(
            description="Mean fraction of the relevant ids of a query among the first k.",
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": ids, "references": ids}),
        )

    def _compute(self, predictions: list[list[str]], references: list[list[str]], k: int = 10) -> dict[str, float]:
        return {"recall_at_k": recall_at_k(predictions, references, k)}
