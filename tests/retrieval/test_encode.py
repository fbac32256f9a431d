import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

import tiny_encoder as tiny
from conjoin.retrieval import EmbeddingStore, ItemEncoder, encode_corpus
from conjoin.retrieval.store import STORE
from conjoin.storage import read_manifest
from tiny_encoder import slow_rows, tiny_encoder, tiny_rows

SHARD = 5
ROWS = 23


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob("[!.]*"))}


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> dict[str, bytes]:
    directory = tmp_path_factory.mktemp("reference")
    encode_corpus(tiny_rows(), tiny_encoder(), directory, shard_size=SHARD)
    return contents(directory)


class Stop(Exception):  # noqa: N818
    pass


def stopping(rows, after: int):
    for number, row in enumerate(rows):
        if number == after:
            raise Stop
        yield row


class TestContents:
    def test_vectors_ids_and_manifest(self, tmp_path):
        encoder = tiny_encoder(name="tiny")
        store = encode_corpus(tiny_rows(), encoder, tmp_path / "new" / "store", shard_size=SHARD)
        assert [len(ids) for ids, _ in store] == [5, 5, 5, 5, 3]
        assert store.ids == [row["id"] for row in tiny_rows()] and len(store) == ROWS
        ids, embeddings = store.load()
        items = [{key: row[key] for key in ("image", "text") if row[key] is not None} for row in tiny_rows()]
        assert ids == store.ids and embeddings.dtype == np.float32
        np.testing.assert_allclose(embeddings, encoder.encode(items), atol=1e-6)
        assert store.model == encoder.identity and store.dimension == 8
        manifest = json.loads((tmp_path / "new" / "store" / "manifest.json").read_text())
        assert manifest["complete"] is True and manifest["files"][0]["file"] == "shard-00000.safetensors"
        assert [file["rows"] for file in manifest["files"]] == [5, 5, 5, 5, 3]
        key, details = manifest["key"], manifest["details"]
        assert key["dtype"] == "float32" and key["fingerprint"] == encoder.fingerprint and details["model"] == "tiny"
        assert details["parts"] == ["image", "text"]
        assert set(details["versions"]) == {"conjoin", "torch", "transformers"}

    def test_shards_are_plain_safetensors(self, reference, tmp_path):
        from safetensors.numpy import load

        arrays = load(reference["shard-00004.safetensors"])
        assert arrays["embeddings"].shape == (3, 8)
        assert json.loads(arrays["ids"].tobytes()) == ["row/20", "row/21", "row/22"]

    def test_float16(self, tmp_path):
        half = encode_corpus(tiny_rows(), tiny_encoder(), tmp_path, shard_size=SHARD, dtype="float16")
        assert all(embeddings.dtype == np.float16 for _, embeddings in half)
        assert half.load()[1].dtype == np.float32
        full = encode_corpus(tiny_rows(), tiny_encoder(), tmp_path / "full", shard_size=SHARD)
        np.testing.assert_allclose(half.load()[1], full.load()[1], atol=1e-3)

    def test_odd_ids_come_back(self, tmp_path):
        ids = ["ü/🙂", "with\nnewline", 'quote"', "\udc80", 7]
        store = encode_corpus([{"id": id_, "text": "x"} for id_ in ids], tiny_encoder(), tmp_path)
        assert store.ids == [*ids[:-1], "7"]

    def test_datasets_give_the_same_vectors_and_streams_the_same_bytes(self, reference, tmp_path):
        features = datasets.Features(
            {"id": datasets.Value("string"), "image": datasets.Image(), "text": datasets.Value("string")}
        )
        data = datasets.Dataset.from_list(tiny_rows(), features=features)
        store = encode_corpus(data, tiny_encoder(), tmp_path / "plain", shard_size=SHARD)
        encode_corpus(data.to_iterable_dataset(), tiny_encoder(), tmp_path / "streamed", shard_size=SHARD)
        assert contents(tmp_path / "plain") == contents(tmp_path / "streamed")
        ids, embeddings = encode_corpus(tiny_rows(), tiny_encoder(), tmp_path / "list", shard_size=SHARD).load()
        assert store.ids == ids
        np.testing.assert_array_equal(store.load()[1], embeddings)


