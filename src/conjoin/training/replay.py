"""Repeat a computation with the same random numbers, and reuse values of its first pass."""

from collections.abc import Callable
from typing import Any

import torch


class RandomState:
    """A snapshot of the random state of the CPU and one GPU, to repeat dropout exactly."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Reset the generators to the recorded state."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


class Replay:
    """Values of the first pass over some rows, for the second pass. Create it just before the first pass.

    Args:
        device: Device of both passes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.start = device, RandomState(device)
        self._kept: dict[str, tuple[Any, RandomState]] = {}

    def once(self, name: str, compute: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Return `compute()`; in the second pass return the stored value and restore the random state after it."""
        if name in self._kept:
            value, state = self._kept.pop(name)
            state.restore()
            return value
        value = compute()
        self._kept[name] = value, RandomState(self.device)
        return value
