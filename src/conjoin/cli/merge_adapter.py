"""`conjoin merge-adapter`: fold low-rank adapters into the model they adapt."""

from dataclasses import dataclass
from pathlib import Path

from conjoin.cli.options import option
from conjoin.cli.train import usage


@dataclass(kw_only=True)
class Options:
    """Write the model that SOURCE adapts, with its adapters merged, to --out: weights, processor and code.

    It loads without SOURCE and without peft. SOURCE is a folder that peft wrote. What `conjoin train` saves is merged
    already.

    Args:
        source: Folder of the adapters.
        out: The folder to write; it must not exist.
        base: The model that peft's adapters are for (default: as they say).

    Example:
        conjoin merge-adapter adapters/mine --base runs/puma --out runs/mine
    """

    source: str
    out: str = option(required=True)
    base: str | None = None


def run(options: Options) -> None:
    """Merge, save and print where."""
    if Path(options.out).exists():
        raise FileExistsError(f"{options.out!r} exists; choose another folder")

    from conjoin.hub import save_model
    from conjoin.trainers.peft import load_adapted

    model, processor = load_adapted(options.source, options.base)
    save_model(model, processor, options.out)
    print(f"Saved to {options.out}. Load it anywhere:\n\n{usage(options.out)}")
