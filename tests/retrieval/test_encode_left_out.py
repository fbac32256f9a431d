"""Rows that cannot be used: an error, or left out and listed, with the bytes of an uninterrupted run."""

import json

import numpy as np
import pytest

from conjoin.retrieval import EmbeddingStore, build_index, encode_corpus
from conjoin.retrieval.store import LEFT_OUT_FILE
from tiny_encoder import tiny_encoder, tiny_rows

SHARD = 5
BAD = {1: "image", 7: "problem", 10: "text", 11: "image", 12: "image", 13: "image", 14: "image", 22: "path"}
"""The third shard, rows 10 to 14, holds nothing else."""


def rows():
    found = tiny_rows()
    broken = {
        "image": {"image": {"bytes": b"no picture", "path": None}},
        "problem": {"problem": "row 7: the image is missing", "text": "words that must not be encoded alone"},
        "text": {"text": "  "},
        "path": {"image": "gone.png"},
    }
    for row, kind in BAD.items():
        found[row] = {"id": f"row/{row}"} | broken[kind]
    return found


def contents(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.glob("[!.]*"))}


def encode(some, directory, encoder=None, on_error="skip", **options):
    return encode_corpus(some, encoder or tiny_encoder(), directory, shard_size=SHARD, on_error=on_error, **options)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    directory = tmp_path_factory.mktemp("reference")
    encode(rows(), directory)
    return contents(directory)


class Stop(Exception):  # noqa: N818
    pass


def stopping(after):
    for number, row in enumerate(rows()):
        if number == after:
            raise Stop
        yield row


def test_the_others_are_encoded_and_these_are_listed(tmp_path):
    store = encode(rows(), tmp_path)
    good = [row for number, row in enumerate(rows()) if number not in BAD]
    alone = encode_corpus(good, tiny_encoder(), tmp_path / "good")
    assert store.ids == alone.ids and [len(ids) for ids, _ in store] == [4, 4, 0, 5, 2]
    np.testing.assert_allclose(store.load()[1], alone.load()[1], atol=1e-6)
    listed = [json.loads(line) for line in (tmp_path / LEFT_OUT_FILE).read_text().splitlines()]
    assert [row["row"] for row in listed] == list(BAD) and [row["id"] for row in listed] == [f"row/{n}" for n in BAD]
    assert listed == [row._asdict() for row in EmbeddingStore.open(tmp_path).left_out]
    assert [row["reason"] for row in listed[:3]] == [
        "item 'row/1': cannot read the image, its format is unknown",
        "row 7: the image is missing",
        "item 'row/10': text is empty or only white space ('  '); leave it out instead",
    ]
    assert "no such file" in listed[-1]["reason"]


@pytest.mark.parametrize("kind", ["exact", "flat"])
def test_a_shard_without_rows_is_indexed(kind, tmp_path):
    store = encode(rows(), tmp_path)
    ids, vectors = store.load()
    assert [found[0] for found in build_index(store, kind).search(vectors, 1).ids] == ids


@pytest.mark.parametrize("after", [*range(0, 23, 3), 10, 14, 22])
def test_a_resumed_store_is_the_uninterrupted_one(after, reference, tmp_path):
    with pytest.raises(Stop):
        encode(stopping(after), tmp_path)
    encode(rows(), tmp_path)
    assert contents(tmp_path) == reference


def test_workers_and_streams_give_the_same_store(reference, tmp_path):
    encode(iter(rows()), tmp_path, tiny_encoder(num_workers=2))
    assert contents(tmp_path) == reference


def test_without_bad_rows_the_store_is_the_same_and_has_no_list(tmp_path):
    encode(tiny_rows(), tmp_path / "skip")
    encode(tiny_rows(), tmp_path / "raise", on_error="raise")
    assert contents(tmp_path / "skip") == contents(tmp_path / "raise")
    assert EmbeddingStore.open(tmp_path / "skip").left_out == []


