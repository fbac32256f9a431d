"""`conjoin train`: run a recipe."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from conjoin.cli.options import ImageOptions


@dataclass(kw_only=True)
class Options(ImageOptions):
    """Train by RECIPE, a YAML file of the model's, the data's and the trainer's fields.

    --KEY VALUE changes any of them; RECIPE --keys lists those of the recipe, --keys all every one; --as_published and
    --as_authors set the values of the paper and of its authors' code. --dry-run shows rows, steps, parameters and
    memory, and trains nothing. Runs on one device, on several under accelerate launch
    -m conjoin train ... Ctrl-C saves a checkpoint after the next step; --resume continues; --overwrite replaces the
    model in the output folder.

    Args:
        recipe: YAML file, such as those in training_args/; its header lists variants.

    Example:
        conjoin train training_args/gcl/sample.yaml --learning_rate 1e-3 --max_steps 500
    """

    recipe: str
    overrides: list[str] = field(default_factory=list)


def run(options: Options) -> None:
    """Train, save and print where."""
    from conjoin.trainers.recipe import describe_keys, load_recipe

    words = options.overrides
    if "--keys" in words:
        print(describe_keys(options.recipe, every="all" in words))
        return
    others = [word for word in words if word not in ("--dry-run", "--dry_run")]
    if len(others) < len(words):
        from conjoin.trainers.runs import describe_run

        print(describe_run(load_recipe(options.recipe, others)))
        return
    from conjoin.trainers.runs import train

    trainer = train(load_recipe(options.recipe, words))
    if trainer.args.should_save:
        folder = str(trainer.args.output_dir)
        print(f"\nSaved to {folder}. Load it anywhere:\n\n{usage(folder)}")
    # On a CPU the threads of gloo need the interpreter's lock to let go of the last exchange, and the group's
    # destructor waits for them holding that lock: without a pause one run in ten never ended.
    trainer.accelerator.wait_for_everyone()
    if trainer.accelerator.num_processes > 1:
        time.sleep(1.0)
    trainer.accelerator.end_training()


def usage(folder: str) -> str:
    """The three lines that load a saved model, with its code if it has some, and embed with it."""
    trust = ", trust_remote_code=True" if any(Path(folder).glob("*.py")) else ""
    return (
        "from sentence_transformers import SentenceTransformer\n"
        f'model = SentenceTransformer("{folder}"{trust})\n'
        'vectors = model.encode(["a red apple", "photo.jpg", {"image": "photo.jpg", "text": "a red apple"}])\n'
    )
