"""The vision-language encoder E_VL of the joint encoder."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .configuration_joint_encoder import JointEncoderConfig


class VLAttentionLayer(GradientCheckpointingLayer):
    """Pre-norm attention block that can compute the leading positions only (the last layer computes CLS alone)."""

    def __init__(self, config: JointEncoderConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.num_heads, self.dropout = config.num_attention_heads, config.attention_dropout
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.fc1 = nn.Linear(width, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, width)

    def forward(
        self, hidden: Tensor, key_bias: Tensor, num_queries: int | None = None, return_attention: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from the first `num_queries` positions of `hidden` (all by default) to all positions.

        Args:
            hidden: `(N, S, d)`.
            key_bias: `(N, 1, 1, S)` added to the attention logits: the log of each key's weight.
            num_queries: Number of leading positions `Q` to compute.
            return_attention: Also return the attention weights, computed without PyTorch's fused kernel.

        Returns:
            The states `(N, Q, d)` and the attention weights `(N, heads, Q, S)` or None.
        """
        queries = hidden[:, :num_queries]
        normed = self.norm1(hidden)
        q, k, v = (
            states.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for states in (self.q_proj(normed[:, :num_queries]), self.k_proj(normed), self.v_proj(normed))
        )
        dropout, weights = self.dropout if self.training else 0.0, None
        if return_attention:
            weights = (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) + key_bias.to(q.dtype)).softmax(-1)
            attended = F.dropout(weights, dropout) @ v
        else:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=key_bias.to(q.dtype), dropout_p=dropout)
        queries = queries + self.o_proj(attended.transpose(1, 2).flatten(2))
        return queries + self.fc2(F.gelu(self.fc1(self.norm2(queries)))), weights


class VLEncoder(nn.Module):
    """E_VL: bidirectional attention over [CLS, tokens]; returns the state of the learned CLS."""

    def __init__(self, config: JointEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.cls_token = nn.Parameter(torch.zeros(config.hidden_size))
        self.layers = nn.ModuleList(VLAttentionLayer(config) for _ in range(config.num_vl_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, tokens: Tensor, weights: Tensor, return_attention: bool = False) -> Tensor:
        """Encode `tokens` `(N, S, d)`, weighted as keys by `weights` `(N, S)`, none negative, into `(N, d)`.

        Every layer adds log w to the attention logits of a key of weight w, so a token of weight 0 has no effect (the
        mask of Eq. 2). CLS is never masked: in an item without tokens, CLS attends to itself.
        """
        weights = F.pad(weights, (1, 0), value=1.0)
        hidden = torch.cat([self.cls_token.expand(tokens.shape[0], 1, -1).to(tokens.dtype), tokens], dim=1)
        key_bias = weights.log()[:, None, None]
        for layer in self.layers[:-1]:
            hidden, _ = layer(hidden, key_bias, None, return_attention)
        hidden, _ = self.layers[-1](hidden, key_bias, 1, return_attention)
        return self.norm(hidden[:, 0])


def drop_tokens(tokens: Tensor, weights: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """Keep a random fraction `1 - rate` of each item's tokens (at least one) and pack them to save compute.

    Args:
        tokens: `(N, S, d)`.
        weights: `(N, S)`, zero where there is no token.
        rate: Fraction to drop, in [0, 1).

    Returns:
        Tokens `(N, S', d)` and weights `(N, S')`, `S' = ceil((1 - rate) * S)`.
    """
    exists = weights > 0
    num_kept = ((1 - rate) * exists.sum(1)).ceil().long()
    width = math.ceil((1 - rate) * tokens.shape[1])
    order = (torch.rand_like(weights) + exists).topk(width, dim=1).indices  # existing tokens first, in random order
    kept = torch.arange(width, device=tokens.device) < num_kept[:, None]
    return tokens.gather(1, order[..., None].expand(-1, -1, tokens.shape[-1])), weights.gather(1, order) * kept


__all__ = ["VLAttentionLayer", "VLEncoder", "drop_tokens"]
