"""Compact vectors: fewer numbers (Matryoshka) and smaller numbers (int8, one bit).

A vector of length 1 needs no scale: its numbers are stored up to a factor, and normalising removes the factor. A query
stays float32, so every score is the inner product of a float query and an unpacked vector.
"""

import numpy as np

DTYPES = ("float32", "float16", "int8", "binary")
"""How stores and the exact index hold numbers."""
COMPACT = ("int8", "binary")
"""Those that are unpacked on reading."""
_LARGEST = 127


def pack(vectors: np.ndarray, dtype: str) -> np.ndarray:
    """Pack vectors.

    Args:
        vectors: `(N, D)`, float, L2-normalised.
        dtype: One of `DTYPES`. `"int8"`: `round(127 x / max|x|)`, the maximum over the vector. `"binary"`: the sign of
            each number, eight in a byte.

    Returns:
        `(N, D)` of that type, or for `"binary"` `(N, ceil(D / 8))` uint8.
    """
    if dtype == "int8":
        largest = np.abs(vectors).max(axis=1, keepdims=True).astype(np.float32)
        return np.rint(np.asarray(vectors, dtype=np.float32) * (_LARGEST / largest)).astype(np.int8)
    if dtype == "binary":
        return np.packbits(np.asarray(vectors) > 0, axis=1)
    return np.asarray(vectors).astype(dtype)


def unpack(packed: np.ndarray, dtype: str, dimension: int) -> np.ndarray:
    """The vectors `(N, D)` that `pack` packed: float32, L2-normalised; those of float types as they are."""
    if dtype == "int8":
        return normalise(packed.astype(np.float32))
    if dtype == "binary":
        bits = np.unpackbits(packed, axis=1, count=dimension).astype(np.float32)
        return (2 * bits - 1) / np.float32(np.sqrt(dimension))
    return packed


def truncate(vectors: np.ndarray, dims: int) -> np.ndarray:
    """The `dims` leading numbers of vectors `(N, D)`, L2-normalised again, float32."""
    return normalise(np.asarray(vectors[:, :dims], dtype=np.float32))


def check_dims(dims: int, dimension: int, name: str) -> None:
    """Make sure that vectors can be truncated.

    Args:
        dims: To this length.
        dimension: Their length.
        name: What has them, in the message.

    Raises:
        ValueError: `dims` is not from 1 to `dimension`.
    """
    if not 1 <= dims <= dimension:
        raise ValueError(f"dims must be from 1 to {dimension}, the dimension of {name}, got {dims}")


def normalise(vectors: np.ndarray) -> np.ndarray:
    """Vectors of length 1; a zero vector, which has no direction, stays zero."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
