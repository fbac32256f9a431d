from conjoin.data import (
    MbeirCandidates as MbeirCandidates,
    MbeirTraining as MbeirTraining,
    MeritProducts as MeritProducts,
    MeritTraining as MeritTraining,
    RetrievalCollator as RetrievalCollator,
    load_emoji as load_emoji,
    load_pairs as load_pairs,
    load_triplets as load_triplets,
    mbeir_queries as mbeir_queries,
    merit_queries as merit_queries,
    symmetric_triplets as symmetric_triplets,
)
from conjoin.evaluation import analyse_mllm as analyse_mllm, compare as compare, evaluate as evaluate
from conjoin.hub import (
    export as export,
    from_backbones as from_backbones,
    from_clip as from_clip,
    from_mllm as from_mllm,
    load_model as load_model,
)
from conjoin.losses import (
    gcl as gcl,
    info_nce as info_nce,
    mac as mac,
    multi_positive as multi_positive,
    symmetric_info_nce as symmetric_info_nce,
)
from conjoin.models.joint_encoder import (
    JointEncoderConfig as JointEncoderConfig,
    JointEncoderModel as JointEncoderModel,
)
from conjoin.models.mllm_retriever import (
    MllmRetrieverConfig as MllmRetrieverConfig,
    MllmRetrieverModel as MllmRetrieverModel,
)
from conjoin.models.score_fusion import ScoreFusionConfig as ScoreFusionConfig, ScoreFusionModel as ScoreFusionModel
from conjoin.models.token_fusion import TokenFusionConfig as TokenFusionConfig, TokenFusionModel as TokenFusionModel
from conjoin.processing import (
    ImageTextProcessor as ImageTextProcessor,
    MllmRetrieverProcessor as MllmRetrieverProcessor,
)
from conjoin.retrieval import (
    Collection as Collection,
    Hit as Hit,
    ItemEncoder as ItemEncoder,
    encode_collection as encode_collection,
    load_encoder as load_encoder,
    load_mined as load_mined,
    mine_hard_negatives as mine_hard_negatives,
    open_collection as open_collection,
    search_items as search_items,
)
from conjoin.trainers import (
    ContrastiveConfig as ContrastiveConfig,
    ContrastiveTrainer as ContrastiveTrainer,
    CoralConfig as CoralConfig,
    CoralTrainer as CoralTrainer,
    GclConfig as GclConfig,
    GclTrainer as GclTrainer,
    PumaStage1Config as PumaStage1Config,
    PumaStage1Trainer as PumaStage1Trainer,
    PumaStage2Config as PumaStage2Config,
    PumaStage2Trainer as PumaStage2Trainer,
    QueryCandidateConfig as QueryCandidateConfig,
    QueryCandidateTrainer as QueryCandidateTrainer,
    QueryContrastiveTrainer as QueryContrastiveTrainer,
    RetrievalConfig as RetrievalConfig,
    RetrievalTrainer as RetrievalTrainer,
    SolarStage1Config as SolarStage1Config,
    SolarStage1Trainer as SolarStage1Trainer,
    SolarStage2Config as SolarStage2Config,
    SolarStage2Trainer as SolarStage2Trainer,
    explain_pair as explain_pair,
    load_recipe as load_recipe,
    train as train,
)
from conjoin.trainers.compress import compress as compress
from conjoin.trainers.compress_options import CompressOptions as CompressOptions

__version__: str
