"""`hit_rate_at_k` for `evaluate.load`: a class around `conjoin.evaluation.hit_rate_at_k`."""

from conjoin.evaluation.hf_metrics.shell import ranking_metric
from conjoin.evaluation.rank_metrics import hit_rate_at_k

HitRateAtK = ranking_metric(hit_rate_at_k)
