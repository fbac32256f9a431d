from .alignment import (
    AlignmentTerms as AlignmentTerms,
    LocalScores as LocalScores,
    ScoreStatistics as ScoreStatistics,
    alignment_terms as alignment_terms,
    global_to_local_alignment as global_to_local_alignment,
)
from .distillation import global_distillation as global_distillation, local_distillation as local_distillation
from .gather import Gathered as Gathered, gather_rows as gather_rows
from .gcl_loss import GclLoss as GclLoss, gcl as gcl, gcl_views as gcl_views
from .info_nce_loss import (
    ContrastiveLoss as ContrastiveLoss,
    info_nce as info_nce,
    soft_labels as soft_labels,
    symmetric_info_nce as symmetric_info_nce,
)
from .mac_loss import mac as mac, mac_hard_temperature as mac_hard_temperature
from .multi_positive_loss import multi_positive as multi_positive
from .reconstruction import (
    embedding_reconstruction as embedding_reconstruction,
    mean_over_devices as mean_over_devices,
    mean_over_rows as mean_over_rows,
    token_reconstruction as token_reconstruction,
)
from .state_distillation import DISTILLATION_KINDS as DISTILLATION_KINDS, self_distillation as self_distillation
from .temperature import Temperature as Temperature
from .threshold import Threshold as Threshold, qda_threshold as qda_threshold
