"""Values that the options of the program list and the library checks, where naming them imports nothing."""

from typing import Literal, get_args

SAMPLE_MODEL = "sample"
"""The name of the towers of the embedded sample as a model."""
DTYPES = ("float32", "float16")
"""Types of stored vectors."""
ON_ERROR = ("raise", "skip")
"""What to do with a row that cannot be used."""
INDEX_KINDS = ("ivf_flat", "ivf_sq", "ivf_pq", "ivf_rq", "ivf_hnsw_flat", "ivf_hnsw_sq", "ivf_hnsw_pq")
"""Lance's indexes of vectors; the class of `ivf_flat` is `lancedb.index.IvfFlat`."""
RankBy = Literal["default", "vectors", "words"]
"""What a search ranks by: vectors and words, or one of them."""
RANKINGS = get_args(RankBy)
Role = Literal["query", "document"]
"""What an item is in a search."""
ROLE_PROMPTS: dict[Role, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}
"""The names of the prompts of a role, as in sentence-transformers: the first that a model has is its prompt."""
POOLINGS = ("mean", "cls", "last")
"""How the last states of a bare checkpoint become one vector."""
SOLAR_HEADS = "solar_loss.safetensors"
"""What SOLAR's stage 1 trained besides the encoder, in its folder: projection heads W and temperatures."""
