"""Two local workers of Ray encode as one process does, also when one of them is killed."""

import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

from conjoin.cli.main import run_command
from conjoin.retrieval import Collection, encode_collection, encode_on_ray, encode_ray
from conjoin.retrieval.collection import open_table
from tiny_collections import state
from tiny_encoder import tiny_encoder, tiny_rows

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow


def tiny_encoder_on(device):
    return tiny_encoder()


def faulty_encoder(marker, fault, device):
    """An encoder that has a fault at its third batch, once, if it is that of a worker of Ray."""
    encoder = tiny_encoder()
    forward = encoder.model.forward

    def faulty(text, pixels):
        if len(encoder.model.batches) == 2 and device is None and not Path(marker).exists():
            Path(marker).touch()
            fault()
        return forward(text, pixels)

    encoder.model.forward = faulty
    return encoder


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    raise KeyError("the power")


def fill_disk():
    raise OSError(28, "No space left on device")


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        patch.setenv("RAY_worker_niceness", "0")  # with its 15, workers wait for the other tests
        ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False, configure_logging=False)
        yield
        ray.shutdown()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(encode_ray, "BATCHES_AT_ONCE", 1)


def test_equals_one_process(cluster, tmp_path):
    rows = [row | {"metadata": {"price": number}} for number, row in enumerate(tiny_rows())]
    expected = encode_collection(rows, tiny_encoder(), tmp_path / "one")
    found = encode_on_ray(rows, tiny_encoder_on, tmp_path / "ray", workers=1)
    assert found.changes == expected.changes and found.schema.equals(expected.schema)
    assert found.ids == expected.ids and state(found.uri) == state(expected.uri)


def test_a_killed_worker(cluster, tmp_path):
    load = partial(faulty_encoder, tmp_path / "killed", kill)
    found = encode_on_ray(tiny_rows(), load, tmp_path / "ray", workers=2)
    assert (tmp_path / "killed").exists()
    assert state(found.uri) == state(encode_collection(tiny_rows(), tiny_encoder(), tmp_path / "one").uri)
    found.verify()


def test_an_interrupted_run_resumes_and_later_ones_update(cluster, tmp_path):
    load = partial(faulty_encoder, tmp_path / "stopped", stop)
    with pytest.raises(KeyError, match="the power"):
        encode_on_ray(tiny_rows(), load, tmp_path / "ray", workers=1)
    with pytest.raises(ValueError, match="is unfinished"):
        Collection(tmp_path / "ray")
    before = open_table(tmp_path / "ray").count_rows()
    collection = encode_on_ray(tiny_rows(), load, tmp_path / "ray", workers=2)
    assert collection.changes.unchanged == before > 0 and collection.changes.encoded == 23 - before
    rows = tiny_rows()[2:]
    rows[4]["text"] = "another"
    bad = {"id": "bad", "problem": "it is broken"}
    collection = encode_on_ray([*rows, bad], load, tmp_path / "ray", workers=1, sync=True, on_error="skip")
    assert collection.changes == (0, 1, 2, 20, 1, 1)
    assert [(row.row, row.id, row.reason) for row in collection.skipped] == [(21, "bad", "it is broken")]
    assert state(collection.uri) == state(encode_collection(rows, tiny_encoder(), tmp_path / "one").uri)


def test_the_command(cluster, tiny_checkpoints, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.csv").write_text("id,text\na,red\nb,blue\n")
    for more in ([], ["--ray", "1"]):
        command = ["encode", str(tiny_checkpoints["clip"]), "data.csv", "--out", f"of{len(more)}", "--only", "text"]
        run_command([*command, "--no-bf16", "--device", "cpu", "--quiet", *more])
    assert state("of2") == state("of0")


def test_errors(cluster, tmp_path):
    for rows, load, message in (
        ([*tiny_rows(), tiny_rows()[1]], tiny_encoder_on, "row 23: the id 'row/1' occurs twice"),
        (tiny_rows(), partial(faulty_encoder, tmp_path / "full", fill_disk), "No space left on device"),
        ([{"id": "a", "image": "no.png"}], tiny_encoder_on, "item 'a': .*no.png"),
        (tiny_rows(), lambda device: tiny_encoder(seed=int(device is None)), "another model: it has .*fingerprint"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            encode_on_ray(rows, load, tmp_path / "it")
        with pytest.raises((ValueError, FileNotFoundError), match=r"is unfinished|there is no collection"):
            Collection(tmp_path / "it")
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        encode_on_ray([], tiny_encoder_on, tmp_path, workers=0)
