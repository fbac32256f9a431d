"""Losses over embeddings: pure functions, and thin modules for the trainers."""

from .alignment import (
    AlignmentTerms,
    LocalScores,
    ScoreStatistics,
    alignment_terms,
    global_to_local_alignment,
)
from .contrastive import info_nce, mac, mac_hard_temperature, multi_positive, symmetric_info_nce
from .distillation import DISTILLATION_KINDS, global_distillation, local_distillation, self_distillation
from .generalized import MODALITIES, PAIRS, gcl
from .modules import ContrastiveLoss, GclLoss
from .temperature import Temperature

__all__ = [
    "DISTILLATION_KINDS",
    "MODALITIES",
    "PAIRS",
    "AlignmentTerms",
    "ContrastiveLoss",
    "GclLoss",
    "LocalScores",
    "ScoreStatistics",
    "Temperature",
    "alignment_terms",
    "gcl",
    "global_distillation",
    "global_to_local_alignment",
    "info_nce",
    "local_distillation",
    "mac",
    "mac_hard_temperature",
    "multi_positive",
    "self_distillation",
    "symmetric_info_nce",
]
