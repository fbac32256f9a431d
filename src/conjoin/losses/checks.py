"""What every loss checks before it computes, and what it excludes by ids and positions."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .gather import gather_with_gradient
from .kernel import Exclusion


def widen(embeddings: Tensor) -> Tensor:
    """At least float32."""
    return embeddings if embeddings.dtype == torch.float64 else embeddings.float()


def unit(embeddings: Tensor, name: str) -> Tensor:
    """Normalise the last dimension in at least float32.

    Raises:
        ValueError: A vector is zero, NaN or infinite; the message names the first such row.
    """
    return _Unit.apply(widen(embeddings), name)


class _Unit(torch.autograd.Function):
    """Normalisation, with the gradient of `x / |x|` as autograd computes it, in fewer passes over the vectors."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, name: str) -> Tensor:  # noqa: ANN401
        norms = vectors.norm(dim=-1, keepdim=True)
        check_norms(norms[..., 0], name)
        units = vectors / norms
        ctx.save_for_backward(units, norms)
        return units

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        units, norms = ctx.saved_tensors
        buffer = units / norms
        norm_grad = buffer.mul_(grad).sum(-1, keepdim=True)
        torch.mul(units, norm_grad, out=buffer)
        return (grad / norms).sub_(buffer), None


def check_norms(norms: Tensor, name: str) -> Tensor:
    """Return `norms` `(...)` if vectors of such norms can be normalised.

    Raises:
        ValueError: A norm is zero, NaN or infinite; the message names the first such row.
    """
    usable = norms.isfinite() & (norms > 0)
    if not usable.all():
        row = (~usable).nonzero()[0].tolist()
        where = row[0] if len(row) == 1 else tuple(row)
        raise ValueError(
            f"{name}[{where}] has norm {norms[tuple(row)].item()}; expected a finite vector that is not zero"
        )
    return norms


def fill_masked(embeddings: Tensor, mask: Tensor, name: str) -> Tensor:
    """`(..., D)` in at least float32, a constant in place of the vectors where `mask` `(...)` does not hold.

    Those may hold anything then: no NaN enters the gradient.

    Raises:
        ValueError: The mask has another shape.
    """
    if mask.shape != embeddings.shape[:-1]:
        raise ValueError(f"the mask of {name} has shape {tuple(mask.shape)}, expected {tuple(embeddings.shape[:-1])}")
    embeddings, kept = widen(embeddings), mask.bool()
    return embeddings if kept.all() else torch.where(kept[..., None], embeddings, 1.0)


def inverse(temperature: Tensor | float, name: str = "temperature") -> Tensor | float:
    """1 / temperature; 0-d if it is a tensor.

    Raises:
        ValueError: It is not a positive finite scalar.
    """
    if isinstance(temperature, Tensor) and temperature.numel() != 1:
        raise ValueError(f"{name} must be one number, got a tensor of shape {tuple(temperature.shape)}")
    value = float(torch.as_tensor(temperature).detach())
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a positive number, got {value}")
    return 1 / (temperature.reshape(()) if isinstance(temperature, Tensor) else temperature)


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


def check_local(vectors: Tensor, name: str, like: Tensor) -> None:
    """Check that `vectors` is `(N, K, D)` for `like` `(N, D)`.

    Raises:
        ValueError: It is not; the message gives its shape.
    """
    if vectors.ndim != 3 or vectors.shape[0] != len(like) or vectors.shape[2] != like.shape[1]:
        raise ValueError(f"{name} has shape {tuple(vectors.shape)}, expected ({len(like)}, *, {like.shape[1]})")


def check_length(values: Tensor, name: str, length: int) -> None:
    """Check that `values` is `(length,)`.

    Raises:
        ValueError: It is not.
    """
    if values.shape != (length,):
        raise ValueError(f"{name} has shape {tuple(values.shape)}, expected ({length},)")


def own_columns(columns: Tensor, count: int, positions: Tensor | None) -> Tensor:
    """The column `(count, ...)` at each row's position, the first ones by default."""
    if positions is not None:
        return columns.index_select(0, positions)
    return columns if len(columns) == count else columns[:count]


def exclude_own(columns: Tensor, count: int, positions: Tensor | None, ids: Tensor | None, name: str) -> Exclusion:
    """Exclude each row's own column and, with `ids`, all columns of the same id, or of one of the same ids.

    Args:
        columns: `(M, D)`.
        count: How many rows there are.
        positions: `(count,)` the index of each row's own column; the row's index by default.
        ids: `(M,)` integers naming what each column shows, or several `(M, A)`; all different by default.
        name: Of the rows, in messages.

    Raises:
        ValueError: A row has no column, or there is not one id per column.
    """
    if positions is not None:
        check_length(positions, "positions", count)
        if positions.min() < 0 or positions.max() >= len(columns):
            raise ValueError(f"positions lie in [{positions.min()}, {positions.max()}] of {len(columns)} columns")
    elif len(columns) < count:
        raise ValueError(f"{count} {name} but only {len(columns)} columns, and no positions among them")
    if ids is not None:
        several = ids.T if ids.ndim > 1 else [ids]
        check_length(several[0], f"ids of {name}", len(columns))
        return Exclusion(labels=tuple((own_columns(each, count, positions), each) for each in several))
    if positions is None:
        return Exclusion(diagonals=(0,))
    return Exclusion(labels=((positions, torch.arange(len(columns), device=columns.device)),))


def loss_metrics(temperature: Tensor, ids: Tensor | None) -> dict[str, Tensor]:
    """The temperature and, with `ids` `(N,)`, how many other rows of all devices share a row's id on average."""
    metrics = {"temperature": temperature.detach()}
    if ids is not None:
        counts = gather_with_gradient(ids).unique(return_counts=True)[1]
        metrics["masked_negatives"] = (counts * (counts - 1)).sum() / counts.sum()
    return metrics
