"""The processes of a launched run: how they find each other, and what they tell each other."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_LONGEST_WAIT = timedelta(days=30)
"""How long a process waits for another one, which may have far slower rows."""


def launched_processes() -> PartialState | None:
    """Connect to the other processes of `accelerate launch` or `torchrun`; None if this process was started alone.

    They meet over the CPU (gloo), whatever device each encodes on.

    Raises:
        ValueError: The environment does not name the processes with numbers that fit.
    """
    given = {name: os.environ[name] for name in _NUMBERS if name in os.environ}
    for name, value in given.items():
        if not value.isdecimal():
            raise ValueError(f"the environment variable {name} must be a number, got {value!r}")
    rank, count = int(given.get("RANK", 0)), int(given.get("WORLD_SIZE", 1))
    if rank >= max(count, 1):
        raise ValueError(f"the environment variable RANK must be below WORLD_SIZE, got {rank} of {count}")
    return PartialState(cpu=True, backend="gloo", timeout=_LONGEST_WAIT) if count > 1 else None


def wait(processes: PartialState | None) -> None:
    """Wait until all processes are here.

    Raises:
        ConnectionError: One of them has ended.
    """
    if processes is not None:
        _together(processes.wait_for_everyone)


def gather(processes: PartialState | None, report: dict[str, Any]) -> list[dict[str, Any]]:
    """The reports of all processes, by rank, once each has given its own.

    Raises:
        ConnectionError: One of them has ended.
    """
    if processes is None or processes.num_processes == 1:
        return [report]
    return list(_together(lambda: gather_object([report])))


def _together(call: Callable[[], Any]) -> Any:  # noqa: ANN401 - what the call returns
    try:
        return call()
    except RuntimeError as error:
        raise ConnectionError(
            "another process of this run has ended, see its error; run the same again, it resumes"
        ) from error
