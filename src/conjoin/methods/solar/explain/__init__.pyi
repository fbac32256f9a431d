from .charts import (
    MODALITIES as MODALITIES,
    distribution_curves as distribution_curves,
    last_thresholds as last_thresholds,
    read_log as read_log,
    score_histogram as score_histogram,
)
from .pair import (
    construct_masked as construct_masked,
    explain_pair as explain_pair,
    render_explanation as render_explanation,
    score_populations as score_populations,
)
