from .analysis import analyse_mllm as analyse_mllm
from .compress_options import CompressOptions as CompressOptions
from .compression import compress as compress
from .prepare import PumaTeacherArguments as PumaTeacherArguments
from .stage1 import (
    PumaStage1Config as PumaStage1Config,
    PumaStage1Objective as PumaStage1Objective,
    PumaStage1Trainer as PumaStage1Trainer,
)
from .stage2 import (
    PumaStage2Config as PumaStage2Config,
    PumaStage2Objective as PumaStage2Objective,
    PumaStage2Trainer as PumaStage2Trainer,
)
from .teacher_states import TeacherStates as TeacherStates, cache_teacher_states as cache_teacher_states
