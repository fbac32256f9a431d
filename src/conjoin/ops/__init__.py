"""Tensors in, tensors out: blockwise similarities and the gather across devices."""

from .contrastive import BLOCK_SIZE, cross_logsumexp, grouped_logsumexp, self_logsumexp
from .exclusion import Exclusion
from .gather import gather_with_gradient, is_distributed, local_positions, world_size
from .ring import ring_logsumexp

__all__ = [
    "BLOCK_SIZE",
    "Exclusion",
    "cross_logsumexp",
    "gather_with_gradient",
    "grouped_logsumexp",
    "is_distributed",
    "local_positions",
    "ring_logsumexp",
    "self_logsumexp",
    "world_size",
]
