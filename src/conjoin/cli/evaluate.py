"""`conjoin evaluate`: a model on a benchmark, or a collection on queries."""

import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conjoin.cli.options import ComputeOptions, ImageOptions, PromptOptions, RerankOptions, option, pick

if TYPE_CHECKING:
    from accelerate import PartialState

    from conjoin.evaluation import Results


@dataclass(kw_only=True)
class BenchmarkOptions(PromptOptions, ImageOptions, RerankOptions, ComputeOptions):
    """Evaluate a model on a benchmark; print its scores, and write results.json and report.html.

    The same command resumes an interrupted evaluation. Under `accelerate launch -m` or `torchrun -m` the processes
    share the rows to encode.

    Args:
        source: Folder or Hub name of a model, as for `conjoin encode`.
        benchmark: emoji (the embedded sample), mbeir (M-BEIR), merit (MERIT), mmeb (MMEB), pairs (image-text pairs of
            your own, Flickr30k or COCO) or symmetric (triplets of your own).
        out: Folder to write to, or to resume in.
        baselines: Also score text alone, picture alone, the sum of both vectors, and the towers (default: if there are
            at most 10,000 items).
        sizes: Also score shorter vectors and fewer bits, as a table and a chart over the bytes of a vector.
        hubness_penalty: Subtract N times a candidate's mean score over all queries (transductive).

    Example:
        conjoin evaluate runs/demo/model --benchmark emoji --out runs/demo-emoji
    """

    source: str
    benchmark: str | None = None
    out: str | None = None
    baselines: bool | None = None
    sizes: bool = False
    hubness_penalty: float = 0.0


@dataclass(kw_only=True)
class Options(BenchmarkOptions):
    """Evaluate a model on a benchmark, or a collection on queries; print the scores.

    A model needs --benchmark and --out; each benchmark has options of its own: `conjoin evaluate --benchmark NAME
    --help` shows them. The queries of a collection are ranked by vectors, by words and by both, and those whose right
    row is not found first are listed; --out also writes results.json and report.html.

    Args:
        source: A model, as for `conjoin encode`, or a collection.
        queries: Of a collection: a table with the words or the picture of each query and the ids of the right rows.
        columns: Columns of the queries that are not guessed right, such as text=words image=photo id=skus.
        model: Of a collection: the model that made it (default: the folder on this machine that it records).

    Example:
        conjoin evaluate runs/demo/model --benchmark emoji --out runs/demo-emoji; conjoin evaluate runs/shop
        queries.csv
    """

    source: str
    queries: str | None = option(MISSING, nargs="?")
    columns: list[str] = option([], metavar="ROLE=COLUMN")
    model: str | None = None


def options_of(words: Sequence[str]) -> type[Any]:
    """The options of the command with those of the benchmark that the words name.

    Raises:
        ValueError: There is no such benchmark.
    """
    name = re.search(r"--benchmark[ =](\w+)", " ".join(words))
    if name is None:
        return Options
    from conjoin.evaluation import find_task

    return dataclass(kw_only=True)(
        type("Options", (BenchmarkOptions, find_task(name[1]).options), {"__doc__": BenchmarkOptions.__doc__})
    )


def run(options: Any) -> None:  # noqa: ANN401 - what `options_of` gives
    """Run the command."""
    if options.benchmark is None and options.queries is None:
        raise ValueError("a model needs --benchmark NAME, a collection a table of queries")
    if options.benchmark is not None and options.out is None:
        raise ValueError("the following arguments are required: --out")

    from conjoin.evaluation import format_results

    processes = options.launched()
    results = _of_collection(options) if options.benchmark is None else _of_model(options, processes)
    if processes is not None and not processes.is_main_process:
        return
    print(format_results(results))
    if options.out is not None:
        page = results.save(options.out)
        print(f"\n{page.with_name('results.json')}\n{page}")


def _of_collection(options: Any) -> "Results":  # noqa: ANN401
    from conjoin.evaluation import evaluate_collection
    from conjoin.retrieval import open_collection
    from conjoin.retrieval.search import load_query_encoder

    collection = open_collection(options.source)
    encoder = load_query_encoder(collection, options.model, **options.encoder_options())
    how = pick(options, "columns", "prompt", "prompt_name")
    return evaluate_collection(collection, options.queries, encoder, **how)


def _of_model(options: Any, processes: "PartialState | None") -> "Results":  # noqa: ANN401
    from conjoin.evaluation import EvaluateOptions, evaluate, find_task
    from conjoin.retrieval import load_encoder

    encoder, reranker = load_encoder(options.source, **options.encoder_options()), options.load_reranker()
    names = ("hubness_penalty", "rerank_top", "baselines", "sizes", "prompt", "prompt_name")
    shared: Any = {"processes": processes, "show_progress": not options.quiet}
    how = EvaluateOptions(reranker=reranker, **shared, **pick(options, *names))
    task, out = find_task(options.benchmark), Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    results = evaluate(encoder, task, out, how, **pick(options, *(each.name for each in fields(task.options))))
    results.config |= {"batch size": options.batch_size, "bf16": options.bf16, "input": encoder.input_type}
    if reranker is not None:
        results.config |= {"reranker": reranker.name, "reranked candidates": options.rerank_top}
    return results
