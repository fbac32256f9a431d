"""The same computation twice: its random draws, and what need not be computed again."""

from collections.abc import Callable
from typing import Any

import torch


class RandomState:
    """The random state of the CPU and of a GPU at one moment, to replay dropout exactly."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Set the generators back to the recorded state."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


class Replay:
    """What the first pass over some rows keeps for the second; made just before the first.

    Args:
        device: Where the passes run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.start = device, RandomState(device)
        self._kept: dict[str, tuple[Any, RandomState]] = {}

    def once(self, name: str, compute: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Return `compute()`, or what it gave in the first pass, with the random state that it left behind."""
        if name in self._kept:
            value, state = self._kept.pop(name)
            state.restore()
            return value
        value = compute()
        self._kept[name] = value, RandomState(self.device)
        return value
