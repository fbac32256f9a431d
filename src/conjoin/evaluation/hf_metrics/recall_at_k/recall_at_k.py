"""`recall_at_k` for `evaluate.load`: a class around `conjoin.evaluation.recall_at_k`."""

from conjoin.evaluation.hf_metrics.shell import ranking_metric
from conjoin.evaluation.rank_metrics import recall_at_k

RecallAtK = ranking_metric(recall_at_k)
