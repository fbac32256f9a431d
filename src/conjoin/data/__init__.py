"""Data: fixed columns out of any source, the embedded sample, triplets and the collator."""

from conjoin.data.sample_weights import (
    SAMPLE_VISION_LAYER,
    load_sample_text_tower,
    load_sample_vision_tower,
    sample_image_processor,
)

__all__ = [
    "SAMPLE_VISION_LAYER",
    "load_sample_text_tower",
    "load_sample_vision_tower",
    "sample_image_processor",
]
