"""SOLAR / SUMMR: trains a joint encoder on unlabelled image-text pairs, in two self-supervised stages."""

from conjoin.training import METHODS, Method

from .explain.charts import distribution_curves as distribution_curves, score_histogram as score_histogram
from .explain.pair import (
    explain_pair as explain_pair,
    render_explanation as render_explanation,
    score_populations as score_populations,
)
from .prepare import (
    MinedPairArguments as MinedPairArguments,
    SolarTeacherArguments as SolarTeacherArguments,
    prepare_stage1,
    prepare_stage2,
)
from .readout import set_readout as set_readout
from .rows import SolarStage2Collator as SolarStage2Collator, SolarStage2Rows as SolarStage2Rows
from .scores import fit_intersection as fit_intersection, mask_intersection as mask_intersection
from .stage1 import (
    SolarStage1Config as SolarStage1Config,
    SolarStage1Objective as SolarStage1Objective,
    SolarStage1Trainer as SolarStage1Trainer,
)
from .stage2 import (
    SolarStage2Config as SolarStage2Config,
    SolarStage2Objective as SolarStage2Objective,
    SolarStage2Trainer as SolarStage2Trainer,
)
from .teacher_cache import cache_teachers as cache_teachers
from .teachers import VisionTeacher as VisionTeacher

METHODS.register(
    Method("solar_stage1", SolarStage1Config, SolarStage1Trainer, {"teacher": SolarTeacherArguments}, prepare_stage1)
)
METHODS.register(
    Method("solar_stage2", SolarStage2Config, SolarStage2Trainer, {"data": MinedPairArguments}, prepare_stage2)
)
