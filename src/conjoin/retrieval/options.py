"""The options of functions that make encoders, collections and hard negatives."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """How a model is loaded as an encoder, and computes.

    Args:
        batch_size: Items per forward pass.
        device: Where to run; `None` takes a GPU when there is one.
        dtype: Run under autocast to this type, e.g. `torch.bfloat16`; `None` computes as the weights are,
            `"auto"` in bfloat16 if `conjoin.devices.choose_bf16` finds it faster here.
        num_workers: Processes that decode images and tokenise ahead of the model; 0 does it in this one.
        input_type: How an item with several images is embedded, `"seq"`, `"cat"` or `"avg"`; see `ItemEncoder`.
        dims: Keep this many leading numbers of each vector, L2-normalised again (Matryoshka); all when None.
        pooling: Of a bare checkpoint that does not say how it pools: `"mean"`, `"cls"` or `"last"`.
        preset: Load an MLLM as a published embedder, one of `conjoin.hub.embedder.PRESETS`.
        trust_remote_code: Run Python code from the folder where a model of another package needs it.
        revision: Branch, tag or commit of a repository on the Hub; a commit never changes.
    """

    batch_size: int = 32
    device: "str | torch.device | None" = None
    dtype: "torch.dtype | str | None" = None
    num_workers: int = 0
    input_type: str | None = None
    dims: int | None = None
    pooling: str | None = None
    preset: str | None = None
    trust_remote_code: bool = False
    revision: str | None = None


@dataclass(frozen=True, kw_only=True)
class MiningOptions:
    """How hard negatives are searched.

    Args:
        k: Negatives per miner.
        index: How to search: `"exact"`, or a factory string of FAISS such as `"IVF4096,PQ64"`.
        device: Where `"exact"` ranks, such as `"cuda"`.
        block: Anchors that are searched at once.
        dtype: Type of the stored embeddings, `"float32"` or `"float16"`.
        prompt: Of the anchors, in place of each model's own prompt for queries.
        prompt_name: The name of one of the model's prompts, likewise.
    """

    k: int = 10
    index: str = "exact"
    device: str = "cpu"
    block: int = 4096
    dtype: str = "float32"
    prompt: str | None = None
    prompt_name: str | None = None
