"""Writers that are killed, out of space or interrupted at some system calls: a small `reliability.py`.

Training is in `tests/cli/test_train_command.py`, pushing in `tests/hub`.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from PIL import Image

from conjoin.retrieval import Collection, Miner, encode_collection, load_mined, mine_hard_negatives, open_collection
from tiny_collections import state
from tiny_encoder import tiny_encoder, tiny_rows

BENCHMARKS = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="system calls of Linux on x86-64"
    ),
]


def encode(out):
    encode_collection(tiny_rows(), tiny_encoder(), out)


def sync(out):
    encode_collection(tiny_rows()[2:], tiny_encoder(), out, sync=True)


def index(out):
    Collection(out).index("ivf_flat", probes=100)


def faiss(out):
    Collection(out).index_faiss("Flat")


def mine(out):
    pictures = [Image.new("RGB", (4, 4), (9 * number, 255 - 20 * number, 99)) for number in range(12)]
    rows = [{"id": f"{number}", "image": each, "text": f"t {number}"} for number, each in enumerate(pictures)]
    miners = [Miner("cross", "m", "text", "image", duplicate_above=1.1)]
    options = {"load_encoder": lambda name: tiny_encoder(), "k": 2}
    mine_hard_negatives(Dataset.from_list(rows), miners, out, **options)


def read_index(out):
    """The rows, and whether there is an index, whose measured recall is written last."""
    return state(out), bool(Collection(out).metadata["index"])


def read_mined(out):
    return [*load_mined(out).items()], pq.read_table(out / "negatives.parquet").to_pylist()


def read_faiss(out):
    collection = open_collection(out)
    return state(out), collection.rank(tiny_encoder().encode(["a", "b"]), 9).ids, collection.faiss is None


WRITERS = {  # what writes, what reads, what was written before
    "encode": (encode, state, None),
    "sync": (sync, state, encode),
    "index": (index, read_index, encode),
    "faiss": (faiss, read_faiss, encode),
    "mine": (mine, read_mined, None),
}
COLLECTIONS = {"encode", "sync", "index", "faiss"}


def digests(folder, name):
    """By name the contents; of a collection, whose files Lance names, `read` compares what they hold."""
    paths = (
        path for path in folder.rglob("*") if path.is_file() and not {name, *path.parts} & {*COLLECTIONS, "embeddings"}
    )
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def stop(name, work):
    """Stop a writer at five moments; all that uses Lance is a child, as a process that used it cannot be forked."""
    import faults

    import conjoin.retrieval.encode

    conjoin.retrieval.encode.BATCHES_AT_ONCE = conjoin.retrieval.encode._ROWS_PER_COMMIT = 1
    write, read, before = WRITERS[name]
    earlier, out = work / "earlier", work / "out"
    earlier.mkdir()
    if before is not None:
        faults.in_child(lambda: before(earlier))

    def found(folder=out):
        return faults.in_child(lambda: read(folder))

    def run(fault=None):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(earlier, out)
        return faults.run_traced(lambda: write(out) or 0, (out,), work / "log", fault)

    whole = run()
    assert whole.code == 0, whole.output
    reference, right, count = digests(out, name), found(), len(whole.events)
    states = [right] if before is None else [right, found(earlier)]
    for place, kind in enumerate(("after", "halfway", "full", "before", "interrupt")):
        number = (2 * place + 1) * count // 10
        stopped = run(faults.Fault(number, kind))
        if stopped.code == 0:  # it came within a destructor, which Python goes past, or where a failure does no harm
            assert kind in ("interrupt", "full") and found() == right
        else:
            assert stopped.code == {"full": 1, "interrupt": 1}.get(kind, -9), stopped.output
        try:
            assert found() in states, whole.events[number]
        except faults.ChildError as error:
            assert error.kind in ("FileNotFoundError", "ValueError", "DamagedError"), error
            assert before is None, "what was there must stay"
        faults.in_child(lambda: write(out))
        assert digests(out, name) == reference, whole.events[number]
        assert found() == right
        assert not list(out.glob("*.conjoin-tmp"))


@pytest.mark.parametrize("name", WRITERS)
def test_stopped(name, tmp_path):
    """Nothing half-written is read, and the same again ends with the same content and no unfinished file."""
    if name == "faiss":
        pytest.importorskip("faiss")
    command = [sys.executable, "-W", "ignore", __file__, name, tmp_path]
    paths = os.pathsep.join([str(BENCHMARKS), *sys.path])
    ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


if __name__ == "__main__":
    torch.set_num_threads(1)
    stop(sys.argv[1], Path(sys.argv[2]))
