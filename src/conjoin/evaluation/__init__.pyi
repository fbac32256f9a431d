from conjoin.evaluation.benchmark import (
    CellScores as CellScores,
    EvaluateOptions as EvaluateOptions,
    evaluate as evaluate,
    evaluate_cells as evaluate_cells,
    make_report as make_report,
)
from conjoin.evaluation.collection import evaluate_collection as evaluate_collection
from conjoin.evaluation.layers import analyse_mllm as analyse_mllm
from conjoin.evaluation.metrics import (
    best_ranks as best_ranks,
    bootstrap_ci as bootstrap_ci,
    chance_hit_rate as chance_hit_rate,
    chance_mrr as chance_mrr,
    rank_of_relevant as rank_of_relevant,
    triplet_precision as triplet_precision,
    triplet_wins as triplet_wins,
)
from conjoin.evaluation.rank_metrics import (
    hit_rate_at_k as hit_rate_at_k,
    load_metric as load_metric,
    mrr_at_k as mrr_at_k,
    recall_at_k as recall_at_k,
    score_rankings as score_rankings,
)
from conjoin.evaluation.report import (
    format_results as format_results,
    format_table as format_table,
    score_table as score_table,
)
from conjoin.evaluation.results import (
    Curve as Curve,
    Example as Example,
    Headline as Headline,
    Metric as Metric,
    Results as Results,
    Score as Score,
    Shown as Shown,
    ShownHit as ShownHit,
    Table as Table,
    compare as compare,
    picture as picture,
    read_qrels as read_qrels,
    score_ranks as score_ranks,
)
from conjoin.evaluation.tasks import Cell as Cell, Rows as Rows, Task as Task, find_task as find_task
