"""Micro-batches: the items of concurrent requests in one forward pass."""

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from conjoin.serving.limits import ItemError

if TYPE_CHECKING:
    import numpy as np

    from conjoin.constants import Role
    from conjoin.processing import item_error
    from conjoin.retrieval import ItemEncoder


class BusyError(RuntimeError):
    """Too many items wait for the model, or the server stops."""


class _Request(NamedTuple):
    items: Sequence[Any]
    prompt: str | None
    role: "Role | None"
    answer: "Future[np.ndarray]"


class MicroBatcher:
    """Encodes the items of concurrent requests together, in one thread.

    A request never waits for others: what arrives while the model is busy is the next batch.

    Args:
        encoder: Its `batch_size` limits a forward pass.
        batch: Items taken together.
        most: Items that may wait; a request alone always may.
    """

    def __init__(self, encoder: "ItemEncoder", batch: int = 64, most: int = 1024) -> None:
        self.encoder, self.batch, self.most = encoder, batch, most
        self._requests: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._stopped = False
        self._lock = threading.Lock()
        self._model = ThreadPoolExecutor(1, "conjoin-batches")

    def encode(self, items: Sequence[Any], prompt: str | None = None, role: "Role | None" = None) -> "np.ndarray":
        """Encode the items of a request into `(N, D)`; blocks until that is done.

        Requests of one role share a forward pass.

        Raises:
            BusyError: Too many items wait, or `stop` was called.
            ItemError: An item cannot be used.
            ValueError: As `ItemEncoder.encode`.
        """
        request = _Request(items, prompt, role, Future())
        with self._lock:
            if self._stopped:
                raise BusyError("the server stops")
            if self._requests and self.waiting + len(items) > self.most:
                raise BusyError(f"{self.waiting} items wait for the model; try again later")
            self._requests.append(request)
        self._model.submit(self._run)
        return request.answer.result()

    def encode_query(self, items: Sequence[Any], prompt: str | None = None, **_: Any) -> "np.ndarray":  # noqa: ANN401
        """Encode queries: `search_items` takes a batcher for the encoder that it is."""
        return self.encode(items, prompt, "query")

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self.encoder, name)

    @property
    def waiting(self) -> int:
        """How many items wait for the model."""
        return sum(len(request.items) for request in [*self._requests])

    def stop(self) -> None:
        """Refuse what comes from now on, and what has no answer yet."""
        with self._lock:
            self._stopped = True
            for request in (*self._running, *self._requests):
                _fail(request, BusyError("the server stops"))
            self._requests.clear()

    def _run(self) -> None:
        """Answer the requests that wait, as many as one batch holds; it is called once for each request."""
        with self._lock:
            taken: list[_Request] = []
            count = 0
            while self._requests and (not taken or self._requests[0].role == taken[0].role):
                count += len(self._requests[0].items)
                if taken and count > self.batch:
                    break
                taken.append(self._requests.popleft())
            self._running = taken
        if taken:
            self._answer(taken)

    def _answer(self, requests: Sequence[_Request]) -> None:
        """Encode the items of some requests; an item that cannot be used fails its own request alone."""
        failed: dict[int, item_error.ItemError] = {}
        items = [item for request in requests for item in request.items]
        prompts = [request.prompt for request in requests for _ in request.items]
        how: dict[str, Any] = {"role": requests[0].role, "on_unusable": failed.__setitem__}
        try:
            vectors = self.encoder.encode(items, prompt=prompts, **how)
        except Exception as error:  # the model's own; whoever asked gets it
            for request in requests:
                if len(requests) > 1:
                    self._answer([request])
                else:
                    _fail(request, error)
            return
        start = 0
        for request in requests:
            end = start + len(request.items)
            wrong = next((index for index in range(start, end) if index in failed), None)
            if wrong is None:
                with suppress(InvalidStateError):
                    request.answer.set_result(vectors[start:end])
            else:
                _fail(request, ItemError(wrong - start, failed[wrong].message))
            start = end


def _fail(request: _Request, error: Exception) -> None:
    with suppress(InvalidStateError):  # answered, or refused by `stop`
        request.answer.set_exception(error)
