"""Writers that are killed, out of space or interrupted at some system calls: a small `benchmarks/reliability.py`.

Training is in `tests/training/test_run_folder.py`, pushing in `tests/hub`.
"""

import platform
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conjoin.retrieval.store_update import update_store
from datasets import Dataset
from PIL import Image

from conjoin.cli.main import main
from conjoin.retrieval import EmbeddingStore, Miner, encode_corpus, load_index, load_mined, mine_hard_negatives
from conjoin.storage import RowCache
from tiny_encoder import tiny_encoder, tiny_rows

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="system calls of Linux on x86-64"
)


@pytest.fixture
def faults(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import faults

    return faults


class Cache(RowCache):
    kind = "cache of numbers"
    remedy = "make it"


def encode(out, inputs):
    encode_corpus(tiny_rows(), tiny_encoder(), out, shard_size=9)


def update(out, inputs):
    update_store(tiny_rows()[2:], tiny_encoder(), out, sync=True)


def index(out, inputs):
    if main(["index", str(inputs), "--out", str(out)]) != 0:
        raise RuntimeError("conjoin index failed")


def mine(out, inputs):
    pictures = [Image.new("RGB", (4, 4), (9 * number, 255 - 20 * number, 99)) for number in range(12)]
    rows = [{"id": f"{number}", "image": each, "text": f"t {number}"} for number, each in enumerate(pictures)]
    miners = [Miner("cross", "m", "text", "image", duplicate_above=1.1)]
    options = {"load_encoder": lambda name: tiny_encoder(), "shard_size": 7, "k": 2}
    mine_hard_negatives(Dataset.from_list(rows), miners, out, **options)


def cache(out, inputs):
    def tensors(rows):
        return {"numbers": torch.tensor(rows) * 2}

    Cache.make(out, 8, 3, {"k": 1}, tensors, show_progress=False)


def read_store(out):
    store = EmbeddingStore.open(out)
    return store.ids, store.load()[1].tolist()


def read_index(out):
    index = load_index(out)
    return index.ids, index.search(tiny_encoder().encode(["a", "b"]), 9)[0]


def read_mined(out):
    mined = load_mined(out)
    return [(name, mined[name], mined.findings(name)) for name in mined]


def read_cache(out):
    cache = Cache(out)
    return [row["numbers"].item() for row in cache]


WRITERS = {  # what writes, what reads, what was written before
    "encode": (encode, read_store, None),
    "update": (update, read_store, encode),
    "index": (index, read_index, None),
    "index again": (index, read_index, index),
    "mine": (mine, read_mined, None),
    "cache": (cache, read_cache, None),
}


def digests(folder):
    """By name the contents; without names where these are numbers that may differ."""
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    if "update" not in folder.parent.name:
        return found
    return sorted(content for name, content in found.items() if name != "manifest.json")


@pytest.mark.parametrize("name", WRITERS)
def test_stopped(name, faults, tmp_path):
    """Nothing half-written is read, and the same again ends with the same files, no more."""
    write, read, before = WRITERS[name]
    inputs, earlier, out = tmp_path / "inputs", tmp_path / "earlier", tmp_path / "out"
    encode(inputs, None)
    earlier.mkdir()
    if before is not None:
        before(earlier, inputs)
        if name == "index again":
            update(inputs, None)

    def run(fault=None):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(earlier, out)
        return faults.run_traced(lambda: write(out, inputs) or 0, (out,), tmp_path / "log", fault)

    whole = run()
    assert whole.code == 0, whole.output
    reference, right, count = digests(out), read(out), len(whole.events)
    states = [right] if before is None else [right, read(earlier)]
    for place, kind in enumerate(("after", "halfway", "full", "before", "interrupt")):
        number = (2 * place + 1) * count // 10
        stopped = run(faults.Fault(number, kind))
        if kind == "interrupt" and stopped.code == 0:  # it came within a destructor, which Python goes past
            assert read(out) == right
        else:
            assert stopped.code == {"full": 1, "interrupt": 1}.get(kind, -9), stopped.output
        try:
            assert read(out) in states, whole.events[number]
        except (FileNotFoundError, ValueError):
            assert before is None, "what was there must stay"
        write(out, inputs)
        assert digests(out) == reference, whole.events[number]
        assert read(out) == right
