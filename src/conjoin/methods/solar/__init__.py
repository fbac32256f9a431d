"""SOLAR / SUMMR: trains a joint encoder on unlabelled image-text pairs, in two self-supervised stages."""

from conjoin.lazy import attach
from conjoin.training import METHODS, Method

from .prepare import MinedPairArguments, SolarTeacherArguments, prepare_stage1, prepare_stage2
from .stage1 import SolarStage1Config, SolarStage1Trainer
from .stage2 import SolarStage2Config, SolarStage2Trainer

__getattr__, __dir__, __all__ = attach(__name__, __file__)

METHODS.register(
    Method("solar_stage1", SolarStage1Config, SolarStage1Trainer, {"teacher": SolarTeacherArguments}, prepare_stage1)
)
METHODS.register(
    Method("solar_stage2", SolarStage2Config, SolarStage2Trainer, {"data": MinedPairArguments}, prepare_stage2)
)
