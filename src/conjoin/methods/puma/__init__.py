"""PUMA: trains a layer-pruned MLLM retriever, first by self-distillation, then with the MAC loss."""

from conjoin.lazy import attach
from conjoin.training import METHODS, Method, QueryArguments

from .prepare import PumaTeacherArguments, prepare_stage1
from .stage1 import PumaStage1Config, PumaStage1Trainer
from .stage2 import PumaStage2Config, PumaStage2Trainer

__getattr__, __dir__, __all__ = attach(__name__, __file__)

METHODS.register(
    Method(
        "puma_stage1",
        PumaStage1Config,
        PumaStage1Trainer,
        {"data": QueryArguments, "teacher": PumaTeacherArguments},
        prepare_stage1,
    )
)
METHODS.register(Method("puma_stage2", PumaStage2Config, PumaStage2Trainer, {"data": QueryArguments}))
