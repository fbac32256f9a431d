"""The options of compression, for `compress` and for the program; importing them loads nothing."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from conjoin.structure import option

if TYPE_CHECKING:
    import torch


@dataclass
class CompressOptions:
    """How to compress.

    Args:
        layers: Depths to train, each from the whole model.
        steps: Steps of distillation for each depth.
        batch_size: Rows of a step; a row has two items.
        chunk_size: Rows with their graph in memory at once; 0 for all. The result does not depend on it.
        learning_rate: Peak learning rate; it decays to zero.
        lora_rank: Rank of the adapters on the kept layers; 0 trains these layers themselves.
        kind: Distance between states, see `conjoin.losses.self_distillation`.
        distill_weight: Weight of that distance; the rest is the weight of InfoNCE between the parts of a pair.
        instruction: Instruction of the rows that start from a text; the model's prompt `query` when None.
        tune_source: Queries for tuning with the MAC loss after distillation (stage 2); none when None.
        tune_steps: Steps of that tuning.
        held_out: Number of last pairs that measure.
        share: Of the whole model's R@k, which the depth that the summary names must have.
        int8: Measure each model with the weights of its linear layers in 8 bits, too.
        seed: Seed of order, adapters and bootstrap.
        bf16: As in a recipe.
        device: Where to run.

    Raises:
        ValueError: There is no depth, or a number is out of range.
    """

    layers: tuple[int, ...]
    steps: int = option(
        1000, "--steps", type=int, metavar="N", help="steps of distillation for each depth (default: %(default)s)"
    )
    batch_size: int = 32
    chunk_size: int = option(
        0,
        "--chunk-size",
        type=int,
        metavar="N",
        help="rows with their graph in memory at once; the result does not depend on it (default: all)",
    )
    learning_rate: float = option(
        1e-4, "--learning-rate", type=float, metavar="X", help="peak learning rate (default: %(default)s)"
    )
    lora_rank: int = option(
        64,
        "--lora-rank",
        type=int,
        metavar="N",
        help="rank of the adapters on the kept layers; 0 trains these layers themselves (default: %(default)s)",
    )
    kind: str = "cosine"
    distill_weight: float = option(
        0.9,
        "--distill-weight",
        type=float,
        metavar="X",
        help="weight of the teacher's states, 0 to 1; the rest is for the contrast of pairs (default: %(default)s)",
    )
    instruction: str | None = option(
        None, "--instruction", metavar="TEXT", help="instruction of queries with a text (default: the model's prompt)"
    )
    tune_source: str | None = option(
        None,
        "--tune",
        metavar="QUERIES",
        help="then tune on queries with the MAC loss, as stage 2 of PUMA (JSONL or Parquet)",
    )
    tune_steps: int = option(
        500, "--tune-steps", type=int, metavar="N", help="steps of tuning on --tune (default: %(default)s)"
    )
    held_out: int = option(
        200,
        "--held-out",
        type=int,
        metavar="N",
        help="last pairs that measure instead of train (default: %(default)s)",
    )
    share: float = option(
        0.95,
        "--share",
        type=float,
        metavar="X",
        help="name the smallest depth with this share of the whole model's R@k (default: %(default)s)",
    )
    int8: bool = option(
        False, "--int8", action="store_true", help="measure each model with weights in 8 bits, too (needs torchao)"
    )
    seed: int = option(0, "--seed", type=int, metavar="N", help="random seed (default: %(default)s)")
    bf16: bool | str = False
    device: "torch.device | str" = "cpu"

    def __post_init__(self) -> None:
        if not self.layers or not 0 <= self.distill_weight <= 1 or min(self.steps, self.held_out) < 2:
            raise ValueError(
                f"layers={self.layers}, distill_weight={self.distill_weight}, steps={self.steps}, "
                f"held_out={self.held_out}; expected depths, a share, and at least 2 of the others"
            )
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share}; expected more than 0 and at most 1")
