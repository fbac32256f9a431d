"""`conjoin mteb`: a model on tasks of MTEB."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conjoin.cli.options import ComputeOptions, encoder_options, option


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
        languages: Languages of multilingual tasks, e.g. eng deu.
        overwrite: Compute again what is in the results folder.
        instructions: File: instructions by name or type of task (default: those of MTEB).
        no_instructions: Give no instructions.

    Example:
        conjoin mteb runs/model --benchmark "ViDoRe(v2)" --out runs/mteb
    """

    model: str
    tasks: list[str] = field(default_factory=list)
    benchmark: str | None = None
    out: str = option(required=True)
    languages: list[str] | None = None
    overwrite: bool = False
    instructions: str | None = None
    no_instructions: bool = False


def run(options: Options) -> None:
    """Evaluate and print the main score of each task."""
    if bool(options.tasks) == (options.benchmark is not None):
        raise ValueError("name what to evaluate on: --tasks or --benchmark, one of both")
    if options.no_instructions and options.instructions is not None:
        raise ValueError("--instructions and --no-instructions exclude each other")
    try:
        import mteb
    except ImportError as error:
        raise ImportError('mteb is not installed; run: pip install "conjoin[mteb]"') from error

    from conjoin.evaluation.mteb_model import MtebModel
    from conjoin.retrieval import load_encoder

    try:
        if options.benchmark is not None:
            tasks: Any = mteb.get_benchmark(options.benchmark).tasks
        else:
            tasks = mteb.get_tasks(tasks=options.tasks, languages=options.languages)
    except KeyError as error:
        raise ValueError(f"MTEB has no {options.benchmark or ' '.join(options.tasks)!r}: {error.args[0]}") from error
    path = options.instructions
    instructions = None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(instructions, dict | None):
        raise ValueError(f"{path!r}: expected an object: instructions by name of task")
    encoder = load_encoder(options.model, **encoder_options(options))
    model: Any = MtebModel(encoder, instructions, use_instructions=not options.no_instructions)
    results = mteb.evaluate(
        model,
        tasks,
        cache=mteb.ResultCache(options.out),
        overwrite_strategy="always" if options.overwrite else "only-missing",
        encode_kwargs={"batch_size": options.batch_size},
        show_progress_bar=not options.quiet,
    )
    for result in results.task_results:
        print(f"{result.task_name:<40} {result.get_score():.4f}")
    print(f"\n{options.out}")
