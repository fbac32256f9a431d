"""One configuration and one trainer per method, and the recipes that run them."""

from .adapters import load_adapted, load_checkpoint
from .arguments import RetrievalConfig
from .collator import PairCollator
from .contrastive import ContrastiveConfig, ContrastiveTrainer
from .feature_cache import CachedFeatures, cache_features, collate_features
from .feature_teachers import cache_teacher_features
from .gcl import GclConfig, GclTrainer
from .gradient_cache import cached_backward
from .lora import LoraArguments, add_lora, merge_lora
from .mac import MacConfig, MacTrainer
from .objective import Objective
from .recipes import (
    METHODS,
    DataArguments,
    DeepTeacherArguments,
    FeatureArguments,
    ModelArguments,
    Recipe,
    load_recipe,
)
from .run import build_model, build_trainer, train
from .self_distillation import SelfDistillationConfig, SelfDistillationTrainer
from .solar_stage1 import JointEncoderStage1Config, JointEncoderStage1Trainer
from .solar_stage2 import JointEncoderStage2Config, JointEncoderStage2Trainer
from .stage2_rows import Stage2Collator, Stage2Rows
from .state_shards import TaughtRows
from .teacher_cache import TeacherCache, cache_teachers
from .teacher_states import TeacherStates, cache_teacher_states
from .teachers import TeacherCollator, Teachers, TextTeacher, VisionTeacher
from .trainer import RetrievalTrainer

__all__ = [
    "METHODS",
    "CachedFeatures",
    "ContrastiveConfig",
    "ContrastiveTrainer",
    "DataArguments",
    "DeepTeacherArguments",
    "FeatureArguments",
    "GclConfig",
    "GclTrainer",
    "JointEncoderStage1Config",
    "JointEncoderStage1Trainer",
    "JointEncoderStage2Config",
    "JointEncoderStage2Trainer",
    "LoraArguments",
    "MacConfig",
    "MacTrainer",
    "ModelArguments",
    "Objective",
    "PairCollator",
    "Recipe",
    "RetrievalConfig",
    "RetrievalTrainer",
    "SelfDistillationConfig",
    "SelfDistillationTrainer",
    "Stage2Collator",
    "Stage2Rows",
    "TaughtRows",
    "TeacherCache",
    "TeacherCollator",
    "TeacherStates",
    "Teachers",
    "TextTeacher",
    "VisionTeacher",
    "add_lora",
    "build_model",
    "build_trainer",
    "cache_features",
    "cache_teacher_features",
    "cache_teacher_states",
    "cache_teachers",
    "cached_backward",
    "collate_features",
    "load_adapted",
    "load_checkpoint",
    "load_recipe",
    "merge_lora",
    "train",
]
