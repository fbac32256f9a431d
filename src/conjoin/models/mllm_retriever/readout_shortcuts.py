"""What an embedding needs of a language model: of the last layer one token, of a shared beginning one row."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig

READABLE = ("llama", "mistral", "qwen2", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3", "qwen3_vl_text")
"""Language models whose layers are built alike: norm, attention with rotated heads, norm, feed-forward."""

LEAST_SAVED_TOKENS = 256
"""A second pass of the language model has a price of its own; on a GPU, that of reading all weights once more."""


class SharedPrefix(DynamicCache):
    """Keys and values of the tokens that all rows begin with, computed for one row and lent to all.

    The first pass of the language model fills it; later ones read it and leave nothing in it, so that it never holds
    more than the prefix.
    """

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> tuple[Tensor, Tensor]:
        """Keys and values `(N, heads, P + T, d)` of a layer, given those `(N, heads, T, d)` of the tokens at hand."""
        if layer_idx >= len(self.layers):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer: Any = self.layers[layer_idx]
        rows = len(key_states)
        keys, values = (stored.expand(rows, -1, -1, -1) for stored in (layer.keys, layer.values))
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)


def shared_prefix_length(input_ids: Tensor, is_image: Tensor, at: Tensor) -> int:
    """How many tokens all rows of ids `(N, T)` begin with, before any image and any readout position `(N,)`.

    Zero where the gain would not pay for a second pass: less than an eighth of the tokens, or few rows.
    """
    rows, length = input_ids.shape
    same = (input_ids == input_ids[:1]).all(0) & ~is_image.any(0)
    shared = int(torch.minimum(same.cumprod(0).sum(), at.min()))
    return shared if shared * max(rows - 1, 0) >= LEAST_SAVED_TOKENS and 8 * shared >= length else 0


def is_readable(config: PreTrainedConfig) -> bool:
    """Whether `read_last_layer` knows the layers of a language model with this configuration."""
    return config.model_type in READABLE and config.to_dict().get("sliding_window") is None


def make_readable(layer: nn.Module) -> None:
    """Let a decoder layer be called with `readout`, positions `(N,)`: it then gives `(N, 1, D)`, the states there.

    Without `readout` it does what it always does. Its parameters and their names stay what they are.
    """
    layer.forward = partial(read_last_layer, layer)


def read_last_layer(
    layer: Any,  # noqa: ANN401
    hidden_states: Tensor,
    readout: Tensor | None = None,
    **kwargs: Any,  # noqa: ANN401
) -> Tensor:
    """The output of a decoder layer, at one position per row if asked: all tokens' keys and values, one query.

    Args:
        layer: Of one of `READABLE`.
        hidden_states: `(N, T, D)`.
        readout: `(N,)` which of these T tokens; None for all.
        kwargs: What the language model passes to its layers.

    Returns:
        `(N, 1, D)`, or `(N, T, D)` without `readout`.
    """
    if readout is None:
        return type(layer).forward(layer, hidden_states, **kwargs)
    attention, cache = layer.self_attn, kwargs.get("past_key_values")
    norms = dict(attention.named_children())  # Qwen3 norms its heads
    rows = torch.arange(len(readout), device=readout.device)
    angles = [table.expand(len(rows), -1, -1) for table in kwargs["position_embeddings"]]
    normed = layer.input_layernorm(hidden_states)

    def heads(name: str, states: Tensor) -> Tensor:
        """`(N, heads, tokens, d)`."""
        split = norms[f"{name}_proj"](states).unflatten(-1, (-1, attention.head_dim))
        return norms.get(f"{name}_norm", nn.Identity())(split).transpose(1, 2)

    normed_there, *angles_there = (table[rows, readout][:, None] for table in (normed, *angles))
    query = _rotate(heads("q", normed_there), *angles_there)
    key, value = _rotate(heads("k", normed), *angles), heads("v", normed)
    if cache is not None:
        key, value = cache.update(key, value, attention.layer_idx)
    before = key.shape[2] - hidden_states.shape[1]
    seen = torch.arange(key.shape[2], device=readout.device) <= (readout + before)[:, None]
    grouped = query.reshape(len(rows), key.shape[1], -1, attention.head_dim)  # the heads that share keys, side by side
    attended = F.scaled_dot_product_attention(
        grouped, key, value, attn_mask=seen[:, None, None], scale=attention.scaling
    )
    states = hidden_states[rows, readout] + attention.o_proj(attended.flatten(1))
    return (states + layer.mlp(layer.post_attention_layernorm(states)))[:, None]


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: `(N, heads, T, d)` by angles `(N, T, d)`."""
    first, second = states.chunk(2, dim=-1)
    return states * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


__all__ = ["SharedPrefix", "is_readable", "make_readable", "shared_prefix_length"]
