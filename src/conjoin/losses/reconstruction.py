"""Reconstruction of the tokens of an item: errors of predicted embeddings, cross-entropy over a vocabulary."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .checks import check_length, check_matrix, widen
from .gather import gather_with_gradient

LOGIT_BYTES = 2**27
"""Logits in memory at once, in bytes: 128 MiB, 232 positions of a vocabulary of 151,936 in float32."""


def embedding_reconstruction(predicted: Tensor, original: Tensor, kind: str = "mean") -> Tensor:
    """Squared error of each predicted embedding.

    Args:
        predicted: `(P, D)`; P may be 0.
        original: `(P, D)`; no gradient flows to it.
        kind: `mean` over the dimensions, or their sum, the `squared_norm` (Coral Eq. 5).

    Returns:
        `(P,)` errors.

    Raises:
        ValueError: The shapes differ, or the kind is unknown.
    """
    if kind not in ("mean", "squared_norm"):
        raise ValueError(f"kind={kind!r}; expected mean or squared_norm")
    if predicted.ndim != 2 or predicted.shape != original.shape:
        raise ValueError(f"predicted has shape {tuple(predicted.shape)}, original {tuple(original.shape)}")
    errors = (widen(predicted) - widen(original.detach())).square()
    return errors.mean(1) if kind == "mean" else errors.sum(1)


def token_reconstruction(states: Tensor, table: Tensor, ids: Tensor, *, logit_bytes: int = LOGIT_BYTES) -> Tensor:
    """Cross-entropy of each token under `softmax(states @ table.T)`.

    The logits are computed in blocks of positions, and again in the backward pass. About three blocks are in memory at
    once (logits, their softmax and its gradient), for any number of positions.

    Args:
        states: `(P, D)`; P may be 0.
        table: `(V, D)` output embeddings, with gradient if they are trained.
        ids: `(P,)` the tokens.
        logit_bytes: Size of a block.

    Returns:
        `(P,)` negative log-likelihoods.

    Raises:
        ValueError: Shapes do not fit, or `logit_bytes` is not positive.
    """
    check_matrix(table, "table")
    check_length(ids, "ids", len(states))
    if states.ndim != 2 or states.shape[1] != table.shape[1] or logit_bytes < 1:
        raise ValueError(f"states {tuple(states.shape)}, table {tuple(table.shape)}, logit_bytes={logit_bytes}")
    element = 8 if table.dtype == torch.float64 else 4
    positions = max(1, logit_bytes // (element * len(table)))
    blocks = [
        checkpoint(_cross_entropy, *block, table, use_reentrant=False, preserve_rng_state=False)
        for block in zip(states.split(positions), ids.split(positions), strict=True)
    ]
    return torch.cat(blocks)


def _cross_entropy(states: Tensor, ids: Tensor, table: Tensor) -> Tensor:
    return F.cross_entropy(widen(F.linear(states.to(table.dtype), table)), ids, reduction="none")


def mean_over_rows(values: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Average the values of each row.

    Args:
        values: `(P,)` the values where `valid` holds, in order.
        valid: `(N, Q)` bool, with P true entries.

    Returns:
        `(N,)` means, 0 for a row without values, and `(N,)` whether a row has any.

    Raises:
        ValueError: The numbers of values differ.
    """
    check_length(values, "values", int(valid.sum()))
    placed = values.new_zeros(valid.shape).masked_scatter(valid, values)
    return placed.sum(1) / valid.sum(1).clamp(min=1), valid.any(1)


def mean_over_devices(rows: Tensor, present: Tensor) -> Tensor:
    """Average rows over all devices, which may have different numbers of them; 0 without any.

    The average over devices of the results, and of their gradients, is that of one device with all rows.

    Args:
        rows: `(N,)`.
        present: `(N,)` bool, the rows that count.
    """
    counts = gather_with_gradient(present.sum()[None].to(rows.dtype))
    return (rows * present).sum() * len(counts) / counts.sum().clamp(min=1)
