"""`conjoin evaluate`: a model on a benchmark."""

import argparse
import difflib
import inspect
import re
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from conjoin.cli.commands import COMMANDS

from .options import (
    MODEL_HELP,
    add_compute_options,
    add_image_options,
    add_prompt_options,
    add_rerank_options,
    add_revision,
    check_out,
    make_encoder,
    make_reranker,
)

if TYPE_CHECKING:
    from conjoin.evaluation import Task

PROG = "conjoin evaluate"


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program.

    The options depend on the benchmark, so `parse` reads them when the command runs.
    """
    parser = subparsers.add_parser("evaluate", help=COMMANDS["evaluate"], add_help=False, allow_abbrev=False)
    add_compute_options(parser, ("--quiet",))  # `main` reads it, too
    parser.set_defaults(func=run, overrides=[])


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    args, task = parse(args.overrides, args)
    out = check_out(args.out)

    import datetime

    from conjoin.evaluation import EvaluateOptions, evaluate, format_results, render_report
    from conjoin.storage import checksummed_path

    encoder, reranker = make_encoder(args, args.model), make_reranker(args)
    out.mkdir(parents=True, exist_ok=True)
    names = ("dtype", "seed", "hubness_penalty", "rerank_top", "baselines", "prompt", "prompt_name")
    options = EvaluateOptions(
        reranker=reranker, show_progress=not args.quiet, **{name: vars(args)[name] for name in names}
    )
    results = evaluate(
        encoder, task, out, options, **{each.name: vars(args)[each.name] for each in fields(task.options)}
    )
    results.config |= {"batch size": args.batch_size, "bf16": args.bf16, "input": encoder.input_type}
    if reranker is not None:
        results.config |= {"reranker": reranker.name, "reranked candidates": args.rerank_top}
    results.created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with checksummed_path(out / "results.json") as temporary:
        results.save(temporary)
    page = render_report(results, out / "report.html")
    print(format_results(results))
    print(f"\n{out / 'results.json'}\n{page}")


def parse(words: Sequence[str], namespace: argparse.Namespace | None = None) -> "tuple[argparse.Namespace, Task]":
    """Parse the options of the command and of the benchmark that they name.

    Args:
        words: What follows `conjoin evaluate`.
        namespace: Receives the options.

    Raises:
        ValueError: An unknown benchmark or option.
    """
    from conjoin.evaluation.tasks import TASKS

    finder = argparse.ArgumentParser(PROG, add_help=False)
    finder.add_argument("--benchmark")
    name = finder.parse_known_args(words)[0].benchmark
    if name is None:
        listed = "\n".join(f"  {name:<12}{help}" for name, help in TASKS.items())
        help_of_one = f"{PROG} --benchmark NAME --help shows the options of one benchmark"
        example = f"example: {PROG} runs/demo/model --benchmark emoji --out runs/demo-emoji"
        _parser(f"benchmarks:\n{listed}\n\n{help_of_one}\n{example}").parse_args(words)  # exits: no benchmark
    from conjoin.evaluation import find_task

    task = find_task(name)
    parser = _parser(f"{name}: {TASKS[name]}", task)
    args, rest = parser.parse_known_args(words, namespace)
    if rest:
        near = difflib.get_close_matches(rest[0].split("=")[0], re.findall(r"--[\w-]+", parser.format_usage()), n=1)
        hint = f"did you mean {near[0]}?" if near else f"see {PROG} --benchmark {name} --help"
        raise ValueError(f"unknown argument {rest[0]!r} of --benchmark {name}; {hint}")
    return args, task


def _parser(epilog: str, task: "Task | None" = None) -> argparse.ArgumentParser:
    """The options of every benchmark, and those of one."""
    parser = argparse.ArgumentParser(
        PROG,
        description="Evaluate MODEL on a benchmark; print its scores, and write results.json and report.html.\n"
        "The same command resumes an interrupted evaluation.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_revision(parser)
    parser.add_argument("--benchmark", required=True, metavar="NAME", help="the benchmark")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write to, or to resume in")
    parser.add_argument(
        "--baselines",
        action=argparse.BooleanOptionalAction,
        help="also score text alone, picture alone, the sum of both vectors, and the towers (default: if there "
        "are at most 10,000 items)",
    )
    parser.add_argument(
        "--hubness-penalty",
        type=float,
        default=0.0,
        metavar="W",
        help="subtract W times a candidate's mean score over all queries (transductive; default: 0)",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "float16"), default="float32", help="type of stored vectors (default: float32)"
    )
    add_prompt_options(parser)
    add_image_options(parser)
    add_rerank_options(parser)
    computing = add_compute_options(parser)
    computing.add_argument("--seed", type=int, default=0, help="random seed of the bootstrap (default: %(default)s)")
    if task is not None:
        _add_options(parser.add_argument_group(f"options of {task.name}"), task.options)
    return parser


def _add_options(group: argparse._ArgumentGroup, kind: type) -> None:
    """Add the fields of a dataclass, with the `Args` of its docstring as their help."""
    said = str(inspect.getdoc(kind)).partition("Args:\n")[2]
    helps = dict(re.findall(r"^    (\w+): (.+(?:\n     +.+)*)", said, re.MULTILINE))
    hints = get_type_hints(kind)
    for each in fields(kind):
        hint = hints[each.name]
        how: dict[str, Any] = {"help": " ".join(helps[each.name].split())}
        plain = next((arg for arg in get_args(hint) if arg is not type(None) and type(None) in get_args(hint)), hint)
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        if plain is bool:
            how["action"] = argparse.BooleanOptionalAction
        elif get_origin(plain) is list:
            how["nargs"] = "+"
        elif get_origin(plain) is Literal:
            how["choices"] = get_args(plain)
        how |= {"required": True} if default is MISSING else {"default": default}
        how["help"] = how["help"][0].lower() + how["help"][1:].rstrip(".")
        group.add_argument(f"--{each.name.replace('_', '-')}", **how)
