from conjoin.methods.solar.masking.evolutionary import (
    evolutionary_mask as evolutionary_mask,
    mask_schedule as mask_schedule,
)
from conjoin.methods.solar.masking.samples import (
    ROLES as ROLES,
    ConstructedSamples as ConstructedSamples,
    construct_samples as construct_samples,
    mask_pixels as mask_pixels,
)
from conjoin.methods.solar.masking.segments import segment_patches as segment_patches
from conjoin.methods.solar.masking.threshold import Threshold as Threshold, qda_threshold as qda_threshold
