"""`recipe.json`: what a run was, for its model's card."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import conjoin
from conjoin.storage import write_text


def write_record(folder: str | Path, args: Any, log: list[dict[str, Any]], **known: Any) -> None:
    """Write the settings, the surroundings and the log of a run beside its model.

    Args:
        folder: Of the model.
        args: The trainer's configuration; its `recipe` has the fields of model and data, if a recipe was parsed.
        log: The trainer's log.
        known: What a run without a recipe knows of itself.
    """
    batch = args.per_device_train_batch_size * args.world_size
    ran = {
        "world_size": args.world_size,
        "contrastive_batch": batch,
        "effective_batch": batch * args.gradient_accumulation_steps,
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "peft", "datasets")},
        "conjoin": conjoin.__version__,
    }
    record = (args.recipe or known) | args.to_dict() | {"ran": ran, "log": log}
    write_text(Path(folder) / "recipe.json", json.dumps(record, indent=2, default=str) + "\n")
