"""Tensors in, tensors out: blockwise similarities and the gather across devices."""

from .contrastive import BLOCK_SIZE, Exclusion, cross_logsumexp, self_logsumexp
from .gather import gather_with_gradient, is_distributed, local_positions

__all__ = [
    "BLOCK_SIZE",
    "Exclusion",
    "cross_logsumexp",
    "gather_with_gradient",
    "is_distributed",
    "local_positions",
    "self_logsumexp",
]
