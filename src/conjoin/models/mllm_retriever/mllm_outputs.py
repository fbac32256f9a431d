"""What the MLLM retriever and its vision tower return."""

from dataclasses import dataclass

from torch import Tensor
from transformers.utils import ModelOutput


@dataclass
class MllmRetrieverOutput(ModelOutput):
    """Output of `MllmRetrieverModel` for `N` items (times the requested views); `D` is the language model's width.

    Args:
        embeddings: `(N, d)` float32, L2-normalised, for indexing and comparison; `d` is `embedding_dim` or, if None,
            `D`.
        pooler_output: `(N, D)` normed state at the readout position, the input of losses.
        hidden_states: On request, the hidden states of the language model, `(N, T', D)` each, without the final norm;
            the `T'` tokens of each prompt come first, padding last.
        attentions: On request, its attention weights, `(N, heads, T', T')` each.
    """

    embeddings: Tensor | None = None
    pooler_output: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class ImageFeatures:
    """The vision tower's features of the `M` image tokens of a batch, in reading order.

    Args:
        tokens: `(M, D)`.
        deepstack: For each of the first layers of Qwen3-VL, `(M, D)` to add to its output; empty elsewhere.
    """

    tokens: Tensor
    deepstack: list[Tensor]


__all__ = ["ImageFeatures", "MllmRetrieverOutput"]
