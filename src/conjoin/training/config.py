"""Training arguments shared by all trainers of this package."""

import logging
import os
import sys
from dataclasses import dataclass, field, fields

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy

from conjoin.devices import choose_bf16

logger = logging.getLogger(__name__)

_INHERITED = {each.name for each in fields(TrainingArguments)}


@dataclass
class RetrievalConfig(TrainingArguments):
    """Arguments of `RetrievalTrainer`, added to `transformers.TrainingArguments`.

    Some defaults differ. No column is removed, because the collator reads whole rows. The last partial batch is
    dropped, because padding it would duplicate items, which would become false negatives of each other. R@k is
    evaluated on the whole evaluation set. Without a terminal the log is lines in place of a progress bar. A process
    uses one GPU: `accelerate launch` starts one for each. `push_to_hub` pushes the trained model, no checkpoint.

    Under gradient accumulation every micro-batch is a separate contrastive batch, and the step uses the mean of their
    gradients, so accumulation adds no negatives. To fit a larger batch in memory, set `gradient_cache_chunk_size`.

    Args:
        bf16: Compute in bfloat16, with weights in float32; `"auto"` as for `conjoin.devices.choose_bf16`, unless
            `fp16` or `accelerate launch` sets the precision. It holds the choice afterwards.
        gradient_cache_chunk_size: Rows embedded at once. A batch of any size then fits in memory, but costs a second
            forward pass; 0 runs the plain step.
        gradient_cache_chunk_tokens: Text tokens embedded at once, padding included. Rows are sorted by length and
            padded with rows like them, which is faster where texts differ in length; the gradients are the same. Alone
            or beside `gradient_cache_chunk_size`, which also limits the images of a chunk; 0 for no such limit.
        mask_false_negatives: Do not use rows that share an id (a group) as negatives of each other.
        activation_checkpointing: Compute activations again in the backward pass: less memory, more compute. Earlier
            versions of transformers name it `gradient_checkpointing`.
        matryoshka_dims: Widths to train the embeddings at, such as 64 128 256 384: each contrastive loss is the mean
            over the embeddings cut to each width and normalised again, so vectors can be truncated later. Terms of a
            teacher and of reconstruction keep the whole width; with projection heads, their output is cut. Name the
            whole width too. Empty for the whole width alone.
    """

    remove_unused_columns: bool = field(default=False)
    dataloader_drop_last: bool = field(default=True)
    bf16: bool | str = field(default=False)  # type: ignore[assignment]
    lr_scheduler_type: str = field(default="cosine")
    logging_steps: float = field(default=10)
    save_total_limit: int | None = field(default=2)
    hub_strategy: str = field(default="end")
    gradient_cache_chunk_size: int = field(default=0)
    gradient_cache_chunk_tokens: int = field(default=0)
    mask_false_negatives: bool = field(default=True)
    activation_checkpointing: bool | None = field(default=None)
    matryoshka_dims: tuple[int, ...] = field(default=())
    disable_tqdm: bool | None = field(default_factory=lambda: not sys.stderr.isatty())

    def __post_init__(self) -> None:
        if self.activation_checkpointing and "activation_checkpointing" not in _INHERITED:
            self.gradient_checkpointing = True
        if isinstance(self.bf16, str):
            gpu = None if self.use_cpu else torch.accelerator.current_accelerator(check_available=True)
            is_set = self.fp16 or os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no"
            self.bf16 = not is_set and choose_bf16(self.bf16, gpu or "cpu")
            self.use_cpu |= self.bf16 and gpu is None  # else transformers refuses bfloat16
        super().__post_init__()
        if self.n_gpu > 1:  # nn.DataParallel would split a contrastive batch
            logger.warning("one of %d GPUs is used; start with `accelerate launch` to use all", self.n_gpu)
            self._n_gpu = 1
        self.dataloader_pin_memory &= torch.accelerator.is_available()  # torch warns if there is no accelerator
        if self.push_to_hub and self.hub_strategy != HubStrategy.END:
            raise ValueError(
                f"hub_strategy={HubStrategy(self.hub_strategy).value!r}: a checkpoint holds the state of training, no "
                "model to push; expected 'end', which pushes the trained model"
            )
        for name in ("gradient_cache_chunk_size", "gradient_cache_chunk_tokens"):
            if vars(self)[name] < 0:
                raise ValueError(f"{name}={vars(self)[name]} must not be negative")
        self.matryoshka_dims = dims = tuple(self.matryoshka_dims)
        if any(dim < 1 for dim in dims) or len(set(dims)) < len(dims):
            raise ValueError(f"matryoshka_dims={dims}; expected positive numbers, each once")


@dataclass
class TemperatureConfig(RetrievalConfig):
    """Arguments of a contrastive trainer with one temperature.

    Args:
        temperature: Softmax temperature, or its initial value if it is learned.
        learn_temperature: Train the temperature, as CLIP does.
    """

    temperature: float = field(default=0.07)
    learn_temperature: bool = field(default=True)
