"""The ranking metrics as `evaluate.Metric` classes, for code that already uses `evaluate`."""

from pathlib import Path
from typing import Any


def load_metric(name: str) -> Any:  # noqa: ANN401 - the library is untyped
    """Load `hit_rate_at_k`, `recall_at_k` or `mrr_at_k` by `evaluate.load`, without a network.

    Raises:
        ImportError: `evaluate` is not installed.
        FileNotFoundError: No metric of this name.
    """
    try:
        import evaluate
    except ImportError as error:
        raise ImportError('evaluate is not installed; run: pip install "conjoin[evaluate]"') from error
    return evaluate.load(str(Path(__file__).parent / name))
