"""Losses over embeddings: pure functions, and thin modules for the trainers."""

from .contrastive import info_nce, mac, mac_hard_temperature, multi_positive, symmetric_info_nce
from .generalized import MODALITIES, PAIRS, gcl
from .modules import ContrastiveLoss, GclLoss
from .temperature import Temperature

__all__ = [
    "MODALITIES",
    "PAIRS",
    "ContrastiveLoss",
    "GclLoss",
    "Temperature",
    "gcl",
    "info_nce",
    "mac",
    "mac_hard_temperature",
    "multi_positive",
    "symmetric_info_nce",
]
