"""Shortcuts for embeddings: the last layer runs for one token per row, a shared prefix for one row, little padding."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig

READABLE = ("llama", "mistral", "qwen2", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3", "qwen3_vl_text")
"""Language models with the same layer structure: norm, attention with rotary heads, norm, feed-forward."""

LEAST_SAVED_TOKENS = 256
"""Minimum number of saved tokens for a second pass, which on a GPU reads all weights again."""


GROUP_TOKENS = 1024
"""About how many tokens of prompts a CPU trains on at once."""


class SharedPrefix(DynamicCache):
    """Keys and values of the prefix that all rows share, computed for one row and used for all.

    The first pass of the language model fills it. Later passes only read it, so it never holds more than the
    prefix.
    """

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values `(N, heads, P + T, d)`: the prefix, then the `(N, heads, T, d)` given."""
        if layer_idx >= len(self.layers):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer: Any = self.layers[layer_idx]
        rows = len(key_states)
        keys, values = (stored.expand(rows, -1, -1, -1) for stored in (layer.keys, layer.values))
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)


def shared_prefix_length(input_ids: Tensor, is_image: Tensor, at: Tensor) -> int:
    """Return the length of the prefix of ids `(N, T)` that all rows share, before any image or readout position.

    Zero if a second pass would cost more than it saves: less than an eighth of the tokens, or few rows.
    """
    rows, length = input_ids.shape
    same = (input_ids == input_ids[:1]).all(0) & ~is_image.any(0)
    shared = int(torch.minimum(same.cumprod(0).sum(), at.min()))
    return shared if shared * max(rows - 1, 0) >= LEAST_SAVED_TOKENS and 8 * shared >= length else 0


def similar_lengths(lengths: Tensor) -> list[tuple[Tensor, int]]:
    """Group prompts of similar lengths `(N,)`: the rows of each group, about `GROUP_TOKENS`, and its longest."""
    order = lengths.argsort()
    number = (lengths[order].cumsum(0) - lengths[order]).div(GROUP_TOKENS, rounding_mode="floor")
    sizes = number.unique_consecutive(return_counts=True)[1].tolist()
    return [(rows, int(lengths[rows].max())) for rows in order.split(sizes)]


def is_readable(config: PreTrainedConfig, training: bool = False) -> bool:
    """Whether `read_last_layer` supports the layers of a language model with this configuration.

    It has no dropout of attention weights, which `training` may need.
    """
    options = config.to_dict()
    dropout = training and options.get("attention_dropout")
    return config.model_type in READABLE and options.get("sliding_window") is None and not dropout


def make_readable(layer: nn.Module) -> None:
    """Let a decoder layer accept `readout`, positions `(N,)`, and return the states there, `(N, 1, D)`.

    Without `readout` the layer works as before. Its parameters and their names do not change.
    """
    layer.forward = partial(read_last_layer, layer)


def read_last_layer(
    layer: Any,  # noqa: ANN401
    hidden_states: Tensor,
    readout: Tensor | None = None,
    **kwargs: Any,  # noqa: ANN401
) -> Tensor:
    """Run a decoder layer, at one position per row if `readout` is given: all keys and values, one query.

    Args:
        layer: Decoder layer of a model in `READABLE`.
        hidden_states: `(N, T, D)`.
        readout: `(N,)` the position to compute in each row; None for all.
        kwargs: What the language model passes to its layers.

    Returns:
        `(N, 1, D)`, or `(N, T, D)` without `readout`.
    """
    if readout is None:
        return type(layer).forward(layer, hidden_states, **kwargs)
    attention, cache = layer.self_attn, kwargs.get("past_key_values")
    norms = dict(attention.named_children())  # Qwen3 normalises its heads
    rows = torch.arange(len(readout), device=readout.device)
    angles = [table.expand(len(rows), -1, -1) for table in kwargs["position_embeddings"]]
    normed = layer.input_layernorm(hidden_states)

    def heads(name: str, states: Tensor) -> Tensor:
        """Project `states` to heads `(N, heads, tokens, d)`."""
        split = norms[f"{name}_proj"](states).unflatten(-1, (-1, attention.head_dim))
        return norms.get(f"{name}_norm", nn.Identity())(split).transpose(1, 2)

    normed_there, *angles_there = (table[rows, readout][:, None] for table in (normed, *angles))
    query = _rotate(heads("q", normed_there), *angles_there)
    key, value = _rotate(heads("k", normed), *angles), heads("v", normed)
    if cache is not None:
        key, value = cache.update(key, value, attention.layer_idx)
    before = key.shape[2] - hidden_states.shape[1]
    seen = torch.arange(key.shape[2], device=readout.device) <= (readout + before)[:, None]
    grouped = query.reshape(len(rows), key.shape[1], -1, attention.head_dim)  # group the heads that share keys
    attended = F.scaled_dot_product_attention(
        grouped, key, value, attn_mask=seen[:, None, None], scale=attention.scaling
    )
    states = hidden_states[rows, readout] + attention.o_proj(attended.flatten(1))
    return (states + layer.mlp(layer.post_attention_layernorm(states)))[:, None]


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to `(N, heads, T, d)`, by angles `(N, T, d)`."""
    first, second = states.chunk(2, dim=-1)
    return states * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


__all__ = ["SharedPrefix", "is_readable", "make_readable", "shared_prefix_length", "similar_lengths"]
