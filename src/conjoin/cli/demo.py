"""`conjoin demo`: train, encode, search and evaluate on the embedded sample."""

import argparse
import sys
import time
from typing import Any

from conjoin.cli.commands import COMMANDS


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "demo",
        help=COMMANDS["demo"],
        description="Build the emoji sample, train a model and its baselines on it, encode a held-out gallery, search "
        "it, evaluate all nine modality combinations, and write a report. Five to six minutes on two CPU cores; needs "
        "the sample, which the README installs, and no network. --KEY VALUE changes a key of the recipe.",
        epilog="example: conjoin demo --max_steps 100",
    )
    parser.add_argument("--out", metavar="DIR", default="runs/demo", help="output folder (default: %(default)s)")
    parser.add_argument(
        "--recipe",
        metavar="YAML",
        help="another recipe, then without baselines (default: training_args/sample/demo.yaml)",
    )
    parser.add_argument(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        help="compute in bfloat16, or in float32 (default: as the recipe says; the sample's take what is faster here)",
    )
    parser.set_defaults(func=run, overrides=[])


def run(args: argparse.Namespace) -> None:
    """Run the whole demo."""
    from transformers.utils import logging

    from conjoin.cli.options import check_out
    from conjoin.cli.train import usage
    from conjoin.demo import run_sample
    from conjoin.evaluation import format_table, render_report

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    started = time.perf_counter()
    out = check_out(args.out)
    results = run_sample(out, _flags(args), _say, args.recipe)
    results.usage = usage(str(out / "model"))
    results.save(out / "results.json")
    report = render_report(results, out / "report.html")
    for table in results.tables:
        print(f"\n{format_table(table)}")
    print(f"\nThe model, wherever sentence-transformers is installed:\n\n{results.usage}")
    print(f"Search it:  conjoin search {out / 'gallery'} --text 'red apple'")
    print(f"Report:     {report.resolve().as_uri()}")
    print(f"Done in {time.perf_counter() - started:.0f} s.")


def _flags(args: argparse.Namespace) -> list[str]:
    """The flags of every recipe that the demo runs."""
    import torch

    bf16 = [] if args.bf16 is None else ["--bf16", str(args.bf16).lower()]
    return ["--use_cpu", str(not torch.cuda.is_available()).lower(), *bf16, *args.overrides]


def _say(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)