class TestResume:
    @pytest.mark.parametrize("after", range(ROWS + 1))
    def test_stopped_before_any_row(self, after, reference, tmp_path):
        with pytest.raises(Stop):
            encode_corpus(stopping([*tiny_rows(), {}], after), tiny_encoder(), tmp_path, shard_size=SHARD)
        finished = after // SHARD
        assert sorted(path.name for path in tmp_path.glob("shard-*")) == [
            f"shard-{number:05d}.safetensors" for number in range(finished)
        ]
        if finished:
            with pytest.raises(ValueError, match=rf"is unfinished \({finished * SHARD} rows so far\)"):
                EmbeddingStore.open(tmp_path)
        encoder = tiny_encoder()
        encode_corpus(tiny_rows(), encoder, tmp_path, shard_size=SHARD)
        assert contents(tmp_path) == reference
        assert sum(encoder.model.batches) == ROWS - finished * SHARD  # nothing is encoded twice

    @pytest.mark.parametrize("call", range(7))  # one for each of five shards, two of the manifest
    def test_stopped_in_any_replacement_of_a_file(self, call, reference, tmp_path, monkeypatch):
        calls = iter(range(100))
        original = os.replace

        def failing(source, target):
            if next(calls) == call:
                raise Stop
            original(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", failing)
            with pytest.raises(Stop):
                encode_corpus(tiny_rows(), tiny_encoder(), tmp_path, shard_size=SHARD)
        encode_corpus(tiny_rows(), tiny_encoder(), tmp_path, shard_size=SHARD)
        assert contents(tmp_path) == reference

    @pytest.mark.parametrize("wait_for", [None, "shard-00002.safetensors"])
    def test_killed(self, wait_for, tmp_path):
        whole = tmp_path / "whole"
        encode_corpus(tiny_rows(), tiny_encoder(batch_size=1), whole, shard_size=SHARD)
        store = tmp_path / "store"
        process = subprocess.Popen([sys.executable, tiny.__file__, str(store), "0.05"])
        try:
            deadline = time.monotonic() + 60
            while not (store / wait_for if wait_for else store).exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.12)  # into the middle of the next shard
            assert process.poll() is None
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert contents(store) != contents(whole)
        encode_corpus(slow_rows(0), tiny_encoder(batch_size=1), store, shard_size=SHARD)
        assert contents(store) == contents(whole)

    def test_leftovers_of_a_kill_while_writing(self, reference, tmp_path):
        with pytest.raises(Stop):
            encode_corpus(stopping(tiny_rows(), 12), tiny_encoder(), tmp_path, shard_size=SHARD)
        (tmp_path / "shard-00002.safetensors.0123456789abcdef.conjoin-tmp").write_bytes(b"half a shard")
        (tmp_path / "manifest.json.0123456789abcdef.conjoin-tmp").write_bytes(b"{")
        encode_corpus(tiny_rows(), tiny_encoder(), tmp_path, shard_size=SHARD)
        assert contents(tmp_path) == reference

    def test_complete_store_is_left_alone(self, reference, tmp_path):
        encode_corpus(tiny_rows(), tiny_encoder(), tmp_path, shard_size=SHARD)
        times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
        encoder = tiny_encoder()
        assert len(encode_corpus(tiny_rows(), encoder, tmp_path, shard_size=SHARD)) == ROWS
        assert encoder.model.batches == []
        assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times

    @pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
    def test_damaged_shard_is_made_again(self, damage, reference, tmp_path, caplog):
        encode_corpus(tiny_rows(), tiny_encoder(), tmp_path, shard_size=SHARD)
        path = tmp_path / "shard-00001.safetensors"
        content = path.read_bytes()
        path.write_bytes(content[:-7] if damage == "truncate" else content[:-1] + bytes([content[-1] ^ 1]))
        if damage == "remove":
            path.unlink()
        encoder = tiny_encoder()
        encode_corpus(tiny_rows(), encoder, tmp_path, shard_size=SHARD)
        assert contents(tmp_path) == reference
        assert sum(encoder.model.batches) == SHARD
        assert "shard-00001.safetensors" in caplog.text and "making the file again" in caplog.text

    def test_skipped_rows_are_not_decoded(self, tmp_path, monkeypatch):
        rows = datasets.Dataset.from_list(
            [{"id": str(number), "image": {"bytes": png(), "path": None}} for number in range(5)],
            features=datasets.Features({"id": datasets.Value("string"), "image": datasets.Image()}),
        )
        encode_corpus(rows, tiny_encoder(), tmp_path, shard_size=2)
        monkeypatch.setattr(Image, "open", None)
        encode_corpus(rows, tiny_encoder(), tmp_path, shard_size=2)
        encode_corpus(rows.to_iterable_dataset(), tiny_encoder(), tmp_path, shard_size=2)
        (tmp_path / "shard-00001.safetensors").unlink()
        with pytest.raises(ValueError, match="cannot read the image"):
            encode_corpus(rows, tiny_encoder(), tmp_path, shard_size=2)

    def test_moved_model_resumes(self, reference, tmp_path):
        with pytest.raises(Stop):
            encode_corpus(stopping(tiny_rows(), 12), tiny_encoder(name="old place"), tmp_path, shard_size=SHARD)
        store = encode_corpus(tiny_rows(), tiny_encoder(name="new place"), tmp_path, shard_size=SHARD)
        assert store.model.name == "new place"


