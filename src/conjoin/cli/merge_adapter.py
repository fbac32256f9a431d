"""`conjoin merge-adapter`: fold low-rank adapters into the model they adapt."""

import argparse
from typing import Any

from conjoin.cli.commands import COMMANDS
from conjoin.cli.train import usage


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "merge-adapter",
        help=COMMANDS["merge-adapter"],
        description="Write the model that SOURCE adapts, with its adapters merged, to --out: weights, processor and "
        "code, which load without SOURCE and without peft. SOURCE is a folder that peft wrote, or checkpoint-N of a "
        "training run together with its --recipe and the same --KEY VALUE flags. What `conjoin train` saves at the "
        "end is merged already.",
        epilog="example: conjoin merge-adapter adapters/mine --base runs/puma --out runs/mine",
    )
    parser.add_argument("source", metavar="SOURCE", help="folder of the adapters, or checkpoint-N of a training run")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to write; it must not exist")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--base", metavar="MODEL", help="the model that peft's adapters are for (default: as they say)")
    which.add_argument("--recipe", metavar="RECIPE", help="the recipe that the checkpoint is of")
    parser.set_defaults(func=run, overrides=[])


def run(args: argparse.Namespace) -> None:
    """Merge, save and print where."""
    from pathlib import Path

    if args.overrides and args.recipe is None:
        raise ValueError(f"{args.overrides[0]} changes a recipe, but there is no --recipe")
    if not Path(args.source).is_dir():
        raise FileNotFoundError(f"no such folder: {args.source!r}")
    if Path(args.out).exists():
        raise FileExistsError(f"{args.out!r} exists; choose another folder")

    from conjoin.hub import save_model
    from conjoin.trainers.peft import load_adapted
    from conjoin.trainers.recipe import load_recipe
    from conjoin.trainers.runs import load_checkpoint

    if args.recipe is None:
        model, processor = load_adapted(args.source, args.base)
    else:
        model, processor = load_checkpoint(args.source, load_recipe(args.recipe, args.overrides))
    save_model(model, processor, args.out)
    print(f"Saved to {args.out}. Load it anywhere:\n\n{usage(args.out)}")
