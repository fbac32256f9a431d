"""`conjoin demo`: train, encode, search and evaluate on the embedded sample."""

import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(kw_only=True)
class Options:
    """Build the emoji sample, train a model and its baselines on it, encode a gallery, search it, and evaluate.

    All nine modality combinations of a held-out gallery are evaluated, in a report. Two minutes on two cores of an AMD
    EPYC; needs the sample, which the README installs, and no network. --KEY VALUE changes a key of the recipe.

    Args:
        out: Output folder.
        recipe: Another recipe, then without baselines (default: training_args/sample/demo.yaml).
        joint_encoder: Also train a joint encoder on the same towers, and compare; doubles the time.

    Example:
        conjoin demo --max_steps 100
    """

    out: str = "runs/demo"
    recipe: str | None = None
    joint_encoder: bool = False
    overrides: list[str] = field(default_factory=list)


def run(options: Options) -> None:
    """Run the whole demo."""
    import torch
    from transformers.utils import logging

    from conjoin.cli.train import usage
    from conjoin.demo import run_sample
    from conjoin.evaluation import format_table

    logging.set_verbosity_error()
    started = time.perf_counter()
    out = Path(options.out)
    flags = ["--use_cpu", str(not torch.cuda.is_available()).lower(), *options.overrides]
    results = run_sample(out, flags, _say, options.recipe, options.joint_encoder)
    results.usage = usage(str(out / "model"))
    report = results.save(out)
    for table in results.tables:
        print(f"\n{format_table(table)}")
    print(f"\nThe model, wherever sentence-transformers is installed:\n\n{results.usage}")
    print(f"Search it:  conjoin search {out / 'gallery'} --text 'red apple'")
    print(f"Report:     {report.resolve().as_uri()}")
    print(f"Done in {time.perf_counter() - started:.0f} s.")


def _say(text: str) -> None:
    print(f"\n{text}", flush=True)
