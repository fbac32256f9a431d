"""Evaluation: pure metrics, the modality combinations, the symmetric protocol, run files, results and their report."""

from .combinations import MODALITIES, Embedded, evaluate_combinations
from .explain import (
    Explanation,
    MaskedSample,
    draw_explanation,
    explain_pair,
    render_explanation,
    score_populations,
)
from .hf_metrics import load_metric
from .mbeir import evaluate_mbeir, penalise_hubs
from .mbeir_report import MBEIR_SETTINGS, MbeirScore, average_score, format_mbeir, mbeir_results
from .metrics import (
    bootstrap_ci,
    chance_hit_rate,
    chance_mrr,
    hit_rate_at_k,
    mrr_at_k,
    recall_at_k,
    score_rankings,
    triplet_precision,
    triplet_wins,
)
from .mllm_analysis import analyse_mllm
from .ranking import best_ranks, rank_of_relevant
from .report import render_report
from .results import Cell, Curve, Example, Figure, Headline, Hit, Metric, Results, Shown, Symmetric, Table, picture
from .run_file import read_qrels, read_run, write_qrels, write_run
from .score_charts import distribution_curves, score_gaussians, score_histogram, threshold_course
from .search_examples import search_examples
from .symmetric import evaluate_symmetric
from .symmetric_benchmark import evaluate_triplets
from .table import format_combinations, format_table

__all__ = [
    "MBEIR_SETTINGS",
    "MODALITIES",
    "Cell",
    "Curve",
    "Embedded",
    "Example",
    "Explanation",
    "Figure",
    "Headline",
    "Hit",
    "MaskedSample",
    "MbeirScore",
    "Metric",
    "Results",
    "Shown",
    "Symmetric",
    "Table",
    "analyse_mllm",
    "average_score",
    "best_ranks",
    "bootstrap_ci",
    "chance_hit_rate",
    "chance_mrr",
    "distribution_curves",
    "draw_explanation",
    "evaluate_combinations",
    "evaluate_mbeir",
    "evaluate_symmetric",
    "evaluate_triplets",
    "explain_pair",
    "format_combinations",
    "format_mbeir",
    "format_table",
    "hit_rate_at_k",
    "load_metric",
    "mbeir_results",
    "mrr_at_k",
    "penalise_hubs",
    "picture",
    "rank_of_relevant",
    "read_qrels",
    "read_run",
    "recall_at_k",
    "render_explanation",
    "render_report",
    "score_gaussians",
    "score_histogram",
    "score_populations",
    "score_rankings",
    "search_examples",
    "threshold_course",
    "triplet_precision",
    "triplet_wins",
    "write_qrels",
    "write_run",
]