def png() -> bytes:
    import io

    buffer = io.BytesIO()
    Image.new("RGB", (3, 3), "red").save(buffer, "png")
    return buffer.getvalue()


class TestRefusals:
    @pytest.fixture
    def begun(self, tmp_path):
        with pytest.raises(Stop):
            encode_corpus(stopping(tiny_rows(), 12), tiny_encoder(name="a"), tmp_path, shard_size=SHARD)
        before = contents(tmp_path)
        yield tmp_path
        assert contents(tmp_path) == before

    def test_another_model(self, begun):
        with pytest.raises(ValueError, match=r"was made with fingerprint '\w{12}'..., not '\w{12}'...;"):
            encode_corpus(tiny_rows(), tiny_encoder(seed=1, name="b"), begun, shard_size=SHARD)

    def test_another_dtype(self, begun):
        with pytest.raises(ValueError, match="was made with dtype 'float32', not 'float16'; use the same settings or"):
            encode_corpus(tiny_rows(), tiny_encoder(), begun, shard_size=SHARD, dtype="float16")

    def test_another_precision(self, begun):
        with pytest.raises(ValueError, match="was made with precision 'full', not 'bfloat16'"):
            encode_corpus(tiny_rows(), tiny_encoder(dtype=torch.bfloat16), begun, shard_size=SHARD)

    def test_another_shard_size(self, begun):
        with pytest.raises(ValueError, match="was made with shard_size 5, not 6"):
            encode_corpus(tiny_rows(), tiny_encoder(), begun, shard_size=6)

    def test_other_ids(self, begun):
        rows = tiny_rows()
        rows[7]["id"] = "stranger"
        with pytest.raises(
            ValueError, match="row 7 had the id 'row/7' and now it is 'stranger'; the data has changed"
        ):
            encode_corpus(rows, tiny_encoder(), begun, shard_size=SHARD)

    @pytest.mark.parametrize("changed", [{"text": "another text"}, {"image": Image.new("RGB", (5, 5))}])
    def test_other_content_under_the_same_id(self, begun, changed):
        rows = tiny_rows()
        rows[8] |= changed
        with pytest.raises(ValueError, match="row 8 with the id 'row/8' has another text, image or kept column"):
            encode_corpus(rows, tiny_encoder(), begun, shard_size=SHARD)

    def test_rows_without_a_part_they_had(self, begun):
        rows = [row | {"text": row["text"] or "x", "image": None} for row in tiny_rows()]
        with pytest.raises(ValueError, match="row 1 with the id 'row/1' has another text, image or kept column"):
            encode_corpus(rows, tiny_encoder(), begun, shard_size=SHARD)

    def test_another_source_or_instruction(self, begun):
        with pytest.raises(ValueError, match=r"was made with source \{\}, not \{'only': 'image'\};"):
            encode_corpus(tiny_rows(), tiny_encoder(), begun, shard_size=SHARD, source={"only": "image"})
        with pytest.raises(ValueError, match="was made with instruction None, not 'find it';"):
            encode_corpus(tiny_rows(), tiny_encoder(), begun, shard_size=SHARD, instruction="find it")

    def test_fewer_rows(self, begun):
        with pytest.raises(ValueError, match="row 8 had the id 'row/8' and now the data ends there"):
            encode_corpus(tiny_rows(8), tiny_encoder(), begun, shard_size=SHARD)

    def test_other_settings_of_this_call(self, tmp_path):
        with pytest.raises(ValueError, match=r"unknown dtype 'int4'; expected one of \['float32', 'float16', "):
            encode_corpus(tiny_rows(), tiny_encoder(), tmp_path, dtype="int4")
        with pytest.raises(ValueError, match="shard_size must be at least 1, got 0"):
            encode_corpus(tiny_rows(), tiny_encoder(), tmp_path, shard_size=0)

    @pytest.mark.parametrize("before, after", [(23, 24), (20, 23)])  # the end inside a shard, and between two
    def test_more_rows_than_a_complete_store(self, before, after, tmp_path):
        encode_corpus(tiny_rows(before), tiny_encoder(), tmp_path, shard_size=SHARD)
        kept = contents(tmp_path)
        with pytest.raises(ValueError, match="the data has changed, encode it into another folder"):
            encode_corpus(tiny_rows(after), tiny_encoder(), tmp_path, shard_size=SHARD)
        assert contents(tmp_path) == kept

    def test_more_rows_after_an_end_seen_but_not_marked(self, tmp_path):
        encode_corpus(tiny_rows(), tiny_encoder(), tmp_path, shard_size=SHARD)
        replace(read_manifest(tmp_path, STORE), complete=False).save(tmp_path)
        with pytest.raises(ValueError, match="ended after 23 rows, and now the data continues with id 'row/23'"):
            encode_corpus(tiny_rows(24), tiny_encoder(), tmp_path, shard_size=SHARD)

    def test_fewer_shards_than_a_complete_store(self, tmp_path):
        encode_corpus(tiny_rows(), tiny_encoder(), tmp_path, shard_size=SHARD)
        (tmp_path / "shard-00004.safetensors").unlink()
        with pytest.raises(ValueError, match="it holds 23 rows and now the data ends after 20"):
            encode_corpus(tiny_rows(20), tiny_encoder(), tmp_path, shard_size=SHARD)


