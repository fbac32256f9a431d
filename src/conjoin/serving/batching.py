"""Micro-batches: the items of concurrent requests in one forward pass."""

import re
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from conjoin.serving.limits import ItemError

if TYPE_CHECKING:
    import numpy as np

    from conjoin.retrieval import ItemEncoder

_ITEM = re.compile(r"\Aitem '?\d+'?: ")


class BusyError(RuntimeError):
    """Too many items wait for the model."""


class _Request(NamedTuple):
    items: Sequence[Any]
    instruction: str | None
    answer: "Future[np.ndarray]"


class MicroBatcher:
    """Encodes the items of concurrent requests together, in one thread.

    A request never waits for others: what arrives while the model is busy is the next batch.

    Args:
        encoder: Its `batch_size` limits a forward pass.
        batch: Items taken together.
        waiting: Items that may wait.
    """

    def __init__(self, encoder: "ItemEncoder", batch: int = 64, waiting: int = 1024) -> None:
        self.encoder, self.batch, self.waiting = encoder, batch, waiting
        self._requests: deque[_Request] = deque()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="conjoin-batches", daemon=True).start()

    def encode(self, items: Sequence[Any], instruction: str | None = None) -> "np.ndarray":
        """Encode the items of a request into `(N, D)`; blocks until that is done.

        Raises:
            BusyError: Too many items wait.
            ItemError: An item cannot be used.
            ValueError: As `ItemEncoder.encode`.
        """
        request = _Request(items, instruction, Future())
        with self._changed:
            waiting = sum(len(other.items) for other in self._requests)
            if waiting and waiting + len(items) > self.waiting:
                raise BusyError(f"{waiting} items wait for the model; try again later")
            self._requests.append(request)
            self._changed.notify()
        return request.answer.result()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._requests)
                taken = [self._requests.popleft()]
                while self._requests and sum(len(one.items) for one in [*taken, self._requests[0]]) <= self.batch:
                    taken.append(self._requests.popleft())
            self._answer(taken)

    def _answer(self, requests: Sequence[_Request]) -> None:
        """Encode the items of some requests; an item that cannot be used fails its own request alone."""
        failed: dict[int, Exception] = {}
        items = [item for request in requests for item in request.items]
        told = [request.instruction for request in requests for _ in request.items]
        try:
            vectors = self.encoder.encode(items, instruction=told, on_unusable=failed.__setitem__)
        except Exception as error:  # the model's own; whoever asked gets it
            for request in requests:
                if len(requests) > 1:
                    self._answer([request])
                else:
                    request.answer.set_exception(error)
            return
        start = 0
        for request in requests:
            end = start + len(request.items)
            wrong = next((place for place in range(start, end) if place in failed), None)
            if wrong is None:
                request.answer.set_result(vectors[start:end])
            else:
                request.answer.set_exception(ItemError(wrong - start, _ITEM.sub("", str(failed[wrong]))))
            start = end
