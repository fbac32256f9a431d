"""`conjoin evaluate`: a model on a benchmark."""

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from conjoin.cli.options import ComputeOptions, ImageOptions, PromptOptions, RerankOptions, option, pick


@dataclass(kw_only=True)
class Options(PromptOptions, ImageOptions, RerankOptions, ComputeOptions):
    """Evaluate MODEL on a benchmark; print its scores, and write results.json and report.html.

    The same command resumes an interrupted evaluation. Each benchmark has options of its own: `conjoin evaluate
    --benchmark NAME --help` shows them.

    Args:
        model: Folder or Hub name of a model, as for `conjoin encode`.
        benchmark: emoji (the embedded sample), mbeir (M-BEIR), merit (MERIT), mmeb (MMEB), pairs (image-text pairs of
            your own, Flickr30k or COCO) or symmetric (triplets of your own).
        out: Folder to write to, or to resume in.
        baselines: Also score text alone, picture alone, the sum of both vectors, and the towers (default: if there are
            at most 10,000 items).
        hubness_penalty: Subtract N times a candidate's mean score over all queries (transductive).

    Example:
        conjoin evaluate runs/demo/model --benchmark emoji --out runs/demo-emoji
    """

    model: str
    benchmark: str = option(required=True)
    out: str = option(required=True)
    baselines: bool | None = None
    hubness_penalty: float = 0.0


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
        type("Options", (Options, find_task(name[1]).options), {"__doc__": Options.__doc__})
    )


def run(options: Any) -> None:  # noqa: ANN401 - what `options_of` gives
    """Run the command."""
    from conjoin.evaluation import EvaluateOptions, evaluate, find_task, format_results, render_report
    from conjoin.retrieval import load_encoder

    encoder, reranker = load_encoder(options.model, **options.encoder_options()), options.load_reranker()
    names = ("hubness_penalty", "rerank_top", "baselines", "prompt", "prompt_name")
    how = EvaluateOptions(reranker=reranker, show_progress=not options.quiet, **pick(options, *names))
    task, out = find_task(options.benchmark), Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    results = evaluate(encoder, task, out, how, **pick(options, *(each.name for each in fields(task.options))))
    results.config |= {"batch size": options.batch_size, "bf16": options.bf16, "input": encoder.input_type}
    if reranker is not None:
        results.config |= {"reranker": reranker.name, "reranked candidates": options.rerank_top}
    results.created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    results.save(out / "results.json")
    page = render_report(results, out / "report.html")
    print(format_results(results))
    print(f"\n{out / 'results.json'}\n{page}")
