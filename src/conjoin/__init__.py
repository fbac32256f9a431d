"""conjoin: any item (text, image, interleaved) in, one comparable vector out."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names as in _EXPORTS, for editors and type checkers
    from conjoin.data import MbeirCandidates as MbeirCandidates
    from conjoin.data import MbeirTraining as MbeirTraining
    from conjoin.data import RetrievalCollator as RetrievalCollator
    from conjoin.data import load_emoji as load_emoji
    from conjoin.data import load_nli as load_nli
    from conjoin.data import load_pairs as load_pairs
    from conjoin.data import load_triplets as load_triplets
    from conjoin.data import make_mini_mbeir as make_mini_mbeir
    from conjoin.data import mbeir_queries as mbeir_queries
    from conjoin.data import symmetric_triplets as symmetric_triplets
    from conjoin.evaluation import evaluate_combinations as evaluate_combinations
    from conjoin.evaluation import evaluate_mbeir as evaluate_mbeir
    from conjoin.evaluation import evaluate_symmetric as evaluate_symmetric
    from conjoin.evaluation import evaluate_triplets as evaluate_triplets
    from conjoin.evaluation import explain_pair as explain_pair
    from conjoin.evaluation import render_report as render_report
    from conjoin.hub import export as export
    from conjoin.losses import gcl as gcl
    from conjoin.losses import info_nce as info_nce
    from conjoin.losses import mac as mac
    from conjoin.losses import multi_positive as multi_positive
    from conjoin.losses import symmetric_info_nce as symmetric_info_nce
    from conjoin.models.joint_encoder import JointEncoderConfig as JointEncoderConfig
    from conjoin.models.joint_encoder import JointEncoderModel as JointEncoderModel
    from conjoin.models.mllm_retriever import MllmRetrieverConfig as MllmRetrieverConfig
    from conjoin.models.mllm_retriever import MllmRetrieverModel as MllmRetrieverModel
    from conjoin.models.score_fusion import ScoreFusionConfig as ScoreFusionConfig
    from conjoin.models.score_fusion import ScoreFusionModel as ScoreFusionModel
    from conjoin.models.token_fusion import TokenFusionConfig as TokenFusionConfig
    from conjoin.models.token_fusion import TokenFusionModel as TokenFusionModel
    from conjoin.processing import ImageTextProcessor as ImageTextProcessor
    from conjoin.processing import MllmRetrieverProcessor as MllmRetrieverProcessor
    from conjoin.retrieval import ItemEncoder as ItemEncoder
    from conjoin.retrieval import build_index as build_index
    from conjoin.retrieval import encode_corpus as encode_corpus
    from conjoin.retrieval import load_index as load_index
    from conjoin.retrieval import load_mined as load_mined
    from conjoin.retrieval import mine_hard_negatives as mine_hard_negatives
    from conjoin.retrieval import search_items as search_items
    from conjoin.training import ContrastiveConfig as ContrastiveConfig
    from conjoin.training import ContrastiveTrainer as ContrastiveTrainer
    from conjoin.training import GclConfig as GclConfig
    from conjoin.training import GclTrainer as GclTrainer
    from conjoin.training import JointEncoderStage1Config as JointEncoderStage1Config
    from conjoin.training import JointEncoderStage1Trainer as JointEncoderStage1Trainer
    from conjoin.training import JointEncoderStage2Config as JointEncoderStage2Config
    from conjoin.training import JointEncoderStage2Trainer as JointEncoderStage2Trainer
    from conjoin.training import MacConfig as MacConfig
    from conjoin.training import MacTrainer as MacTrainer
    from conjoin.training import SelfDistillationConfig as SelfDistillationConfig
    from conjoin.training import SelfDistillationTrainer as SelfDistillationTrainer
    from conjoin.training import TeacherStates as TeacherStates
    from conjoin.training import cache_teacher_states as cache_teacher_states
    from conjoin.training import cache_teachers as cache_teachers
    from conjoin.training import load_recipe as load_recipe
    from conjoin.training import train as train

__version__ = "0.1.0.dev0"

_EXPORTS = {
    "conjoin.data": (
        "MbeirCandidates",
        "MbeirTraining",
        "RetrievalCollator",
        "load_emoji",
        "load_nli",
        "load_pairs",
        "load_triplets",
        "make_mini_mbeir",
        "mbeir_queries",
        "symmetric_triplets",
    ),
    "conjoin.evaluation": (
        "evaluate_combinations",
        "evaluate_mbeir",
        "evaluate_symmetric",
        "evaluate_triplets",
        "explain_pair",
        "render_report",
    ),
    "conjoin.hub": ("export",),
    "conjoin.losses": ("gcl", "info_nce", "mac", "multi_positive", "symmetric_info_nce"),
    "conjoin.models.joint_encoder": ("JointEncoderConfig", "JointEncoderModel"),
    "conjoin.models.mllm_retriever": ("MllmRetrieverConfig", "MllmRetrieverModel"),
    "conjoin.models.score_fusion": ("ScoreFusionConfig", "ScoreFusionModel"),
    "conjoin.models.token_fusion": ("TokenFusionConfig", "TokenFusionModel"),
    "conjoin.processing": ("ImageTextProcessor", "MllmRetrieverProcessor"),
    "conjoin.retrieval": (
        "ItemEncoder",
        "build_index",
        "encode_corpus",
        "load_index",
        "load_mined",
        "mine_hard_negatives",
        "search_items",
    ),
    "conjoin.training": (
        "ContrastiveConfig",
        "ContrastiveTrainer",
        "GclConfig",
        "GclTrainer",
        "JointEncoderStage1Config",
        "JointEncoderStage1Trainer",
        "JointEncoderStage2Config",
        "JointEncoderStage2Trainer",
        "MacConfig",
        "MacTrainer",
        "SelfDistillationConfig",
        "SelfDistillationTrainer",
        "TeacherStates",
        "cache_teacher_states",
        "cache_teachers",
        "load_recipe",
        "train",
    ),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - imported when first used, so that `import conjoin` stays fast
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'conjoin' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
