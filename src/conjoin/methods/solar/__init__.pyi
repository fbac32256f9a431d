from .explain.charts import distribution_curves as distribution_curves, score_histogram as score_histogram
from .explain.pair import (
    explain_pair as explain_pair,
    render_explanation as render_explanation,
    score_populations as score_populations,
)
from .prepare import MinedPairArguments as MinedPairArguments, SolarTeacherArguments as SolarTeacherArguments
from .rows import SolarStage2Collator as SolarStage2Collator, SolarStage2Rows as SolarStage2Rows
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
