"""What every loss checks before it computes."""

import torch
from torch import Tensor


def unit(embeddings: Tensor, name: str) -> Tensor:
    """Normalise the last dimension in at least float32.

    Raises:
        ValueError: A vector is zero, NaN or infinite; the message names the first such row.
    """
    embeddings = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
    norms = embeddings.norm(dim=-1)
    usable = norms.isfinite() & (norms > 0)
    if not usable.all():
        row = (~usable).nonzero()[0].tolist()
        where = row[0] if len(row) == 1 else tuple(row)
        raise ValueError(
            f"{name}[{where}] has norm {norms[tuple(row)].item()}; expected a finite vector that is not zero"
        )
    return embeddings / norms[..., None]


def inverse(temperature: Tensor | float, name: str = "temperature") -> Tensor | float:
    """1 / temperature.

    Raises:
        ValueError: It is not a positive finite scalar.
    """
    if isinstance(temperature, Tensor) and temperature.numel() != 1:
        raise ValueError(f"{name} must be one number, got a tensor of shape {tuple(temperature.shape)}")
    value = float(torch.as_tensor(temperature).detach())
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a positive number, got {value}")
    return 1 / temperature


def check_matrix(embeddings: Tensor, name: str, like: Tensor | None = None, same_rows: bool = False) -> None:
    """Check that `embeddings` is `(N, D)` and fits `like`.

    Raises:
        ValueError: Wrong number of dimensions, widths or rows; the message gives both shapes.
    """
    if embeddings.ndim != 2 or not len(embeddings):
        raise ValueError(f"{name} must be (N, D) with N > 0, got shape {tuple(embeddings.shape)}")
    if like is not None and (embeddings.shape[1] != like.shape[1] or (same_rows and len(embeddings) != len(like))):
        expected = tuple(like.shape) if same_rows else ("M", like.shape[1])
        raise ValueError(f"{name} has shape {tuple(embeddings.shape)}, expected {expected}")


def check_length(values: Tensor, name: str, length: int) -> None:
    """Check that `values` is `(length,)`.

    Raises:
        ValueError: It is not.
    """
    if values.shape != (length,):
        raise ValueError(f"{name} has shape {tuple(values.shape)}, expected ({length},)")
