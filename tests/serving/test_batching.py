import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from conjoin.serving import ItemError
from conjoin.serving.batching import BusyError, MicroBatcher
from tiny_encoder import tiny_encoder


class Held:
    """An encoder whose batches wait until they are let go; it records their sizes."""

    def __init__(self):
        self.encoder, self.sizes = tiny_encoder(batch_size=64), []
        self.started, self.go = threading.Event(), threading.Event()

    def encode(self, items, **options):
        self.sizes.append(len(items))
        self.started.set()
        assert self.go.wait(20)
        return self.encoder.encode(items, **options)


def together(batcher, held, requests):
    """Send a first request, the others while it is held, then let go; what each got, an error included."""

    def one(items):
        try:
            return batcher.encode(items)
        except (ValueError, RuntimeError) as error:
            return error

    with ThreadPoolExecutor(len(requests)) as pool:
        first = pool.submit(one, requests[0])
        assert held.started.wait(20)
        others = [pool.submit(one, items) for items in requests[1:]]
        while len(batcher._requests) + sum(other.done() for other in others) < len(others):
            pass
        held.go.set()
        return [first.result(20), *(other.result(20) for other in others)]


@pytest.mark.parametrize("batch", [64, 3])
def test_requests_that_wait_share_a_batch_and_get_their_own_vectors(batch):
    held = Held()
    requests = [["a"], ["b", "c"], ["d"], ["e", "f", "g"]]
    answers = together(MicroBatcher(held, batch), held, requests)
    assert held.sizes == [1, 6] if batch == 64 else held.sizes[0] == 1 and max(held.sizes) <= 3
    for items, vectors in zip(requests, answers, strict=True):
        np.testing.assert_allclose(vectors, held.encoder.encode(items), atol=1e-6)


def test_an_item_that_cannot_be_used_fails_its_own_request_and_is_named():
    held = Held()
    good, bad, other = together(MicroBatcher(held), held, [["a"], ["b", {"image": "none.png"}], ["c"]])
    assert isinstance(bad, ItemError)
    assert bad.item == 1
    assert bad.problem.startswith("image 'none.png'") or "no such file" in bad.problem
    assert good.shape == other.shape == (1, 8)


def test_a_model_that_fails_fails_only_whom_it_concerns():
    held = Held()
    encode = held.encoder.encode

    def fail(items, **options):
        if "bad" in items:
            raise RuntimeError("out of memory")
        return encode(items, **options)

    held.encoder.encode = fail
    good, bad, other = together(MicroBatcher(held), held, [["a"], ["bad"], ["c"]])
    assert str(bad) == "out of memory"
    assert good.shape == other.shape == (1, 8)


def test_too_many_waiting_items_are_refused():
    held = Held()
    answers = together(MicroBatcher(held, most=2), held, [["a"], ["b", "c"], ["d"]])
    refused = [answer for answer in answers if isinstance(answer, BusyError)]
    assert len(refused) == 1
    with pytest.raises(BusyError, match="2 items wait for the model"):
        raise refused[0]


def test_a_stop_refuses_what_waits_and_what_is_computed():
    held = Held()
    batcher = MicroBatcher(held)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(batcher.encode, ["a"])
        assert held.started.wait(20)
        waiting = pool.submit(batcher.encode, ["b"])
        while not batcher.waiting:
            time.sleep(0.01)
        batcher.stop()
        for request in (running, waiting, pool.submit(batcher.encode, ["c"])):
            with pytest.raises(BusyError, match="the server stops"):
                request.result(20)
    held.go.set()