class TestBadRows:
    def encode(self, rows, tmp_path):
        return encode_corpus(rows, tiny_encoder(), tmp_path, shard_size=SHARD)

    @pytest.mark.parametrize("empty", [[], datasets.Dataset.from_dict({"id": [], "text": []})])
    def test_empty(self, empty, tmp_path):
        with pytest.raises(ValueError, match="the dataset is empty: there are no rows to encode"):
            self.encode(empty, tmp_path)
        assert contents(tmp_path) == {}

    def test_duplicate_ids_across_shards(self, tmp_path):
        rows = tiny_rows()
        rows[14]["id"] = "row/2"
        with pytest.raises(ValueError, match="row 14: the id 'row/2' occurs twice; ids must be unique"):
            self.encode(rows, tmp_path)

    def test_duplicate_of_a_row_that_was_skipped(self, tmp_path):
        rows = tiny_rows()
        rows[14]["id"] = "row/2"
        with pytest.raises(Stop):
            self.encode(stopping(rows, 10), tmp_path)
        with pytest.raises(ValueError, match="the id 'row/2' occurs twice"):
            self.encode(rows, tmp_path)

    @pytest.mark.parametrize("id_", [None, "", 1.5, True])
    def test_bad_id(self, id_, tmp_path):
        with pytest.raises(ValueError, match="row 1: the id must be a string or an integer, got"):
            self.encode([{"id": "a", "text": "x"}, {"id": id_, "text": "y"}], tmp_path)

    def test_not_a_mapping(self, tmp_path):
        with pytest.raises(ValueError, match=r"row 0: expected a mapping .*, got \['a', 'b'\]"):
            self.encode([["a", "b"]], tmp_path)

    @pytest.mark.parametrize("streaming", [False, True])
    def test_no_id_column(self, streaming, tmp_path):
        data = datasets.Dataset.from_dict({"name": ["a"], "text": ["b"]})
        with pytest.raises(ValueError, match=r"""the dataset has no column "id", it has \['name', 'text'\]"""):
            self.encode(data.to_iterable_dataset() if streaming else data, tmp_path)

    def test_neither_image_nor_text(self, tmp_path):
        with pytest.raises(ValueError, match=r"""item 'b' has neither "image" nor "text"; its row has the keys"""):
            self.encode([{"id": "a", "text": "x"}, {"id": "b", "caption": "y"}], tmp_path)

    def test_unreadable_item_is_named(self, tmp_path):
        rows = tiny_rows()
        rows[6] = {"id": "broken", "image": {"bytes": png()[:40], "path": None}}
        with pytest.raises(ValueError, match=r"^item 'broken': cannot read the image"):
            self.encode(rows, tmp_path)
        rows[6] = tiny_rows()[6]
        self.encode(rows, tmp_path)  # what was done before it is kept


