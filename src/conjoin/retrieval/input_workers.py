"""Processes that make model inputs ahead of the model."""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch
import torch.multiprocessing

_BATCHES_AHEAD = 2
_make: Callable[[Any], Any] | None = None


class InputWorkers:
    """Worker processes, which stay from one call to the next; tensors come back in shared memory.

    The processes end when this object is deleted.

    Args:
        make: What the workers compute; they get it once.
        count: How many there are.
    """

    def __init__(self, make: Callable[[Any], Any], count: int) -> None:
        context = torch.multiprocessing.get_context()
        self.count, self._make = count, make
        self._pool = ProcessPoolExecutor(count, context, _begin, (make,))

    def map(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Compute `make` of each batch, in order, a few batches ahead of the caller.

        Raises:
            RuntimeError: A worker process died.
        """
        pending: deque[tuple[Any, Future[Any]]] = deque()
        try:
            for batch in batches:
                pending.append((batch, self._pool.submit(_run, batch)))
                if len(pending) > _BATCHES_AHEAD * self.count:
                    yield self._result(*pending.popleft())
            while pending:
                yield self._result(*pending.popleft())
        except BrokenProcessPool as error:
            raise RuntimeError("a worker process died; if memory ran out, use fewer workers") from error
        finally:
            for _, future in pending:
                future.cancel()

    def _result(self, batch: Any, future: Future[Any]) -> Any:  # noqa: ANN401
        """Wait for a result; what cannot be sent to another process is computed, or fails, in this one."""
        try:
            return future.result()
        except BrokenProcessPool:
            raise
        except Exception:  # of pickling, of any kind; an error of `make` is raised again here
            return self._make(batch)


def _begin(make: Callable[[Any], Any]) -> None:
    """Prepare a worker: it is one of several, so it runs one thread."""
    global _make
    torch.set_num_threads(1)
    _make = make
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when the one that started it is killed, since it holds copies of its locks."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(batch: Any) -> Any:  # noqa: ANN401
    if _make is None:
        raise RuntimeError("the worker process was not prepared")
    return _make(batch)
