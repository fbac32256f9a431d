"""`conjoin mteb`: a model on tasks of MTEB."""

from dataclasses import dataclass, field
from typing import Any

from conjoin.cli.options import ComputeOptions, option


@dataclass(kw_only=True)
class Options(ComputeOptions):
    """Evaluate MODEL on tasks of MTEB (pip install "conjoin[mteb]"), of texts and images.

    --out is a results folder of MTEB. The same command computes only what is missing there. MTEB downloads the data.

    Args:
        model: Folder or Hub name of a model: of this package, of sentence-transformers, or a text encoder, vision
            transformer or two-tower model of transformers; or "sample", the towers of the embedded sample as they are.
        tasks: Names of tasks.
        benchmark: A benchmark of MTEB: all of its tasks.
        out: Results folder.

    Example:
        conjoin mteb runs/model --benchmark "ViDoRe(v2)" --out runs/mteb
    """

    model: str
    tasks: list[str] = field(default_factory=list)
    benchmark: str | None = None
    out: str = option(required=True)


def run(options: Options) -> None:
    """Evaluate and print the main score of each task."""
    if bool(options.tasks) == (options.benchmark is not None):
        raise ValueError("name what to evaluate on: --tasks or --benchmark, one of both")
    try:
        import mteb
    except ImportError as error:
        raise ImportError('mteb is not installed; run: pip install "conjoin[mteb]"') from error

    from conjoin.evaluation.mteb_model import mteb_model
    from conjoin.retrieval import load_encoder

    try:
        if options.benchmark is not None:
            tasks: Any = mteb.get_benchmark(options.benchmark).tasks
        else:
            tasks = mteb.get_tasks(tasks=options.tasks)
    except KeyError as error:
        raise ValueError(f"MTEB has no {options.benchmark or ' '.join(options.tasks)!r}: {error.args[0]}") from error
    model: Any = mteb_model(load_encoder(options.model, **options.encoder_options()))
    results = mteb.evaluate(
        model,
        tasks,
        cache=mteb.ResultCache(options.out),
        encode_kwargs={"batch_size": options.batch_size, "show_progress_bar": not options.quiet},
        show_progress_bar=not options.quiet,
    )
    for result in results.task_results:
        print(f"{result.task_name:<40} {result.get_score():.4f}")
    print(f"\n{options.out}")
