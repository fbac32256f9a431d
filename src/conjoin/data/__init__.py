"""Data: fixed columns out of any source, the embedded sample, triplets and the collator."""

from conjoin.data.emoji_art import EMOJI_STYLES
from conjoin.data.emoji_names import EMOJI_LANGUAGES, EmojiConcept, emoji_concepts, split_of
from conjoin.data.emoji_sample import EMOJI_SPLITS, EmojiConfig, EmojiSample, load_emoji
from conjoin.data.sample_weights import (
    SAMPLE_VISION_LAYER,
    load_sample_text_tower,
    load_sample_vision_tower,
    sample_image_processor,
)

__all__ = [
    "EMOJI_LANGUAGES",
    "EMOJI_SPLITS",
    "EMOJI_STYLES",
    "SAMPLE_VISION_LAYER",
    "EmojiConcept",
    "EmojiConfig",
    "EmojiSample",
    "emoji_concepts",
    "load_emoji",
    "load_sample_text_tower",
    "load_sample_vision_tower",
    "sample_image_processor",
    "split_of",
]
