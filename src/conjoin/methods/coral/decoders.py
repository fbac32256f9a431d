"""The decoders of Coral: one BERT layer each that predicts a target's tokens from a state and the unmasked tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD_WIDTH = 64
"""Width of an attention head in BERT."""

INITIAL_DEVIATION = 0.02
"""Standard deviation of initial weights in BERT."""


class ReconstructionDecoder(nn.Module):
    """One randomly initialised BERT layer with cross-attention (Coral Eq. 3).

    Queries are a state plus the embedding of the position to predict; keys and values are the tokens, each plus the
    embedding of its position, and the state. Eq. 3 names position embeddings behind the queries; RetroMAE, which it
    builds on, adds them to both. Each position is predicted on its own, so only wanted positions are computed.

    Args:
        width: D.
        positions: Largest number of tokens.
        dropout: Dropout rate (BERT: 0.1).
    """

    def __init__(self, width: int, positions: int = 1024, dropout: float = 0.1) -> None:
        super().__init__()
        heads = next(count for count in range(max(width // HEAD_WIDTH, 1), 0, -1) if width % count == 0)
        self.positions = nn.Embedding(positions, width)
        self.attention = nn.MultiheadAttention(width, heads, dropout, batch_first=True)
        self.attention_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.output_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=INITIAL_DEVIATION)

    def forward(self, state: Tensor, tokens: Tensor, attended: Tensor, wanted: Tensor) -> Tensor:
        """Predict the tokens at `wanted`.

        Args:
            state: `(N, D)`.
            tokens: `(N, T, D)` input embeddings.
            attended: `(N, T)` bool, the tokens that are keys (M of Eq. 3); masked tokens and padding are not.
            wanted: `(N, Q)` positions in `tokens`.

        Returns:
            `(N, Q, D)`.

        Raises:
            ValueError: There are more tokens than positions.
        """
        if tokens.shape[1] > self.positions.num_embeddings:
            raise ValueError(
                f"a target has {tokens.shape[1]} tokens, but decoder_positions={self.positions.num_embeddings}; raise "
                "it, or lower max_pixels or max_text_length"
            )
        queries = state[:, None] + self.positions(wanted)
        keys = torch.cat([tokens + self.positions.weight[: tokens.shape[1]], state[:, None]], dim=1)
        masked = F.pad(~attended, (0, 1))  # the state is attended always
        attention, _ = self.attention(queries, keys, keys, key_padding_mask=masked, need_weights=False)
        states = self.attention_norm(queries + self.dropout(attention))
        output: Tensor = self.output_norm(states + self.dropout(self.feed_forward(states)))
        return output
