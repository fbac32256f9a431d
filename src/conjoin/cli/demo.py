"""`conjoin demo`: train, encode, search and evaluate on the embedded sample."""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conjoin.cli.commands import COMMANDS

if TYPE_CHECKING:
    from conjoin.evaluation import Results

SOLAR = "solar"
"""The value of `--recipe` that names a demo of its own."""


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "demo",
        help=COMMANDS["demo"],
        description="Build the emoji sample, train a model and its baselines on it, encode a held-out gallery, search "
        "it, evaluate all nine modality combinations, and write a report. Five to six minutes on two CPU cores; needs "
        "the sample, which the README installs, and no network. --recipe solar runs SOLAR on scenes of several "
        "objects, beside baselines. --SECTION.KEY VALUE changes a key of the recipe.",
        epilog="example: conjoin demo --recipe solar",
    )
    parser.add_argument("--out", metavar="DIR", help="output folder (default: runs/demo, or runs/demo-NAME)")
    parser.add_argument(
        "--recipe",
        metavar="YAML",
        help="a recipe, or solar: both stages of SOLAR (default: training_args/sample/demo.yaml)",
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
    from conjoin.demo import run_sample, run_solar

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    started = time.perf_counter()
    solar = args.recipe == SOLAR
    out = check_out(args.out or ("runs/demo-solar" if solar else "runs/demo"))
    overrides = _overrides(args)
    if solar:
        _finish(run_solar(out, overrides, _say), out, started)
        return
    results = run_sample(out, overrides, _say, args.recipe)
    results.usage = usage(str(out / "model"))
    _finish(results, out, started, f"Search it:  conjoin search {out / 'gallery'} --text 'red apple'\n")


def _finish(results: "Results", out: Path, started: float, hint: str = "") -> None:
    """Save and show the results of a demo; `hint` says what else to do with it."""
    from conjoin.evaluation import format_table, render_report

    results.save(out / "results.json")
    report = render_report(results, out / "report.html")
    for table in results.tables:
        print(f"\n{format_table(table)}")
    print(f"\nThe model, wherever sentence-transformers is installed:\n\n{results.usage}")
    print(f"{hint}Report:     {report.resolve().as_uri()}")
    print(f"Done in {time.perf_counter() - started:.0f} s.")


def _overrides(args: argparse.Namespace) -> dict[str, str]:
    """The overrides of every recipe that the demo runs."""
    import torch

    from conjoin.cli.train import parse_overrides

    bf16 = str(args.bf16).lower()
    overrides = {"training.use_cpu": str(not torch.cuda.is_available()).lower()}
    if args.bf16 is not None:
        overrides["training.bf16"] = bf16
        if args.recipe in (None, SOLAR):  # these recipes cache features
            overrides["features.bf16"] = bf16
    return overrides | parse_overrides(args.overrides)


def _say(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)
