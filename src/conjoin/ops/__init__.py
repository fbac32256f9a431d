"""Tensors in, tensors out: blockwise similarities and the gather across devices; and the choice of a device."""

from .contrastive import BLOCK_SIZE, cross_logsumexp, grouped_logsumexp, self_logsumexp
from .devices import choose_device
from .exclusion import Exclusion
from .gather import gather_with_gradient, is_distributed, local_positions, world_size
from .ring import ring_logsumexp

__all__ = [
    "BLOCK_SIZE",
    "Exclusion",
    "choose_device",
    "cross_logsumexp",
    "gather_with_gradient",
    "grouped_logsumexp",
    "is_distributed",
    "local_positions",
    "ring_logsumexp",
    "self_logsumexp",
    "world_size",
]