@pytest.mark.parametrize("damage", ["shard-00001.safetensors", LEFT_OUT_FILE])
def test_what_is_damaged_is_made_again(damage, reference, tmp_path):
    encode(rows(), tmp_path)
    (tmp_path / damage).write_bytes((tmp_path / damage).read_bytes()[:-9])
    with pytest.raises(ValueError, match=f"{damage}' is truncated or damaged"):
        store = EmbeddingStore.open(tmp_path)
        _ = store.load(), store.left_out
    encode(rows(), tmp_path)
    assert contents(tmp_path) == reference
    (tmp_path / LEFT_OUT_FILE).unlink()
    with pytest.raises(ValueError, match=f"{LEFT_OUT_FILE}' is missing"):
        _ = EmbeddingStore.open(tmp_path).left_out


def test_a_complete_store_is_left_alone(tmp_path):
    encode(rows(), tmp_path)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    encoder = tiny_encoder()
    encode(rows(), tmp_path, encoder)
    assert encoder.model.batches == []
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times


def test_by_default_they_are_errors(tmp_path):
    with pytest.raises(ValueError, match=r"^item 'row/1': cannot read the image"):
        encode(rows(), tmp_path / "a", on_error="raise")
    with pytest.raises(ValueError, match=r"^row 7: the image is missing"):
        encode(rows()[2:], tmp_path / "b", on_error="raise")
    with pytest.raises(ValueError, match="unknown on_error 'keep'; expected 'raise' or 'skip'"):
        encode(rows(), tmp_path / "c", on_error="keep")


def test_a_run_that_stopped_at_an_error_resumes_without_the_row(tmp_path):
    with pytest.raises(ValueError, match=r"row 7"):
        encode(tiny_rows()[:5] + rows()[5:], tmp_path, on_error="raise")
    store = encode(tiny_rows()[:5] + rows()[5:], tmp_path)
    assert [row.row for row in store.left_out] == list(BAD)[1:]


def test_a_store_that_leaves_rows_out_resumes_only_so(tmp_path):
    encode(rows(), tmp_path)
    with pytest.raises(ValueError, match=r"leaves out row 1 with the id 'row/1' \(item .*--on-error skip"):
        encode(rows(), tmp_path, on_error="raise")


def test_a_row_that_has_been_repaired_is_a_change(tmp_path):
    encode(rows(), tmp_path)
    repaired = rows()
    repaired[1] = tiny_rows()[1]
    with pytest.raises(ValueError, match="row 1 with the id 'row/1' has another text, image or kept column"):
        encode(repaired, tmp_path)
    with pytest.raises(ValueError, match="it ended after 23 rows, and now the data continues with id 'more'"):
        encode([*rows(), {"id": "more", "text": "x"}], tmp_path)
    with pytest.raises(ValueError, match="row 22 had the id 'row/22' and now the data ends there"):
        encode(rows()[:22], tmp_path)


def test_nothing_but_such_rows(tmp_path):
    with pytest.raises(ValueError, match="none of the 5 rows can be used; item 'row/10': text is empty"):
        encode(rows()[10:15], tmp_path)


def test_the_encoder_tells_which_items_it_cannot_use():
    found = {}
    items = ["a", {"image": "gone.png"}, "b", {"text": " "}]
    vectors = tiny_encoder(batch_size=2).encode(items, on_unusable=found.__setitem__)
    assert sorted(found) == [1, 3] and "gone.png" in str(found[1])
    assert np.isnan(vectors[[1, 3]]).all()
    np.testing.assert_allclose(vectors[[0, 2]], tiny_encoder().encode(["a", "b"]), atol=1e-6)


def test_a_batch_that_fails_although_its_items_do_not_is_an_error():
    def processor(items):
        if len(items) > 1:
            raise ValueError("too many at once")
        return {}

    encoder = tiny_encoder()
    encoder.processor = processor
    with pytest.raises(ValueError, match=r"^too many at once"):
        encoder.encode(["a", "b"], on_unusable=lambda place, error: None)
