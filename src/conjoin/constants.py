"""Values that the options of the program list and the library checks, where naming them imports nothing."""

from dataclasses import field
from typing import Any

AUTO = "auto"
"""Precision: bfloat16 where the hardware computes faster in it."""
SAMPLE_MODEL = "sample"
"""The name of the towers of the embedded sample as a model."""
DTYPES = ("float32", "float16")
"""Types of stored vectors."""
ON_ERROR = ("raise", "skip")
"""What to do with a row that cannot be used."""
INDEX_KINDS = {
    "ivf_flat": "IvfFlat",
    "ivf_sq": "IvfSq",
    "ivf_pq": "IvfPq",
    "ivf_rq": "IvfRq",
    "ivf_hnsw_flat": "IvfHnswFlat",
    "ivf_hnsw_sq": "IvfHnswSq",
    "ivf_hnsw_pq": "IvfHnswPq",
}
"""Lance's indexes of vectors: the names that Lance gives them, and their classes in `lancedb.index`."""
POOLINGS = ("mean", "cls", "last")
"""How the last states of a bare checkpoint become one vector."""
INPUT_TYPES = ("seq", "cat", "avg")
"""Those of `conjoin.processing`, which travels with checkpoints and imports nothing."""
READOUTS = ("fused", "sum")
"""Those of `conjoin.models.joint_encoder`, likewise."""


def option(default: Any, flag: str, **settings: Any) -> Any:  # noqa: ANN401 - a field of any type
    """A field of a dataclass that is also a flag of the program; `settings` as for `ArgumentParser.add_argument`."""
    return field(default=default, metadata={"flag": flag, **settings})
