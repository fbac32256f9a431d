from conjoin.data.arguments import DataArguments as DataArguments
from conjoin.data.augment import augment_image as augment_image
from conjoin.data.batch_sampler import RetrievalBatchSampler as RetrievalBatchSampler
from conjoin.data.collators import (
    MODALITY_IDS as MODALITY_IDS,
    PairCollator as PairCollator,
    RetrievalCollator as RetrievalCollator,
    name_rows as name_rows,
)
from conjoin.data.columns import TableColumns as TableColumns, guess_columns as guess_columns
from conjoin.data.emoji.sample import (
    EMOJI_LANGUAGES as EMOJI_LANGUAGES,
    EMOJI_SPLITS as EMOJI_SPLITS,
    emoji_concepts as emoji_concepts,
    load_emoji as load_emoji,
    split_of as split_of,
)
from conjoin.data.emoji.triplets import symmetric_triplets as symmetric_triplets
from conjoin.data.emoji.weights import (
    SAMPLE_VISION_LAYER as SAMPLE_VISION_LAYER,
    load_sample_text_tower as load_sample_text_tower,
    load_sample_vision_tower as load_sample_vision_tower,
    sample_image_processor as sample_image_processor,
)
from conjoin.data.generate.ask import ask_with as ask_with
from conjoin.data.generate.composition.catalogue import Catalogue as Catalogue, read_catalogue as read_catalogue
from conjoin.data.generate.composition.compose import (
    Case as Case,
    compose_queries as compose_queries,
    judge_by_titles as judge_by_titles,
)
from conjoin.data.generate.composition.instructions import load_templates as load_templates
from conjoin.data.generate.composition.samplers import SAMPLERS as SAMPLERS, CompositionSettings as CompositionSettings
from conjoin.data.generate.construction.symmetric import (
    EDITS as EDITS,
    Edited as Edited,
    construct_symmetric as construct_symmetric,
)
from conjoin.data.json_files import JsonLines as JsonLines
from conjoin.data.mbeir import (
    MBEIR_CELLS as MBEIR_CELLS,
    MbeirCandidates as MbeirCandidates,
    MbeirCell as MbeirCell,
    MbeirTraining as MbeirTraining,
    find_cells as find_cells,
    load_instructions as load_instructions,
    mbeir_queries as mbeir_queries,
)
from conjoin.data.merit import (
    OOD_VALUES as OOD_VALUES,
    PRODUCT_FEATURES as PRODUCT_FEATURES,
    MeritItems as MeritItems,
    MeritProduct as MeritProduct,
    MeritProducts as MeritProducts,
    MeritQuery as MeritQuery,
    MeritQueryRows as MeritQueryRows,
    MeritTraining as MeritTraining,
    merit_queries as merit_queries,
)
from conjoin.data.pair_sources import SAMPLE_SOURCE as SAMPLE_SOURCE
from conjoin.data.pairs import PAIR_FEATURES as PAIR_FEATURES, load_pairs as load_pairs
from conjoin.data.queries import (
    QUERY_FORMATS as QUERY_FORMATS,
    QueryMix as QueryMix,
    QueryTable as QueryTable,
    mmeb_training as mmeb_training,
)
from conjoin.data.query_rows import Candidate as Candidate, QueryDataset as QueryDataset, QueryRow as QueryRow
from conjoin.data.row_checks import (
    Skipped as Skipped,
    SkippedFile as SkippedFile,
    without_problems as without_problems,
)
from conjoin.data.row_images import allow_root as allow_root
from conjoin.data.training_rows import EpochRows as EpochRows
from conjoin.data.triplets import TRIPLET_FEATURES as TRIPLET_FEATURES, load_triplets as load_triplets
