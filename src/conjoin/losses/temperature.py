"""The temperature of a contrastive loss: fixed, or learned as CLIP does."""

import math

import torch
from torch import Tensor, nn

LOWEST, HIGHEST = 0.01, 1.0
"""The clamp of a learned temperature (CLIP)."""


class Temperature(nn.Module):
    """A positive scalar; learned in log space and clamped to `[LOWEST, HIGHEST]`.

    Args:
        value: The temperature, or its start.
        learn: Train it.

    Raises:
        ValueError: `value` is not positive, or outside the clamp of a learned temperature.
    """

    def __init__(self, value: float = 0.07, learn: bool = False) -> None:
        super().__init__()
        if not value > 0:
            raise ValueError(f"temperature must be positive, got {value}")
        if learn and not LOWEST <= value <= HIGHEST:
            raise ValueError(f"a learned temperature starts within [{LOWEST}, {HIGHEST}], got {value}")
        self.log_value = nn.Parameter(torch.tensor(math.log(value)), requires_grad=learn)

    def forward(self) -> Tensor:
        """The temperature, 0-d."""
        self.clamp()
        return self.log_value.exp().reshape(())  # FSDP needs a parameter with a dimension

    @torch.no_grad()
    def clamp(self) -> None:
        """Clamp the learned parameter itself: beyond the clamp it would have no gradient to come back with."""
        if self.log_value.requires_grad:
            self.log_value.clamp_(math.log(LOWEST), math.log(HIGHEST))
