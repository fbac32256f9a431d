"""How a model is compressed. Importing this loads no torch: the command line reads it for its help."""

from dataclasses import dataclass, field
from typing import Any


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class CompressOptions:
    """How to train. The fields are options of `conjoin compress`, with their help.

    Raises:
        ValueError: There is no depth, or a number is out of range.
    """

    layers: list[int] = field(metadata={"help": "numbers of layers to keep, each trained from the whole model"})
    keep_last: bool = _option(False, "keep the first N - 1 layers and the last one, in place of the first N")
    steps: int = _option(1000, "steps of distillation for each depth")
    batch_size: int = _option(32, "rows of a step, each with two items; items of a forward pass when measuring")
    chunk_size: int = _option(0, "rows with their graph in memory at once, 0 for all; the result is the same")
    learning_rate: float = _option(1e-4, "peak learning rate, which decays to zero")
    lora_rank: int = _option(64, "rank of the adapters on the kept layers")
    distill_weight: float = _option(0.9, "weight of the teacher's states; the rest is for the contrast of pairs")
    instruction: str | None = _option(None, "instruction of queries with a text, in place of the model's query prompt")
    held_out: int = _option(200, "last pairs, which measure instead of train")
    share: float = _option(0.95, "name the smallest depth with this share of the whole model's R@k")
    seed: int = _option(0, "seed of order, adapters and bootstrap")
    bf16: bool = _option(False, "train in bfloat16")
    device: str | None = _option(None, "where to run, such as cpu or cuda:1; a GPU when there is one")

    def __post_init__(self) -> None:
        least = min(self.steps, self.batch_size, self.held_out)
        if not self.layers or not 0 <= self.distill_weight <= 1 or least < 2:
            raise ValueError(f"{self}: expected layers, distill_weight 0 to 1, and 2 or more steps, rows and pairs")
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share}; expected more than 0 and at most 1")