class TestDisk:
    @pytest.mark.parametrize("failing_call, safe", [(0, 0), (4, 5), (5, 10), (8, 15)])
    def test_full(self, failing_call, safe, reference, tmp_path, monkeypatch):
        calls = iter(range(100))
        original = os.fsync

        def fsync(descriptor):
            if os.path.isfile(f"/proc/self/fd/{descriptor}") and next(calls) == failing_call:
                raise OSError(errno.ENOSPC, "No space left on device")
            original(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            with pytest.raises(OSError, match=f"No space left on device while writing .*: {safe} rows in") as caught:
                encode_corpus(tiny_rows(), tiny_encoder(), tmp_path, shard_size=SHARD)
        assert caught.value.errno == errno.ENOSPC and "run the same again, it resumes after them" in str(caught.value)
        assert not list(tmp_path.glob("*tmp"))
        encode_corpus(tiny_rows(), tiny_encoder(), tmp_path, shard_size=SHARD)
        assert contents(tmp_path) == reference

    def test_full_while_writing(self, tmp_path, monkeypatch):
        original = Path.write_bytes

        def write_bytes(path, content):
            original(path, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", write_bytes)
        with pytest.raises(OSError, match=r"No space left on device while writing .*: 0 rows in 0 shards are safe"):
            encode_corpus(tiny_rows(), tiny_encoder(), tmp_path, shard_size=SHARD)
        assert contents(tmp_path) == {}

    @pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b"", lambda b: b[:-9] + b"\xff" + b[-8:], None])
    def test_damaged_shard_on_reading(self, tmp_path, damage):
        encode_corpus(tiny_rows(), tiny_encoder(), tmp_path, shard_size=SHARD)
        path = tmp_path / "shard-00003.safetensors"
        content = path.read_bytes()
        path.unlink() if damage is None else path.write_bytes(damage(content))
        with pytest.raises(ValueError, match=r"shard-00003\.safetensors' is .*; run `conjoin encode` again"):
            EmbeddingStore.open(tmp_path).load()

    def test_verification_can_be_left_out(self, tmp_path):
        ids, before = encode_corpus(tiny_rows(), tiny_encoder(), tmp_path, shard_size=SHARD).load()
        path = tmp_path / "shard-00003.safetensors"
        content = bytearray(path.read_bytes())
        content[content.index(before[15].tobytes())] ^= 1
        path.write_bytes(content)
        found, embeddings = EmbeddingStore.open(tmp_path, verify=False).load()
        assert found == ids and (embeddings != before).sum() == 1


class TestManifest:
    def test_not_a_store(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"no embedding store in .*; run `conjoin encode` to make one"):
            EmbeddingStore.open(tmp_path)

    def test_a_store_of_an_earlier_version(self, tmp_path):
        old = {"format": "conjoin-embeddings-1", "count": 0, "shards": [], "complete": True}
        (tmp_path / "manifest.json").write_text(json.dumps(old))
        for use in (EmbeddingStore.open, lambda folder: encode_corpus(tiny_rows(), tiny_encoder(), folder)):
            with pytest.raises(ValueError, match=r"has format 'conjoin-embeddings-1' .* choose another folder$"):
                use(tmp_path)

    def test_names_no_time_and_no_machine(self, reference):
        text = reference["manifest.json"].decode()
        assert os.uname().nodename not in text and time.strftime("%Y") not in text
        digests = [file["sha256"] for file in json.loads(text)["files"]]
        assert digests[0] == hashlib.sha256(reference["shard-00000.safetensors"]).hexdigest()


def test_an_image_file_that_changed_is_noticed(tmp_path):
    Image.new("RGB", (3, 3), "red").save(tmp_path / "a.png")
    rows = [{"id": "a", "image": str(tmp_path / "a.png")}]
    encode_corpus(rows, tiny_encoder(), tmp_path / "store")
    encode_corpus(rows, tiny_encoder(), tmp_path / "store")
    Image.new("RGB", (4, 7), "blue").save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="row 0 with the id 'a' has another text, image or kept column"):
        encode_corpus(rows, tiny_encoder(), tmp_path / "store")


def test_two_writers_of_one_store(tmp_path):
    def rows():
        for number, row in enumerate(tiny_rows()):
            if number == 8:
                with pytest.raises(ValueError, match=f"another process is writing into '{tmp_path}'"):
                    encode_corpus(tiny_rows(), tiny_encoder(), tmp_path, shard_size=SHARD)
            yield row

    assert len(encode_corpus(rows(), tiny_encoder(), tmp_path, shard_size=SHARD)) == ROWS


def test_workers_give_the_same_store(reference, tmp_path):
    encoder = tiny_encoder(num_workers=2)
    assert isinstance(encoder, ItemEncoder)
    encode_corpus(tiny_rows(), encoder, tmp_path, shard_size=SHARD)
    assert contents(tmp_path) == reference
