"""Values that the options of the program list and the library checks, where naming them imports nothing."""

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
SOLAR_HEADS = "solar_loss.safetensors"
"""What SOLAR's stage 1 trained besides the encoder, in its folder: projection heads W and temperatures."""
