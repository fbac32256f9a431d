"""Data: fixed columns out of any source, the embedded sample, triplets and the collator."""

from conjoin.data.augment import ImageAugmentation
from conjoin.data.collator import ItemCollator, ItemProcessor
from conjoin.data.edit_triplets import EDIT_FEATURES, Edit, edit_triplets, find_edits
from conjoin.data.emoji_art import EMOJI_STYLES
from conjoin.data.emoji_names import EMOJI_LANGUAGES, EmojiConcept, emoji_concepts, split_of
from conjoin.data.emoji_sample import EMOJI_SPLITS, EmojiConfig, EmojiSample, load_emoji
from conjoin.data.pair_sources import AnyDataset, PairSource
from conjoin.data.pairs import COMMON_COLUMNS, PAIR_FEATURES, load_pairs
from conjoin.data.sample_weights import (
    SAMPLE_VISION_LAYER,
    load_sample_text_tower,
    load_sample_vision_tower,
    sample_image_processor,
)
from conjoin.data.triplets import TRIPLET_FEATURES, load_triplets, symmetric_triplets

__all__ = [
    "COMMON_COLUMNS",
    "EDIT_FEATURES",
    "EMOJI_LANGUAGES",
    "EMOJI_SPLITS",
    "EMOJI_STYLES",
    "PAIR_FEATURES",
    "SAMPLE_VISION_LAYER",
    "TRIPLET_FEATURES",
    "AnyDataset",
    "Edit",
    "EmojiConcept",
    "EmojiConfig",
    "EmojiSample",
    "ImageAugmentation",
    "ItemCollator",
    "ItemProcessor",
    "PairSource",
    "edit_triplets",
    "emoji_concepts",
    "find_edits",
    "load_emoji",
    "load_pairs",
    "load_sample_text_tower",
    "load_sample_vision_tower",
    "load_triplets",
    "sample_image_processor",
    "split_of",
    "symmetric_triplets",
]
