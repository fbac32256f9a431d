"""`conjoin train`: run a recipe."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conjoin.cli.commands import COMMANDS
from conjoin.cli.options import add_image_options

if TYPE_CHECKING:
    from accelerate import Accelerator


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "train",
        help=COMMANDS["train"],
        description="Train by RECIPE, a YAML file of the model's, the data's and the trainer's fields. --KEY VALUE "
        "changes any of them; RECIPE --keys lists them. Runs on one device, on several under accelerate launch "
        "-m conjoin train ... Ctrl-C saves a checkpoint after the next step; --resume continues; --overwrite replaces "
        "the model in the output folder.",
        usage="%(prog)s [-h] [--resume | --overwrite] [--keys] [--root FOLDER] [--allow-urls] "
        "[--allow-private-urls] RECIPE [--KEY VALUE ...]",
        epilog="example: conjoin train training_args/gcl/sample.yaml --learning_rate 1e-3 --max_steps 500",
        allow_abbrev=False,
    )
    parser.add_argument(
        "recipe", metavar="RECIPE", help="YAML file, such as those in training_args/; its header lists variants"
    )
    add_image_options(parser)
    parser.set_defaults(func=run, overrides=[])


def run(args: argparse.Namespace) -> None:
    """Train, save and print where."""
    from conjoin.trainers.recipe import describe_keys, load_recipe

    if "--keys" in args.overrides:
        print(describe_keys(args.recipe))
        return
    from conjoin.trainers.runs import train

    trainer = train(load_recipe(args.recipe, args.overrides))
    if trainer.args.should_save:
        folder = str(trainer.args.output_dir)
        print(f"\nSaved to {folder}. Load it anywhere:\n\n{usage(folder)}")
    _leave(trainer.accelerator)


def _leave(accelerator: "Accelerator") -> None:
    """End the process group.

    On a CPU the threads of gloo need the interpreter's lock to let go of the last exchange, and the group's destructor
    waits for them holding that lock: without a pause one run in ten never ended.
    """
    accelerator.wait_for_everyone()
    if accelerator.num_processes > 1:
        time.sleep(1.0)
    accelerator.end_training()


def usage(folder: str) -> str:
    """The three lines that load a saved model, with its code if it has some, and embed with it."""
    trust = ", trust_remote_code=True" if any(Path(folder).glob("*.py")) else ""
    return (
        "from sentence_transformers import SentenceTransformer\n"
        f'model = SentenceTransformer("{folder}"{trust})\n'
        'vectors = model.encode(["a red apple", "photo.jpg", {"image": "photo.jpg", "text": "a red apple"}])\n'
    )
