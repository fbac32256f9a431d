from conjoin.evaluation.benchmark import (
    Benchmark as Benchmark,
    flag as flag,
    run_tasks as run_tasks,
    task_results as task_results,
)
from conjoin.evaluation.combinations import (
    MODALITIES as MODALITIES,
    Embedded as Embedded,
    evaluate_combinations as evaluate_combinations,
)
from conjoin.evaluation.hf_metrics import load_metric as load_metric
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
    mrr_at_k as mrr_at_k,
    recall_at_k as recall_at_k,
    score_rankings as score_rankings,
)
from conjoin.evaluation.report.page import (
    format_combinations as format_combinations,
    format_results as format_results,
    format_table as format_table,
    render_report as render_report,
)
from conjoin.evaluation.results import (
    Cell as Cell,
    Curve as Curve,
    Example as Example,
    Headline as Headline,
    Hit as Hit,
    Metric as Metric,
    Results as Results,
    Shown as Shown,
    Symmetric as Symmetric,
    Table as Table,
    picture as picture,
    read_qrels as read_qrels,
    score_ranks as score_ranks,
    write_qrels as write_qrels,
    write_run as write_run,
)
from conjoin.evaluation.symmetric import (
    SymmetricOutcomes as SymmetricOutcomes,
    TripletVectors as TripletVectors,
    evaluate_symmetric as evaluate_symmetric,
    symmetric_outcomes as symmetric_outcomes,
)
from conjoin.evaluation.task import (
    EvaluateOptions as EvaluateOptions,
    RetrievalTask as RetrievalTask,
    Rows as Rows,
    TaskScores as TaskScores,
    evaluate_task as evaluate_task,
    evaluate_tasks as evaluate_tasks,
)
