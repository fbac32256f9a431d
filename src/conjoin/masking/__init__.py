"""Which tokens image and text share: threshold, evolutionary mask, segments and the samples made by masking."""

from .evolutionary import SCHEDULES, evolutionary_mask, local_scores, mask_schedule
from .samples import ROLES, ConstructedSamples, construct_samples, mask_pixels
from .segments import segment_patches
from .threshold import Threshold, qda_threshold

__all__ = [
    "ROLES",
    "SCHEDULES",
    "ConstructedSamples",
    "Threshold",
    "construct_samples",
    "evolutionary_mask",
    "local_scores",
    "mask_pixels",
    "mask_schedule",
    "qda_threshold",
    "segment_patches",
]
