"""Worker processes that make model inputs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conjoin.retrieval.input_workers import InputWorkers
from tiny_encoder import tiny_encoder


def number_and_process(batch):
    if batch == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return batch, os.getpid()


def test_results_come_in_order_from_the_same_processes_in_every_call():
    workers = InputWorkers(number_and_process, 2)
    found = [list(workers.map(range(20))) for _ in range(2)]
    assert [[number for number, _ in call] for call in found] == [list(range(20))] * 2
    processes = {process for call in found for _, process in call}
    assert os.getpid() not in processes and len(processes) <= 2
    for _ in workers.map(range(20)):
        break  # what is left is dropped
    assert [number for number, _ in workers.map(range(3))] == [0, 1, 2]


def test_what_cannot_be_sent_is_computed_here():
    assert next(InputWorkers(lambda batch: os.getpid(), 1).map([lambda: None])) == os.getpid()


def test_a_dead_worker_is_an_error_and_the_encoder_says_so():
    with pytest.raises(RuntimeError, match="a worker process died; if memory ran out, use fewer workers"):
        list(InputWorkers(number_and_process, 1).map([1, "die", 2]))


def test_an_encoder_keeps_its_workers_until_a_setting_changes():
    encoder = tiny_encoder(num_workers=1)
    first = encoder.encode(["one", "two"])
    kept = encoder._workers
    np.testing.assert_array_equal(encoder.encode(["one", "two"]), first)
    assert encoder._workers is kept
    encoder.batch_size = 1
    np.testing.assert_allclose(encoder.encode(["one", "two"]), first, atol=1e-6)
    assert encoder._workers is not kept


def test_a_damaged_picture_that_is_open_is_named(tmp_path):
    Image.effect_noise((64, 64), 50).save(tmp_path / "cut.png")
    data = (tmp_path / "cut.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"^item 'b': cannot read the image"):
        tiny_encoder(num_workers=1).encode(["text", Image.open(tmp_path / "cut.png")], ids=["a", "b"])


@pytest.mark.slow
def test_workers_end_with_a_killed_process():
    code = (
        "import multiprocessing, time\nfrom tiny_encoder import tiny_encoder\n"
        "encoder = tiny_encoder(num_workers=2)\nencoder.encode(['a', 'b', 'c', 'd'])\n"
        "print(*[child.pid for child in multiprocessing.active_children()], flush=True)\ntime.sleep(60)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as process:
        numbers = [int(word) for word in process.stdout.readline().split()]
        assert len(numbers) == 2
        process.kill()
    end = time.monotonic() + 20
    while any(is_running(number) for number in numbers):
        assert time.monotonic() < end
        time.sleep(0.05)


def is_running(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
