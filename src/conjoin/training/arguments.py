"""Training arguments shared by every trainer of this package."""

from dataclasses import dataclass, field

import torch
from transformers import TrainingArguments


@dataclass
class RetrievalConfig(TrainingArguments):
    """Arguments of `RetrievalTrainer`, on top of `transformers.TrainingArguments`.

    The changed defaults: no column is removed (the collator reads rows), the last partial batch is dropped (padding a
    batch would duplicate items, which are then each other's false negatives), and R@k is evaluated on the whole
    evaluation set.

    Under gradient accumulation every micro-batch is a contrastive batch of its own, and the step follows the mean of
    their gradients: more accumulation brings no more negatives. A larger batch in the same memory is what
    `gradient_cache_chunk_size` is for.

    Args:
        gradient_cache_chunk_size: Rows embedded at once. A batch of any size then fits in memory, at the price of a
            second forward; 0 runs the plain step.
        eval_ks: The k of the hit rates measured in evaluation.
        mask_false_negatives: Rows that share an id (a group) are not negatives of one another.
    """

    remove_unused_columns: bool = field(default=False)
    dataloader_drop_last: bool = field(default=True)
    lr_scheduler_type: str = field(default="cosine")
    logging_steps: float = field(default=10)
    save_total_limit: int | None = field(default=2)
    gradient_cache_chunk_size: int = field(default=0)
    eval_ks: tuple[int, ...] = field(default=(1, 5, 10))
    mask_false_negatives: bool = field(default=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.dataloader_pin_memory &= torch.accelerator.is_available()  # torch warns of it where there is none
        self.eval_ks = tuple(self.eval_ks)
        if self.gradient_cache_chunk_size < 0:
            raise ValueError(f"gradient_cache_chunk_size={self.gradient_cache_chunk_size} must not be negative")
        if not self.eval_ks or min(self.eval_ks) < 1:
            raise ValueError(f"eval_ks={self.eval_ks}; expected positive numbers")
