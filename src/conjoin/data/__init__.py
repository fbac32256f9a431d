"""Data: fixed columns out of any source, the embedded sample, triplets and the collator."""

from conjoin.data.augment import ImageAugmentation
from conjoin.data.batch_sampler import RetrievalBatchSampler
from conjoin.data.collator import ItemCollator, ItemProcessor
from conjoin.data.construction_models import describe_with, edit_with, synthesise_with
from conjoin.data.edit_triplets import EDIT_FEATURES, Edit, edit_triplets, find_edits
from conjoin.data.emoji_art import EMOJI_STYLES
from conjoin.data.emoji_names import EMOJI_LANGUAGES, EmojiConcept, emoji_concepts, split_of
from conjoin.data.emoji_sample import EMOJI_SPLITS, EmojiConfig, EmojiSample, load_emoji
from conjoin.data.json_lines import JsonLines
from conjoin.data.mbeir import MbeirCandidates, MbeirTraining, mbeir_queries
from conjoin.data.mbeir_layout import (
    MBEIR_CELLS,
    MBEIR_DATASETS,
    MBEIR_TASKS,
    MbeirCell,
    find_cells,
    load_instructions,
)
from conjoin.data.mini_mbeir import make_mini_mbeir
from conjoin.data.nli import NLI_COLUMNS, NLI_FEATURES, load_nli
from conjoin.data.pair_sources import AnyDataset, PairSource
from conjoin.data.pairs import COMMON_COLUMNS, PAIR_FEATURES, load_pairs
from conjoin.data.retrieval_collator import (
    MODALITY_IDS,
    RetrievalCollator,
    prefixed,
    process_queries,
    takes_instruction,
)
from conjoin.data.review_sheet import write_review_sheet
from conjoin.data.sample_weights import (
    SAMPLE_VISION_LAYER,
    load_sample_language_model,
    load_sample_text_tower,
    load_sample_vision_tower,
    sample_image_processor,
)
from conjoin.data.symmetric_construction import assemble_triplets, construct_symmetric
from conjoin.data.triplets import TRIPLET_FEATURES, load_triplets, symmetric_triplets

__all__ = [
    "COMMON_COLUMNS",
    "EDIT_FEATURES",
    "EMOJI_LANGUAGES",
    "EMOJI_SPLITS",
    "EMOJI_STYLES",
    "MBEIR_CELLS",
    "MBEIR_DATASETS",
    "MBEIR_TASKS",
    "MODALITY_IDS",
    "NLI_COLUMNS",
    "NLI_FEATURES",
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
    "JsonLines",
    "MbeirCandidates",
    "MbeirCell",
    "MbeirTraining",
    "PairSource",
    "RetrievalBatchSampler",
    "RetrievalCollator",
    "assemble_triplets",
    "construct_symmetric",
    "describe_with",
    "edit_triplets",
    "edit_with",
    "emoji_concepts",
    "find_cells",
    "find_edits",
    "load_emoji",
    "load_instructions",
    "load_nli",
    "load_pairs",
    "load_sample_language_model",
    "load_sample_text_tower",
    "load_sample_vision_tower",
    "load_triplets",
    "make_mini_mbeir",
    "mbeir_queries",
    "prefixed",
    "process_queries",
    "sample_image_processor",
    "split_of",
    "symmetric_triplets",
    "synthesise_with",
    "takes_instruction",
    "write_review_sheet",
]
