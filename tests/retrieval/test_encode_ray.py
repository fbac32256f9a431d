"""Ray Data reads sources in parallel and encodes a collection on two local workers, one of which is killed."""

import io
import json
import os
import signal
import sys
import tarfile
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from conjoin.data import load_pairs
from conjoin.retrieval import Collection, encode_collection, encode_on_ray, encode_ray
from conjoin.retrieval.collection_table import open_table
from tiny_encoder import tiny_encoder, tiny_rows

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")
pytestmark = pytest.mark.slow


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
def small_tasks(monkeypatch):
    monkeypatch.setattr(encode_ray, "_ROWS_PER_TASK", 3)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of photos with texts, and tables that list them."""
    folder = tmp_path_factory.mktemp("photos")
    rows = []
    for number, row in enumerate(tiny_rows()):
        name = f"{number:02}.png"
        (row["image"] or Image.new("RGB", (4, 4), (number, 0, 9))).save(folder / name)
        rows.append({"id": f"{number:03}", "file_name": name, "text": row["text"] or f"2020-01-{number + 1:02}",
                     "price": number + number % 2 / 2})  # fmt: skip
        (folder / name).with_suffix(".txt").write_text(rows[-1]["text"])
    for name, chosen in (
        ("photos.jsonl", rows),
        ("bad.jsonl", [*rows[:9], {**rows[9], "file_name": "x"}, *rows[10:]]),
    ):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in chosen))
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    (folder / "photos.csv").write_text("\n".join(lines) + "\n")
    embedded = [
        {**row, "image": {"bytes": (folder / row.pop("file_name")).read_bytes(), "path": None}} for row in rows
    ]
    table = datasets.Dataset.from_list(embedded).cast_column("image", datasets.Image())
    pa.parquet.write_table(table.with_format("arrow")[:], folder / "photos.parquet", row_group_size=6)
    for shard in range(3):
        with tarfile.open(folder / f"shard-{shard}.tar", "w") as file:
            for row in embedded[shard::3]:
                for suffix, content in (("png", row["image"]["bytes"]), ("txt", row["text"].encode())):
                    member = tarfile.TarInfo(f"{row['id']}.{suffix}")
                    member.size = len(content)
                    file.addfile(member, io.BytesIO(content))
    return folder


def contents(collection):
    """All that a collection has of its rows but the vectors, and the vectors, both in the order of the ids."""
    ids = sorted(collection.ids)
    return ids, collection.rows(ids), collection.vectors(ids)


def assert_same(found, expected):
    for one, other in zip(contents(found)[:2], contents(expected)[:2], strict=True):
        assert one == other
    assert np.abs(contents(found)[2] - contents(expected)[2]).max() < 1e-6


SOURCES = {
    "csv": ("photos.csv", {"keep": ["price:number"], "id_column": ""}),
    "jsonl": ("photos.jsonl", {"keep": ["price"]}),
    "webdataset": ("shard-*.tar", {}),
    "folder": ("", {}),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_sources(cluster, photos, tmp_path, kind):
    name, options = SOURCES[kind]
    data = str(photos / name)
    rows = load_pairs(data, streaming=True, **options)
    expected = encode_collection(rows, tiny_encoder(), tmp_path / "one")
    found = encode_on_ray(data, tiny_encoder_on, tmp_path / "ray", workers=1, reading=options)
    assert found.changes == expected.changes and found.schema.equals(expected.schema)
    assert_same(found, expected)
    again = encode_collection(rows, tiny_encoder(), tmp_path / "ray")
    assert again.changes.encoded == again.changes.replaced == 0


def tiny_encoder_on(device):
    return tiny_encoder()


def test_a_killed_worker(cluster, photos, tmp_path):
    data = photos / "photos.parquet"
    expected = encode_collection(load_pairs(data, keep=["price"]), tiny_encoder(), tmp_path / "one")
    load = partial(faulty_encoder, tmp_path / "killed", kill)
    found = encode_on_ray(data, load, tmp_path / "ray", workers=2, reading={"keep": ["price"]})
    assert (tmp_path / "killed").exists()
    assert_same(found, expected)
    found.verify()


def test_an_interrupted_run_resumes_and_later_ones_update(cluster, photos, tmp_path):
    data = photos / "photos.jsonl"
    load = partial(faulty_encoder, tmp_path / "stopped", stop)
    with pytest.raises(Exception, match="the power"):
        encode_on_ray(data, load, tmp_path / "ray", workers=1)
    with pytest.raises(ValueError, match="is unfinished"):
        Collection(tmp_path / "ray")
    before = open_table(tmp_path / "ray").count_rows()
    collection = encode_on_ray(data, load, tmp_path / "ray", workers=2)
    assert collection.changes.unchanged == before > 0 and collection.changes.encoded == 23 - before
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    rows[4]["text"] = "another"
    changed = photos / "changed.jsonl"
    changed.write_text("".join(json.dumps(row) + "\n" for row in rows[2:]))
    collection = encode_on_ray(changed, load, tmp_path / "ray", workers=1, sync=True)
    assert collection.changes == (0, 1, 2, 20, 0, 1)
    expected = encode_collection(load_pairs(changed), tiny_encoder(), tmp_path / "one")
    assert_same(collection, expected)


def test_rows_that_cannot_be_used(cluster, photos, tmp_path):
    data = photos / "bad.jsonl"
    with pytest.raises(FileNotFoundError, match=r"row 9 \(id '009'\): image '.*x': no such file"):
        encode_on_ray(data, tiny_encoder_on, tmp_path / "ray")
    found = encode_on_ray(data, tiny_encoder_on, tmp_path / "ray", workers=1, on_error="skip")
    expected = encode_collection(load_pairs(data, on_error="skip"), tiny_encoder(), tmp_path / "one", on_error="skip")
    assert found.skipped == [row._replace(row=None) for row in expected.skipped] and found.changes.skipped == 1
    assert_same(found, expected)


def test_errors(cluster, photos, tmp_path):
    text = (photos / "photos.csv").read_text()
    twice = photos / "twice.csv"
    twice.write_text(text.replace("\n020,", "\n001,"))
    with pytest.raises(ValueError, match=r"the id '001' occurs twice"):
        encode_on_ray(twice, tiny_encoder_on, tmp_path / "twice")
    with pytest.raises(ValueError, match="is unfinished"):
        Collection(tmp_path / "twice")
    with pytest.raises(OSError, match="No space left on device"):
        encode_on_ray(photos / "photos.csv", partial(faulty_encoder, tmp_path / "full", fill_disk), tmp_path / "disk")
    with pytest.raises(ValueError, match="its rows have no numbers: name a column by --id-column"):
        encode_on_ray(photos / "photos.parquet", tiny_encoder_on, tmp_path / "numbers", reading={"id_column": ""})
    with pytest.raises(ValueError, match=r"a worker loaded another model: it has .*fingerprint"):
        encode_on_ray(photos / "photos.csv", lambda device: tiny_encoder(seed=int(device is None)), tmp_path / "model")
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        encode_on_ray(photos, tiny_encoder_on, tmp_path, workers=0)
