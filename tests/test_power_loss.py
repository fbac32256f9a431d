"""A power loss at any moment of writing: a reader finds the old state, the new one, or an error, never a mixture.

Collections rely on Lance.
"""

import copy
import shutil

import numpy as np
import pyarrow as pa
import pytest
import torch

from conjoin.evaluation.results import Results
from conjoin.hub import export, load_model
from conjoin.retrieval.faiss_index import FaissIndex
from conjoin.retrieval.mining.negatives import write_mined
from conjoin.storage import publish_folder, write_text
from power_loss import Disk, write_tree
from tiny_caches import read_mined

pytestmark = pytest.mark.slow


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def make_model(folder, number, model):
    own, processor = copy.deepcopy(model[0]), model[1]
    with torch.no_grad():
        next(own.parameters()).fill_(number)
    export(own, processor, folder / "runs" / "model", {"query": f"Number {number}: "})


def read_model(folder):
    load_model(folder / "runs" / "model")
    return files(folder / "runs" / "model")


def make_mined(folder, number, model):
    found = [[{"miner": "m", "rank": 1, "score": number / 2}]]
    write_mined(folder / "negatives.parquet", [[{"id": f"a{number}", "negatives": ["b"], "found_by": found}]])


def make_results(folder, number, model):
    Results(f"title {number}", "summary", 0).save(folder / "results.json")


def make_dataset(folder, number, model):
    partial = folder / "data.partial"
    (partial / "images" / "a").mkdir(parents=True)
    (partial / "images" / "a" / "1.png").write_bytes(b"picture")
    write_text(partial / "rows.jsonl", "rows")
    publish_folder(partial, folder / "data")


def read_dataset(folder):
    if not (folder / "data").is_dir():
        raise FileNotFoundError("no data")
    return files(folder / "data")


def make_faiss(folder, number, model):
    faiss = pytest.importorskip("faiss")
    index = faiss.IndexFlatIP(2)
    index.add(np.full((3, 2), number, np.float32))
    settings = {"version": 1, "factory": "Flat", "probes": number}
    FaissIndex(index, pa.array(["a", "b", "c"]), settings).write(folder)


def read_faiss(folder):
    index = FaissIndex.open(folder, 1)
    if index is None:
        raise FileNotFoundError("no index")
    return index.settings, index.index.reconstruct_n(0, 3).tolist(), index.ids.to_pylist()


KINDS = {  # what writes, what reads, whether the old state is there until the new one is
    "dataset": (make_dataset, read_dataset, None),
    "faiss": (make_faiss, read_faiss, False),
    "mined": (make_mined, read_mined, True),
    "model": (make_model, read_model, False),
    "results": (make_results, lambda folder: Results.load(folder / "results.json"), True),
}


def mixtures(kind, tmp_path, monkeypatch, model, has_old, flushes=True):
    """What a reader found and must not, by moment."""
    make, read, stays = KINDS[kind]
    folder, expected = tmp_path / "written", []
    folder.mkdir()
    if has_old:
        make(folder, 1, model)
        expected.append(read(folder))
    disk = Disk(folder, flushes)
    with disk.recording(monkeypatch):
        make(folder, 2, model)
    new, wrong = read(folder), []
    states = [(dict(tree), moment) for tree, moment in disk.states.items()]
    for tree, moment in [*states, (disk.lost(), "returning")]:
        left = tmp_path / "left"
        left.mkdir()
        write_tree(tree, left)
        try:
            found = read(left)
        except (FileNotFoundError, ValueError) as error:
            found = error
            if has_old and stays:
                wrong.append(f"{moment}: {error}")
        if found != new and (moment == "returning" or not (isinstance(found, Exception) or found in expected)):
            wrong.append(f"{moment}: {found!r:.200}")
        shutil.rmtree(left)
    return wrong


CASES = [(kind, has_old) for kind in KINDS for has_old in (False, True) if not (has_old and KINDS[kind][2] is None)]


@pytest.mark.parametrize(("kind", "has_old"), CASES)
def test_no_mixture(kind, has_old, tmp_path, monkeypatch, own_export):
    wrong = mixtures(kind, tmp_path, monkeypatch, own_export[1:], has_old)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_without_fsync_it_is_found(kind, tmp_path, monkeypatch, own_export):
    assert mixtures(kind, tmp_path, monkeypatch, own_export[1:], False, flushes=False)
