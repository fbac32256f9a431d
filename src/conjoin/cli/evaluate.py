"""`conjoin evaluate`: a model on a benchmark."""

import argparse
import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    from conjoin.evaluation import Benchmark

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
    args, benchmark = parse(args.overrides, args)
    out = check_out(args.out)
    if args.data is not None and benchmark.reads_data != "source" and not Path(args.data).exists():
        raise FileNotFoundError(f"no such file or folder: {args.data!r}")

    import datetime

    from conjoin.evaluation import format_results, render_report
    from conjoin.storage import checksummed_path

    encoder, args.reranker = make_encoder(args, args.model), make_reranker(args)
    out.mkdir(parents=True, exist_ok=True)
    results = benchmark.run(encoder, args, out)
    results.model |= {"name": encoder.name, "fingerprint": encoder.fingerprint}
    results.benchmark = benchmark.name
    results.config |= {"batch size": args.batch_size, "bf16": args.bf16, "input": encoder.input_type}
    if args.reranker is not None:
        results.config |= {"reranker": args.reranker.name, "reranked candidates": args.rerank_top}
    results.created = results.created or datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with checksummed_path(out / "results.json") as temporary:
        results.save(temporary)
    page = render_report(results, out / "report.html")
    print(format_results(results))
    print(f"\n{out / 'results.json'}\n{page}")


def parse(words: Sequence[str], namespace: argparse.Namespace | None = None) -> "tuple[argparse.Namespace, Benchmark]":
    """Parse the options of the command and of the benchmark that they name.

    Args:
        words: What follows `conjoin evaluate`.
        namespace: Receives the options.

    Raises:
        ValueError: An unknown benchmark or option, or `--data` that the benchmark needs or does not read.
    """
    from conjoin.evaluation.tasks import NAMES, load_benchmark

    finder = argparse.ArgumentParser(PROG, add_help=False)
    finder.add_argument("--benchmark")
    name = finder.parse_known_args(words)[0].benchmark
    if name is None:
        listed = "\n".join(f"  {each.name:<12}{each.help}" for each in map(load_benchmark, NAMES))
        help_of_one = f"{PROG} --benchmark NAME --help shows the options of one benchmark"
        example = f"example: {PROG} runs/demo/model --benchmark emoji --out runs/demo-emoji"
        _parser(f"benchmarks:\n{listed}\n\n{help_of_one}\n{example}").parse_args(
            words
        )  # exits: the benchmark is missing
    benchmark = load_benchmark(name)
    parser = _parser(f"{name}: {benchmark.help}", benchmark)
    args, rest = parser.parse_known_args(words, namespace)
    if rest:
        near = difflib.get_close_matches(rest[0].split("=")[0], re.findall(r"--[\w-]+", parser.format_usage()), n=1)
        hint = f"did you mean {near[0]}?" if near else f"see {PROG} --benchmark {name} --help"
        raise ValueError(f"unknown argument {rest[0]!r} of --benchmark {name}; {hint}")
    if args.data is None and benchmark.reads_data in ("required", "source"):
        raise ValueError(f"--benchmark {name} needs --data")
    if args.rerank is not None and not benchmark.reranks:
        able = ", ".join(name for name in NAMES if load_benchmark(name).reranks)
        raise ValueError(f"--benchmark {name} takes no --rerank; these do: {able}")
    if args.data is not None and benchmark.reads_data == "none":
        raise ValueError(f"--benchmark {name} reads no --data; leave it out")
    return args, benchmark


def _parser(epilog: str, benchmark: "Benchmark | None" = None) -> argparse.ArgumentParser:
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
    parser.add_argument("--data", metavar="PATH", help="the data, for a benchmark that reads data")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write to, or to resume in")
    parser.add_argument(
        "--baselines",
        action=argparse.BooleanOptionalAction,
        help="also score text alone, picture alone, the sum of both vectors, and the towers (default: if there "
        "are at most 10,000 items)",
    )
    add_prompt_options(parser)
    add_image_options(parser)
    add_rerank_options(parser)
    computing = add_compute_options(parser)
    computing.add_argument("--seed", type=int, default=0, help="random seed of the bootstrap (default: %(default)s)")
    if benchmark is not None and benchmark.flags:
        group = parser.add_argument_group(f"options of {benchmark.name}")
        for name, how in benchmark.flags:
            group.add_argument(name, **how)
    return parser
