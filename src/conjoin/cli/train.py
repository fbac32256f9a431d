"""`conjoin train`: run a recipe."""

import argparse
import time
from collections.abc import Sequence
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
        description="Train by RECIPE, a YAML file with the sections method, model, data and training, and features or "
        "teacher for some methods. --SECTION.KEY VALUE changes any of its keys. Runs on one device as it is, on "
        "several under accelerate launch -m conjoin train ... Ctrl-C saves a checkpoint after the next step; --resume "
        "continues.",
        usage="%(prog)s [-h] [--resume | --overwrite] [--root FOLDER] [--allow-urls] "
        "[--allow-private-urls] RECIPE [--SECTION.KEY VALUE ...]",
        epilog="example: conjoin train training_args/gcl/sample.yaml --training.learning_rate 1e-3 "
        "--model.config.hidden_size 384",
    )
    parser.add_argument(
        "recipe", metavar="RECIPE", help="YAML file, such as those in training_args/; its header lists variants"
    )
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="resume from the last checkpoint in the output folder")
    start.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the model in the output folder when the new one is complete; remove its checkpoints",
    )
    add_image_options(parser)
    parser.set_defaults(func=run, overrides=[])


def run(args: argparse.Namespace) -> None:
    """Train, save and print where."""
    overrides = parse_overrides(args.overrides)
    from conjoin.training import load_recipe, train

    trainer = train(load_recipe(args.recipe, overrides), resume=args.resume, overwrite=args.overwrite)
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


def parse_overrides(words: Sequence[str]) -> dict[str, str]:
    """Turn `["--a.b", "1", "--c=2"]` into `{"a.b": "1", "c": "2"}`.

    Raises:
        ValueError: A word is not an option, or an option has no value.
    """
    overrides: dict[str, str] = {}
    rest = list(words)
    while rest:
        name, has_value, value = rest.pop(0).partition("=")
        if not name.startswith("--"):
            raise ValueError(f"expected --section.key value, got {name!r}")
        if not has_value:
            if not rest:
                raise ValueError(f"{name} needs a value")
            value = rest.pop(0)
        overrides[name.removeprefix("--")] = value
    return overrides


def usage(folder: str) -> str:
    """The three lines that load a saved model, with its code if it has some, and embed with it."""
    trust = ", trust_remote_code=True" if any(Path(folder).glob("*.py")) else ""
    return (
        "from sentence_transformers import SentenceTransformer\n"
        f'model = SentenceTransformer("{folder}"{trust})\n'
        'vectors = model.encode(["a red apple", "photo.jpg", {"image": "photo.jpg", "text": "a red apple"}])\n'
    )
