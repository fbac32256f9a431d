"""`conjoin merge-adapter`: fold low-rank adapters into the model they adapt."""

from dataclasses import dataclass, field
from pathlib import Path

from conjoin.cli.options import option
from conjoin.cli.train import usage


@dataclass(kw_only=True)
class Options:
    """Write the model that SOURCE adapts, with its adapters merged, to --out: weights, processor and code.

    It loads without SOURCE and without peft. SOURCE is a folder that peft wrote, or checkpoint-N of a training run
    together with its --recipe and the same --KEY VALUE flags. What `conjoin train` saves at the end is merged already.

    Args:
        source: Folder of the adapters, or checkpoint-N of a training run.
        out: The folder to write; it must not exist.
        base: The model that peft's adapters are for (default: as they say).
        recipe: The recipe that the checkpoint is of.

    Example:
        conjoin merge-adapter adapters/mine --base runs/puma --out runs/mine
    """

    source: str
    out: str = option(required=True)
    base: str | None = None
    recipe: str | None = None
    overrides: list[str] = field(default_factory=list)


def run(options: Options) -> None:
    """Merge, save and print where."""
    if options.overrides and options.recipe is None:
        raise ValueError(f"{options.overrides[0]} changes a recipe, but there is no --recipe")
    if Path(options.out).exists():
        raise FileExistsError(f"{options.out!r} exists; choose another folder")

    from conjoin.hub import save_model
    from conjoin.trainers.peft import load_adapted
    from conjoin.trainers.recipe import load_recipe
    from conjoin.trainers.runs import load_checkpoint

    if options.recipe is None:
        model, processor = load_adapted(options.source, options.base)
    else:
        model, processor = load_checkpoint(options.source, load_recipe(options.recipe, options.overrides))
    save_model(model, processor, options.out)
    print(f"Saved to {options.out}. Load it anywhere:\n\n{usage(options.out)}")
