"""`recipe.json`: what a run was, for its model's card."""

import json
import shutil
import subprocess
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
    record = (args.recipe or known) | args.to_dict() | {"ran": _surroundings(args), "log": log}
    write_text(Path(folder) / "recipe.json", json.dumps(record, indent=2, default=str) + "\n")


def _surroundings(args: Any) -> dict[str, Any]:
    """Return what a run ran on, for its record and its model's card."""
    batch = args.per_device_train_batch_size * args.world_size
    of_others = batch * (1 + args.recipe.get("hard_negatives", 0)) - 1
    clone, head = Path(conjoin.__file__).parents[2], ""
    if (clone / ".git").exists() and shutil.which("git"):
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=clone, capture_output=True, text=True).stdout.strip()
    negatives = {"gcl": 3 * batch - 2, "solar_stage2": None}  # those of SOLAR's stage 2 differ by anchor
    return {
        "world_size": args.world_size,
        "contrastive_batch": batch,
        "effective_batch": batch * args.gradient_accumulation_steps,
        "negatives_per_query": negatives.get(args.recipe.get("trainer", ""), of_others),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "peft", "datasets")},
        "conjoin": conjoin.__version__,
        "commit": head or None,
    }
