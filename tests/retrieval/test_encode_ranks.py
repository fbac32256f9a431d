"""Launched processes share the rows of one collection: the rows and the bits of one process, whichever is killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import tiny_ranks
from conjoin.retrieval import Collection, encode, encode_collection
from tiny_encoder import tiny_encoder

pytestmark = pytest.mark.slow
SCRIPT = tiny_ranks.__file__


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def start(*args):
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port(), SCRIPT]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    environment |= {"ACCELERATE_USE_CPU": "true"}
    return subprocess.Popen(
        [sys.executable, *command, *map(str, args)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finish(run, code=0):
    output, _ = run.communicate(timeout=300)
    assert (run.returncode == 0) == (code == 0), output
    return output


def contents(uri):
    """All rows by id, in the order of their ids; the vectors as bytes."""
    table = Collection(uri).table.to_arrow().sort_by("id")
    names = sorted(name for name in table.column_names if name != "vector")
    vectors = [np.array(vector, dtype=np.float32).tobytes() for vector in table["vector"].to_pylist()]
    return dict(zip(table["id"].to_pylist(), vectors, strict=True)), table.select(names).to_pylist()


def alone(uri, on_error="raise", sync=False, **options):
    return encode_collection(tiny_ranks.rows_of(**options), tiny_encoder(), uri, on_error=on_error, sync=sync)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(encode, "BATCHES_AT_ONCE", tiny_ranks.CHUNK)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    steps = ["one", "one", "one:changed=5", "one:changed=5,gone=4,sync=1", "bad:bad=6,skip=1", "late:price=9"]
    finish(start(folder, *steps))
    return folder


def reports(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_first_run_update_and_sync(launched, tmp_path):
    steps = [{}, {}, {"changed": 5}, {"changed": 5, "gone": 4, "sync": True}]
    expected = [alone(tmp_path / "one", **step).changes._asdict() for step in steps]
    found = reports(launched, "one")
    assert [report["changes"] for report in found] == expected and {report["processes"] for report in found} == {2}
    assert contents(launched / "one") == contents(tmp_path / "one")
    Collection(launched / "one").verify()


def test_skipped_rows(launched, tmp_path):
    one = alone(tmp_path / "bad", bad=6, on_error="skip")
    assert Collection(launched / "bad").skipped == one.skipped and [row.row for row in one.skipped] == [3, 9, 15, 21]
    assert contents(launched / "bad") == contents(tmp_path / "bad")


def test_columns_that_both_meet_at_once(launched, tmp_path):
    alone(tmp_path / "late", price=9)
    assert contents(launched / "late") == contents(tmp_path / "late")


def test_an_error_of_one_ends_all_and_publishes_nothing(tmp_path):
    assert "row 7: the id 'row/0' occurs twice" in finish(start(tmp_path, "one:twice=7"), code=1)
    with pytest.raises((ValueError, FileNotFoundError), match=r"is unfinished|there is no collection"):
        Collection(tmp_path / "one")


@pytest.mark.parametrize("killed", [0, 1])
def test_a_second_writer_is_refused_and_a_killed_run_is_resumed(tmp_path, killed):
    run = start(tmp_path, "one:delay=300")
    ranks = written(run, tmp_path / "one")
    with pytest.raises(ValueError, match="another process is writing into"):
        alone(tmp_path / "one")
    ranks[killed].send_signal(signal.SIGKILL)
    finish(run, code=1)
    with pytest.raises(ValueError, match="is unfinished"):
        Collection(tmp_path / "one")
    if killed:
        assert alone(tmp_path / "one").changes.unchanged > 0
    else:
        finish(start(tmp_path, "one"))
        assert reports(tmp_path, "one")[0]["changes"]["unchanged"] > 0
    alone(tmp_path / "alone")
    assert contents(tmp_path / "one") == contents(tmp_path / "alone")


def written(run, folder):
    """The processes of a run by rank, once it has written some rows."""
    deadline = time.monotonic() + 120
    while len(list(Path(folder).glob("data/*.lance/data/*"))) < 2 and time.monotonic() < deadline:
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.01)
    children = psutil.Process(run.pid).children()
    ranks = {int(child.environ()["RANK"]): child for child in children if SCRIPT in child.cmdline()}
    assert sorted(ranks) == [0, 1]
    return ranks
