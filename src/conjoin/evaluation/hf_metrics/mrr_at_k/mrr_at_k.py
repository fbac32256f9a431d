"""`mrr_at_k` for `evaluate.load`: a class around `conjoin.evaluation.mrr_at_k`."""

from conjoin.evaluation.hf_metrics.shell import ranking_metric
from conjoin.evaluation.rank_metrics import mrr_at_k

MrrAtK = ranking_metric(mrr_at_k)
