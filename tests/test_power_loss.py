"""What a power loss leaves: what gets a name is on the disk before, and the name is there before work goes on.

Collections rely on Lance.
"""

import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from conjoin.evaluation import Results
from conjoin.hub import export
from conjoin.retrieval.faiss_index import FaissIndex
from conjoin.retrieval.mining import write_mined
from conjoin.storage import make_folder, write_text

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="names of open files are in /proc")


def write_index(folder):
    index = pytest.importorskip("faiss").IndexFlatIP(2)
    index.add(np.ones((3, 2), np.float32))
    settings = {"version": 1, "factory": "Flat", "probes": 1}
    FaissIndex(index, pa.array(["a", "b", "c"]), settings).write(folder / "faiss")


def write_negatives(folder):
    found = [[{"miner": "m", "rank": 1, "score": 0.5}]]
    write_mined(folder / "negatives.parquet", [[{"id": "a", "negatives": ["b"], "found_by": found}]])


def write_new_folders(folder):
    make_folder(folder / "a" / "b")
    write_text(folder / "a" / "b" / "rows.jsonl", "rows")


WRITERS = {
    "faiss": write_index,
    "folders": write_new_folders,
    "mined": write_negatives,
    "model": None,
    "results": lambda folder: Results("title", "summary", 0).save(folder),
}


def unsafe(folder, write, monkeypatch):
    """Write, and return what a power loss could lose: what is named before it is flushed, and names themselves."""
    flushed, named, wrong = {}, set(), []
    fsync, replace, mkdir = os.fsync, os.replace, os.mkdir

    def noted_fsync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        flushed[path] = path.stat().st_mtime_ns
        named.difference_update({each for each in named if each.parent == path})
        fsync(descriptor)

    def noted_replace(source, target):
        parts = [Path(source), *Path(source).rglob("*")]
        wrong.extend(f"{part} is not flushed" for part in parts if flushed.get(part) != part.stat().st_mtime_ns)
        replace(source, target)
        named.add(Path(target))

    def noted_mkdir(path, *args, **options):
        mkdir(path, *args, **options)
        if "conjoin-tmp" not in str(path):
            named.add(Path(path))

    with monkeypatch.context() as patch:
        for name, call in (("fsync", noted_fsync), ("replace", noted_replace), ("mkdir", noted_mkdir)):
            patch.setattr(os, name, call)
        write(folder)
    return wrong + [f"the name {name} is not flushed" for name in named]


@pytest.mark.parametrize("kind", WRITERS)
def test_what_gets_a_name_is_on_the_disk(kind, tmp_path, monkeypatch, own_export):
    def write(folder):
        if kind == "model":
            export(*own_export[1:], folder / "runs" / "model")
        else:
            WRITERS[kind](folder)

    assert unsafe(tmp_path, write, monkeypatch) == []
    monkeypatch.setattr("conjoin.storage.files.flush", lambda path: None)
    assert unsafe(tmp_path / "without", lambda folder: folder.mkdir() or write(folder), monkeypatch)
