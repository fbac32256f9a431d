"""`conjoin mteb`: a model on tasks of MTEB."""

import argparse
import json
from pathlib import Path
from typing import Any

from conjoin.cli.commands import COMMANDS
from conjoin.cli.options import MODEL_HELP, add_compute_options, add_revision, make_encoder


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "mteb",
        help=COMMANDS["mteb"],
        description='Evaluate MODEL on tasks of MTEB (pip install "conjoin[mteb]"), of texts and images. --out is a '
        "results folder of MTEB. The same command computes only what is missing there. MTEB downloads the data.",
        epilog='example: conjoin mteb runs/model --benchmark "ViDoRe(v2)" --out runs/mteb',
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_revision(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--tasks", nargs="+", metavar="NAME", help="names of tasks")
    what.add_argument("--benchmark", metavar="NAME", help="a benchmark of MTEB: all of its tasks")
    parser.add_argument("--out", required=True, metavar="DIR", help="results folder")
    parser.add_argument("--languages", nargs="+", metavar="CODE", help="languages of multilingual tasks, e.g. eng deu")
    parser.add_argument("--overwrite", action="store_true", help="compute again what is in the results folder")
    instructions = parser.add_mutually_exclusive_group()
    instructions.add_argument(
        "--instructions", metavar="JSON", help="file: instructions by name or type of task (default: those of MTEB)"
    )
    instructions.add_argument("--no-instructions", action="store_true", help="give no instructions")
    add_compute_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Evaluate and print the main score of each task."""
    try:
        import mteb
    except ImportError as error:
        raise ImportError('mteb is not installed; run: pip install "conjoin[mteb]"') from error

    from conjoin.evaluation.mteb_model import MtebModel

    tasks = _tasks(mteb, args)
    instructions = None if args.instructions is None else _read(Path(args.instructions))
    model: Any = MtebModel(make_encoder(args, args.model), instructions, use_instructions=not args.no_instructions)
    cache = mteb.ResultCache(args.out)
    results = mteb.evaluate(
        model,
        tasks,
        cache=cache,
        overwrite_strategy="always" if args.overwrite else "only-missing",
        encode_kwargs={"batch_size": args.batch_size},
        show_progress_bar=not args.quiet,
    )
    for result in results.task_results:
        print(f"{result.task_name:<40} {result.get_score():.4f}")
    print(f"\n{args.out}")


def _tasks(mteb: Any, args: argparse.Namespace) -> Any:  # noqa: ANN401 - an optional library
    """Return the tasks that the options name.

    Raises:
        ValueError: There is no such task or benchmark.
    """
    try:
        if args.benchmark is not None:
            return mteb.get_benchmark(args.benchmark).tasks
        return mteb.get_tasks(tasks=args.tasks, languages=args.languages)
    except KeyError as error:
        raise ValueError(f"MTEB has no {args.benchmark or ' '.join(args.tasks)!r}: {error.args[0]}") from error


def _read(path: Path) -> dict[str, str]:
    """Read instructions by name.

    Raises:
        ValueError: The file holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not JSON ({error})") from error
    if not isinstance(content, dict) or not all(isinstance(text, str) for text in content.values()):
        raise ValueError(f"{str(path)!r}: expected an object: instructions by name of task")
    return content
