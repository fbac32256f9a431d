"""Rows become a collection: the first run, its resumption, an update and a sync; whatever stops them."""

import io
from contextlib import contextmanager
from datetime import date, datetime
from zoneinfo import ZoneInfo

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from lancedb.table import LanceTable
from PIL import Image

from conjoin.retrieval import Changes, Collection, encode_collection
from conjoin.retrieval.collection import open_table
from tiny_collections import files, state
from tiny_encoder import tiny_encoder, tiny_rows

ROWS, CHUNK = 23, 3


@contextmanager
def small_commits():
    """A commit after each chunk of three rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("conjoin.retrieval.encode.BATCHES_AT_ONCE", 1)
        patch.setattr("conjoin.retrieval.encode._ROWS_PER_COMMIT", 1)
        yield


@pytest.fixture
def small():
    with small_commits():
        yield


def encode(folder, rows=None, encoder=None, **options):
    return encode_collection(tiny_rows() if rows is None else rows, encoder or tiny_encoder(), folder, **options)


def sync(folder, rows, encoder=None, **options):
    return encode(folder, rows, encoder, sync=True, **options).changes


def counting():
    """An encoder that has not encoded yet, but for what tells its dimension."""
    encoder = tiny_encoder()
    assert encoder.dimension == 8
    encoder.model.batches.clear()
    return encoder


def encoded(encoder):
    """Rows that went through the model."""
    return sum(encoder.model.batches)


class Stop(Exception):  # noqa: N818
    pass


def stopping(rows, after):
    for number, row in enumerate(rows):
        if number == after:
            raise Stop
        yield row


def changed_rows():
    """Of 23 rows: two replaced, three removed, four new."""
    rows = tiny_rows(27)
    rows[6] |= {"text": "another text"}
    rows[13] |= {"image": Image.new("RGB", (5, 5), "white")}
    return rows[:2] + rows[5:]


def png():
    buffer = io.BytesIO()
    Image.new("RGB", (3, 3), "red").save(buffer, "png")
    return buffer.getvalue()


class TestContents:
    def test_ids_vectors_and_metadata(self, tmp_path):
        encoder = tiny_encoder(name="tiny")
        collection = encode(tmp_path / "new" / "folder", encoder=encoder)
        assert collection.changes == Changes(added=ROWS, encoded=ROWS) and len(collection) == ROWS
        collection = Collection(tmp_path / "new" / "folder")
        assert collection.ids == [row["id"] for row in tiny_rows()] and collection.changes is None
        items = [{key: row[key] for key in ("image", "text") if row[key] is not None} for row in tiny_rows()]
        assert (collection.vectors().dtype, collection.dtype, collection.dimension) == (np.float32, "float32", 8)
        np.testing.assert_allclose(collection.vectors(), encoder.encode(items), atol=1e-6)
        assert collection.model == encoder.identity
        key, details = collection.metadata["key"], collection.metadata["details"]
        assert (key["dtype"], key["fingerprint"], key["prompt"]) == ("float32", encoder.fingerprint, None)
        assert details["model"] == "tiny" and not details["has_multi_image_items"]

    def test_lists_datasets_and_streams_give_the_same_bits(self, small, tmp_path):
        features = {"id": datasets.Value("string"), "image": datasets.Image(), "text": datasets.Value("string")}
        data = datasets.Dataset.from_list(tiny_rows(), features=datasets.Features(features))
        sources = {"list": tiny_rows(), "iterator": iter(tiny_rows()), "data": data}
        sources["stream"] = data.to_iterable_dataset()
        sources["unknown"] = datasets.IterableDataset.from_generator(lambda: iter(tiny_rows()))
        found = {name: state(encode(tmp_path / name, rows).uri) for name, rows in sources.items()}
        assert all(each == found["list"] for each in found.values())

    def test_float16(self, tmp_path):
        half, full = encode(tmp_path / "half", dtype="float16"), encode(tmp_path / "full")
        assert (half.dtype, half.vectors().dtype, half.vectors(["row/3"]).dtype) == ("float16", np.float16, np.float16)
        np.testing.assert_array_equal(half.vectors(), full.vectors().astype(np.float16))
        queries = full.vectors()[::5]
        for memory in (0, 10**6):
            found = Collection(tmp_path / "half", memory=memory).rank(queries, 3)
            right = queries.astype(np.float64) @ half.vectors().astype(np.float64).T
            np.testing.assert_array_equal(found.scores, -np.sort(-right.astype(np.float32))[:, :3])

    def test_odd_ids(self, tmp_path):
        ids = ["ü/🙂", "two\nlines", 'a "quote"', "it's", "''", "back\\slash\\", "50%_", " ", "-- ;", 7]
        names = [*ids[:-1], "7"]
        rows = [{"id": id_, "text": f"text {number}", "metadata": {"n": number}} for number, id_ in enumerate(ids)]
        collection = encode(tmp_path, rows)
        assert collection.ids == names
        assert [row["n"] for row in collection.rows(names[::-1])] == list(range(10))[::-1]
        np.testing.assert_array_equal(collection.vectors(names[::-1]), collection.vectors()[::-1])
        assert collection.rank(collection.vectors(), 1).ids == [[name] for name in names]
        rows[3]["text"] = "another"
        assert encode(tmp_path, rows).changes == Changes(replaced=1, unchanged=9, encoded=1)
        assert sync(tmp_path, rows[5:]) == Changes(removed=5, unchanged=5)
        collection = Collection(tmp_path)
        collection.remove(names[5:8])
        assert collection.ids == names[8:]

    def test_thumbnails(self, tmp_path, pictures):
        rows = [{"id": "one", "image": pictures[1]}, {"id": "text", "text": "x"}, {"id": "two", "image": pictures[:2]}]
        collection = encode(tmp_path, rows, tiny_encoder(input_type="cat"), keep_pictures=8)
        found = dict(zip(("one", "text", "two"), collection.rows(["one", "text", "two"], pictures=True), strict=True))
        sizes = {name: Image.open(io.BytesIO(row["picture"])).size for name, row in found.items() if "picture" in row}
        assert sizes.keys() == {"one", "two"} and sizes["one"] == (8, 5) and max(sizes["two"]) == 8
        assert collection.rows(["one"]) == [{"id": "one"}] and "picture" not in collection.schema.names
        shown = collection.to_dataset()
        assert isinstance(shown.features["picture"], datasets.Image) and shown[0]["picture"].size == (8, 5)


class TestResume:
    @pytest.mark.parametrize("after", [0, 1, 3, 4, 11, 12, 22, ROWS])
    def test_stopped_before_any_row(self, after, small, tmp_path):
        with pytest.raises(Stop):
            encode(tmp_path, stopping([*tiny_rows(), {}], after))
        safe = after // CHUNK * CHUNK
        message = (
            f"is unfinished, {safe} rows so far: run the same `conjoin encode`" if safe else "there is no collect"
        )
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            Collection(tmp_path)
        encoder = counting()
        assert encode(tmp_path, encoder=encoder).changes == Changes(
            added=ROWS - safe, unchanged=safe, encoded=ROWS - safe
        )
        assert encoded(encoder) == ROWS - safe  # nothing is encoded twice
        assert state(tmp_path) == state(encode(tmp_path / "whole").uri)

    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
    def test_what_was_encoded_before_ctrl_c_or_an_error_is_kept(self, error, tmp_path):
        """All rows are one chunk, of eight batches."""
        encoder = counting()
        forward = encoder.model.forward

        def stopped(text, pixels):
            if len(encoder.model.batches) == 3:
                raise error
            return forward(text, pixels)

        encoder.model.forward = stopped
        message = "9 rows are kept in .*: run the same again, it resumes" if error is KeyboardInterrupt else None
        with pytest.raises(error, match=message):
            encode(tmp_path, encoder=encoder)
        assert encode(tmp_path).changes == Changes(added=ROWS - 9, unchanged=9, encoded=ROWS - 9)

    def test_ctrl_c_while_it_is_published(self, tmp_path, monkeypatch):
        def stop(collection):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("conjoin.retrieval.collection.Collection.publish", stop)
            with pytest.raises(KeyboardInterrupt, match=f"{ROWS} rows are kept in .*: run the same again, it resumes"):
                encode(tmp_path)
        assert encode(tmp_path).changes == Changes(unchanged=ROWS)

    def test_what_is_slow_is_written_before_the_chunk_ends(self, tmp_path, monkeypatch):
        monkeypatch.setattr("conjoin.retrieval.encode._SECONDS_PER_COMMIT", -1)
        encoder, counts = counting(), []
        forward = encoder.model.forward

        def counted(text, pixels):
            counts.append(open_table(tmp_path).count_rows() if counts else 0)
            return forward(text, pixels)

        encoder.model.forward = counted
        assert len(encode(tmp_path, encoder=encoder)) == ROWS and counts == [*range(0, ROWS, 3)]

    def test_an_unchanged_run_publishes_nothing(self, small, tmp_path):
        version = encode(tmp_path).version
        before, encoder = files(tmp_path), counting()
        collection = encode(tmp_path, encoder=encoder, sync=True)
        assert collection.changes == Changes(unchanged=ROWS) and collection.version == version
        assert encoded(encoder) == 0
        assert files(tmp_path) == before

    def test_known_rows_are_not_decoded(self, tmp_path, monkeypatch):
        rows = datasets.Dataset.from_list(
            [{"id": str(number), "image": {"bytes": png(), "path": None}} for number in range(5)],
            features=datasets.Features({"id": datasets.Value("string"), "image": datasets.Image()}),
        )
        encode(tmp_path, rows)
        monkeypatch.setattr(Image, "open", None)
        for again in (rows, rows.to_iterable_dataset()):
            assert encode(tmp_path, again).changes == Changes(unchanged=5)
        Collection(tmp_path).remove(["3"])
        with pytest.raises(ValueError, match="cannot read the image"):
            encode(tmp_path, rows)

    def test_a_model_that_was_moved(self, small, tmp_path):
        with pytest.raises(Stop):
            encode(tmp_path, stopping(tiny_rows(), 12), tiny_encoder(name="old place"))
        assert encode(tmp_path, encoder=tiny_encoder(name="new place")).model.name == "new place"


class TestUpdate:
    def test_a_sync_is_encoding_again(self, tmp_path):
        version, encoder = encode(tmp_path / "it").version, counting()
        assert sync(tmp_path / "it", changed_rows(), encoder) == Changes(4, 2, 3, 18, 0, 6)
        assert encoded(encoder) == 6
        encode(tmp_path / "whole", changed_rows())
        assert state(tmp_path / "it") == state(tmp_path / "whole")
        assert Collection(tmp_path / "it").version > version

    def test_rows_stand_as_they_were_read(self, tmp_path):
        rows = [{"id": f"{number:03}", "text": f"text {number}"} for number in range(200)]
        collection = encode_collection(rows, tiny_encoder(batch_size=1), tmp_path)  # several chunks to a commit
        assert list(collection.ids) == [row["id"] for row in rows]

    def test_without_sync_nothing_is_removed(self, tmp_path):
        encode(tmp_path / "it")
        assert encode(tmp_path / "it", changed_rows()[3:]).changes == Changes(4, 2, 0, 15, 0, 6)
        everything = {row["id"]: row for row in (*tiny_rows(), *changed_rows())}
        assert state(tmp_path / "it") == state(encode(tmp_path / "whole", list(everything.values())).uri)

    def test_many_updates_stay_compact(self, tmp_path, monkeypatch):
        from datetime import timedelta

        monkeypatch.setattr("conjoin.retrieval.collection._KEPT_FOR", timedelta(0))
        encode(tmp_path / "it")
        rows = tiny_rows()
        for day in range(20):
            rows[day % 23] |= {"text": f"day {day}"}
            assert sync(tmp_path / "it", rows).replaced == 1
        assert state(tmp_path / "it") == state(encode(tmp_path / "whole", rows).uri)
        assert len(files(tmp_path / "it")) < 4 * len(files(tmp_path / "whole"))

    def test_several_images_are_remembered_by_the_run_that_resumes(self, small, tmp_path, pictures):
        rows = [{"id": f"two {number}", "image": [np.asarray(each) for each in pictures[:2]]} for number in range(6)]
        with pytest.raises(Stop):
            encode(tmp_path, stopping([*rows, {}], 6), tiny_encoder(input_type="cat"))
        for again in (rows, [{"id": "a", "text": "a"}]):
            assert encode(tmp_path, again, tiny_encoder(input_type="cat")).model.input_type == "cat"
        assert len(Collection(tmp_path)) == 7

    def test_several_images_are_remembered_of_a_stopped_update(self, small, tmp_path, pictures):
        encode(tmp_path, [{"id": "a", "text": "a"}], tiny_encoder(input_type="cat"))
        rows = [{"id": f"two {number}", "image": [np.asarray(each) for each in pictures[:2]]} for number in range(8)]
        with pytest.raises(Stop):
            encode(tmp_path, stopping(rows, 7), tiny_encoder(input_type="cat"))
        collection = encode(tmp_path, [{"id": "a", "text": "a"}], tiny_encoder(input_type="cat"))
        assert collection.changes == Changes(unchanged=1) and len(collection) == 7
        assert collection.model.input_type == "cat"


class TestPictures:
    @pytest.fixture
    def rows(self, tmp_path):
        rows = []
        for number in range(4):
            Image.new("RGB", (4, 4), (60 * number, 9, 0)).save(tmp_path / f"{number}.png")
            rows.append({"id": str(number), "image": str(tmp_path / f"{number}.png"), "metadata": {"price": number}})
        encode(tmp_path / "it", rows)
        return rows

    def test_a_picture_that_changed_under_its_id(self, rows, tmp_path):
        Image.new("RGB", (4, 4), "blue").save(tmp_path / "2.png")
        assert sync(tmp_path / "it", rows) == Changes(replaced=1, unchanged=3, encoded=1)
        assert state(tmp_path / "it") == state(encode(tmp_path / "whole", rows).uri)

    def test_touched_and_moved_pictures_and_a_new_price_keep_the_vector(self, rows, tmp_path):
        import os

        os.utime(tmp_path / "0.png", (1, 1))
        (tmp_path / "1.png").rename(tmp_path / "moved.png")
        rows[1]["image"] = str(tmp_path / "moved.png")
        rows[2]["metadata"] = {"price": 99, "colour": "red"}
        encoder = counting()
        assert encode(tmp_path / "it", rows, encoder).changes == Changes(replaced=3, unchanged=1)
        assert encoded(encoder) == 0
        assert state(tmp_path / "it") == state(encode(tmp_path / "whole", rows).uri)
        assert encode(tmp_path / "it", rows).changes == Changes(unchanged=4)

    def test_a_picture_that_broke(self, rows, tmp_path):
        (tmp_path / "3.png").write_bytes(b"no picture")
        with pytest.raises(ValueError, match=r"item '3'.*: cannot read the image"):
            encode(tmp_path / "it", rows)
        assert len(state(tmp_path / "it")) == 4
        assert encode(tmp_path / "it", rows, on_error="skip").changes == Changes(removed=1, unchanged=3, skipped=1)
        (skipped,) = Collection(tmp_path / "it").skipped
        assert (skipped.row, skipped.id) == (3, "3") and set(state(tmp_path / "it")) == {"0", "1", "2"}
        Image.new("RGB", (4, 4), "green").save(tmp_path / "3.png")
        assert encode(tmp_path / "it", rows).changes == Changes(added=1, unchanged=3, encoded=1)
        assert Collection(tmp_path / "it").skipped == []


BAD = {1: "image", 7: "problem", 9: "image", 10: "text", 11: "nothing", 22: "path"}
"""The fourth chunk, rows 9 to 11, holds nothing else."""


def rows_with_bad_ones():
    found = tiny_rows()
    broken = {
        "image": {"image": {"bytes": b"no picture", "path": None}},
        "problem": {"problem": "row 7: the image is missing", "text": "words that must not be encoded alone"},
        "text": {"text": "  "},
        "path": {"image": "gone.png"},
        "nothing": {"caption": "a text under another name"},
    }
    for row, kind in BAD.items():
        found[row] = {"id": f"row/{row}"} | broken[kind]
    return found


class TestSkipped:
    def test_the_others_are_encoded_and_these_are_listed(self, small, tmp_path):
        collection = encode(tmp_path / "it", rows_with_bad_ones(), on_error="skip")
        good = [row for number, row in enumerate(rows_with_bad_ones()) if number not in BAD]
        alone = encode(tmp_path / "good", good)
        assert collection.changes == Changes(added=17, skipped=6, encoded=17) and collection.ids == alone.ids
        np.testing.assert_allclose(collection.vectors(), alone.vectors(), atol=1e-6)
        listed = Collection(tmp_path / "it").skipped
        assert [(row.row, row.id) for row in listed] == [(number, f"row/{number}") for number in BAD]
        assert [listed[place].reason for place in (0, 1, 3)] == [
            "item 'row/1': cannot read the image: 10 bytes of an unknown format (b'no picture')",
            "row 7: the image is missing",
            "item 'row/10': text is empty or only white space ('  '); leave it out instead",
        ]
        assert "no such file" in listed[-1].reason

    @pytest.mark.parametrize("after", [0, 7, 8, 11, 12, 22])
    def test_a_resumed_run_is_the_uninterrupted_one(self, after, small, tmp_path):
        whole = encode(tmp_path / "whole", rows_with_bad_ones(), on_error="skip")
        with pytest.raises(Stop):
            encode(tmp_path / "it", stopping(rows_with_bad_ones(), after), on_error="skip")
        again = encode(tmp_path / "it", iter(rows_with_bad_ones()), on_error="skip")
        assert state(tmp_path / "it") == state(tmp_path / "whole") and again.skipped == whole.skipped
        version = again.version
        again = encode(tmp_path / "it", rows_with_bad_ones(), on_error="skip")
        assert again.changes == Changes(unchanged=17, skipped=6) and again.version == version

    def test_nothing_but_such_rows(self, tmp_path):
        reasons = "item 'row/11': the item has neither text nor image; item 'row/10': text is empty"
        with pytest.raises(ValueError, match=f"none of the 3 rows can be used; {reasons}"):
            encode(tmp_path, rows_with_bad_ones()[9:12], on_error="skip")


def other_ids():
    rows = tiny_rows()
    rows[14]["id"] = "row/2"
    return rows


def deep(levels):
    """A list in a list, and so on."""
    value = []
    for _ in range(levels):
        value = [value]
    return value


ERRORS = [
    ([], {}, "the dataset is empty: there are no rows to encode"),
    (datasets.Dataset.from_dict({"id": [], "text": []}), {}, "the dataset is empty"),
    (other_ids(), {}, "row 14: the id 'row/2' occurs twice; ids must be unique"),
    ([{"id": "a", "text": "x"}, {"id": "a", "text": "x"}], {}, "row 1: the id 'a' occurs twice"),
    ([{"id": 7, "text": "x"}, {"id": "7", "text": "x"}], {}, "row 1: the id '7' occurs twice"),
    *(([{"id": "a", "text": "x"}, {"id": id_, "text": "y"}], {}, "row 1: the id must be a string or an integer, got")
      for id_ in (None, "", 1.5, True)),
    ([["a", "b"]], {}, r"row 0: expected a mapping .*, got \['a', 'b'\]"),
    (datasets.Dataset.from_dict({"name": ["a"], "text": ["b"]}), {}, r"no column \"id\", it has \['name', 'text'\]"),
    (datasets.Dataset.from_dict({"name": ["a"]}).to_iterable_dataset(), {}, r"no column \"id\", it has \['name'\]"),
    ([{"id": "a", "text": "x"}, {"id": "b", "caption": "y"}], {}, "item 'b': the item has neither text nor image"),
    (tiny_rows(), {"on_error": "keep"}, "on_error='keep'; expected 'raise' or 'skip'"),
    (tiny_rows(), {"dtype": "int8"}, "unknown dtype 'int8'; expected 'float32' or 'float16'"),
    *(([{"id": "a", "text": "x", "metadata": kept}], {}, "item 'a': \"metadata\" must be a mapping .*, got ")
      for kept in (5, [1, 2], {1: "b"}, {"": 3})),
    *(([{"id": "a", "text": "x", "metadata": {name: 3}}], {}, f"item 'a': \"metadata\" holds '{name}', which cannot")
      for name in ("id", "vector", "item_digest", "row_digest", "picture", "text", "_rowid", "_distance", "a.b", "`")),
    ([{"id": "a", "text": "x", "metadata": {"deep": deep(5000)}}], {}, "item 'a': maximum recursion depth"),
    ([{"id": str(n), "text": "x", "metadata": {"price": n or "low"}} for n in range(3)], {}, "'price' .*kept: .*"),
    ([{"id": "a", "text": "x", "metadata": {"price": object()}}], {}, "the column 'price' cannot be kept: .*"),
    ([{"id": "a", "text": "x", "metadata": {"words": ["\ud800"]}}], {}, "the column 'words' cannot be kept: .*"),
    ([{"id": "a", "text": "x", "metadata": {"big": 2**70}}], {}, "the column 'big' cannot be kept: .*"),
]  # fmt: skip


class TestErrors:
    def test_bad_rows(self, small, tmp_path):
        """What was written before the error stays, and another run resumes it."""
        whole = state(encode(tmp_path / "whole").uri)
        for number, (rows, options, message) in enumerate(ERRORS):
            for folder in ("whole", f"new {number}"):
                with pytest.raises(ValueError, match=message):
                    encode(tmp_path / folder, rows, **options)
            assert state(tmp_path / "whole") == whole, message
        with pytest.raises(ValueError, match="occurs twice"):
            encode(tmp_path / "begun", other_ids())
        assert encode(tmp_path / "begun").changes == Changes(added=ROWS - 12, unchanged=12, encoded=ROWS - 12)

    @pytest.mark.parametrize("is_finished", [False, True])
    def test_another_model_or_setting(self, is_finished, small, tmp_path):
        if is_finished:
            encode(tmp_path, settings={"only": "image"})
        else:
            with pytest.raises(Stop):
                encode(tmp_path, stopping(tiny_rows(), 12), settings={"only": "image"})
        before = files(tmp_path)
        for encoder, options, message in (
            (tiny_encoder(seed=1), {}, r"was made with fingerprint '\w+, not '\w+;"),
            (
                tiny_encoder(),
                {"dtype": "float16"},
                "was made with dtype 'float32', not 'float16'; encode into another",
            ),
            (tiny_encoder(dtype=torch.bfloat16), {}, "was made with precision 'full', not 'bfloat16'"),
            (tiny_encoder(truncate_dim=4), {}, "was made with truncate_dim None, not 4"),
            (tiny_encoder(input_type="avg"), {}, "was made with input_type 'seq', not 'avg'"),
            (tiny_encoder(), {"prompt": "find it"}, "was made with prompt None, not 'find it'"),
            (tiny_encoder(), {"settings": {"only": "text"}}, "was made with only 'image', not 'text'"),
        ):
            with pytest.raises(ValueError, match=message):
                encode(tmp_path, encoder=encoder, **{"settings": {"only": "image"}} | options)
            assert files(tmp_path) == before, message
        assert len(encode(tmp_path, settings={"only": "image"})) == ROWS

    def test_folders_that_hold_no_collection(self, tmp_path):
        (tmp_path / "other").mkdir()
        (tmp_path / "other/notes.txt").write_text("{}")
        (tmp_path / "file").write_text("x")
        (tmp_path / "empty").mkdir()
        messages = {
            "other": "is not empty and no collection: it has 'notes.txt'; choose a new folder",
            "file": "is a file; `conjoin start .*` makes a collection",
        }
        for name, message in messages.items():
            for use in (Collection, encode):
                with pytest.raises(ValueError, match=message):
                    use(tmp_path / name)
        for name in ("empty", "missing"):
            with pytest.raises(FileNotFoundError, match=r"there is no collection in .*: run `conjoin encode`"):
                Collection(tmp_path / name)
        assert {path.name for path in tmp_path.rglob("*")} == {*messages, "notes.txt", "empty"}
        assert len(encode(tmp_path / "empty")) == ROWS

    def test_an_error_of_the_rows_keeps_its_words(self, tmp_path):
        def rows():
            yield tiny_rows()[0]
            raise OSError("the source is gone")

        with pytest.raises(OSError, match=r"^the source is gone$"):
            encode(tmp_path, rows())


class TestWriters:
    def test_the_second_is_refused(self, small, tmp_path):
        encode(tmp_path / "other", tiny_rows(5))
        collection = encode(tmp_path / "it", tiny_rows(5))

        def rows():
            for number, row in enumerate(tiny_rows()):
                if number == 8:
                    for use in (
                        lambda: encode(tmp_path / "it"),
                        lambda: collection.remove(["row/1"]),
                        lambda: collection.index(None),
                    ):
                        with pytest.raises(ValueError, match=f"another process is writing into '{tmp_path / 'it'}'"):
                            use()
                    encode(tmp_path / "other", tiny_rows(7))
                yield row

        assert len(encode(tmp_path / "it", rows())) == ROWS and len(collection) == 5

    def test_what_is_unfinished_is_neither_removed_from_nor_indexed(self, small, tmp_path):
        collection = encode(tmp_path, tiny_rows(7))
        before = state(tmp_path)
        with pytest.raises(Stop):
            encode(tmp_path, stopping(changed_rows(), 20))
        for use in (lambda: collection.remove(["row/3"]), lambda: collection.index(None)):
            with pytest.raises(ValueError, match=r"the last change of .* did not end: run the same `conjoin encode`"):
                use()
        assert state(tmp_path) == before


DAY = date(2026, 11, 21)
SENT = datetime(2026, 1, 1, 0, 30, tzinfo=ZoneInfo("Europe/Berlin"))
KEPT = {
    "fractions, then integers": ([0.5, 2, 3, 4, 5], [0.5, 2.0, 3.0, 4.0, 5.0]),
    "large integers": ([2**60, 2, 3, 4, 5], None),
    "texts": (["a", "", None, "ü🙂", "it's"], None),
    "only later": ([None, None, None, None, "x"], None),
    "only at first": ([True, False, None, None, None], None),
    "dates": ([DAY, DAY, None, DAY, DAY], None),
    "moments": ([SENT, None, SENT, None, None], None),
    "times": ([datetime(2026, 1, 2, 3), None, datetime(1999, 1, 1), None, None], None),
    "lists": ([["a"], [], ["b", "c"], None, ["d"]], None),
    "numbers, then fractions, in lists": ([[1.5], [2], [], None, [3]], [[1.5], [2.0], [], None, [3.0]]),
    "mappings": ([{"a": 1, "b": "x"}, {"a": 2}, None, {"b": "y"}, {"a": None}],
                 [{"a": 1, "b": "x"}, {"a": 2, "b": None}, None, {"a": None, "b": "y"}, {"a": None, "b": None}]),
    "mappings in mappings": ([{"a": {"b": [1.5]}}, {"a": {"b": []}}, {"a": None}, None, None], None),
    "bytes": ([b"a", b"", None, b"\xff", b"b"], None),
}  # fmt: skip


class TestKept:
    @pytest.mark.parametrize("chunk", [1, 5])
    @pytest.mark.parametrize("name", KEPT)
    def test_values_come_back(self, name, chunk, small, tmp_path):
        given, right = KEPT[name]
        rows = [{"id": str(number), "text": "x", "metadata": {"a b": value}} for number, value in enumerate(given)]
        collection = encode(tmp_path, rows, tiny_encoder(batch_size=chunk))
        found = [row.get("a b") for row in collection.rows([str(number) for number in range(5)])]
        assert found == (given if right is None else right) and [*map(type, found)] == [*map(type, right or given)]
        assert encode(tmp_path, rows, tiny_encoder(batch_size=chunk)).changes == Changes(unchanged=5)
        expected = [str(number) for number, value in enumerate(given) if value is not None]
        assert collection.select("`a b` is not null") == expected

    def test_texts_and_paths_beside_them(self, tmp_path):
        Image.new("RGB", (4, 4), "red").save(tmp_path / "a.png")
        path, picture = str(tmp_path / "a.png"), Image.new("RGB", (3, 3), "red")
        rows = [
            {"id": "file", "image": path, "text": "a text", "metadata": {"price": 3}},
            {"id": "memory", "image": picture, "metadata": {"price": None}},
            {"id": "two", "image": [path, path], "metadata": None},
        ]
        collection = encode(tmp_path / "it", rows, tiny_encoder(input_type="cat"))
        right = [{"id": "file", "text": "a text", "image": path, "price": 3}, {"id": "memory"}]
        right.append({"id": "two", "image": [path, path]})
        assert collection.rows(["file", "memory", "two"]) == right
        assert collection.rows(["two", "file", "two"]) == [right[2], right[0], right[2]]
        assert collection.schema.names == ["id", "text", "image", "price"]

    def test_types_of_a_dataset(self, tmp_path):
        kept = {"price": datasets.Value("float32"), "label": datasets.Value("string"), "none": datasets.Value("int16")}
        features = {"id": datasets.Value("string"), "text": datasets.Value("string"), "metadata": kept}
        rows = [{"id": str(n), "text": "x", "metadata": {"price": n, "label": None, "none": None}} for n in range(3)]
        data = datasets.Dataset.from_list(rows, features=datasets.Features(features))
        for name, some in (("data", data), ("stream", data.to_iterable_dataset())):
            schema = encode(tmp_path / name, some).schema
            assert [schema.field(column).type for column in kept] == [pa.float32(), pa.string(), pa.int16()]
        assert encode(tmp_path / "data", data).changes == Changes(unchanged=3)

    def test_new_columns_of_an_update(self, tmp_path):
        rows = [{"id": str(number), "text": f"text {number}", "metadata": {"price": number}} for number in range(6)]
        encode(tmp_path / "it", rows)
        rows[1]["metadata"] = {"price": 5}
        rows[2]["metadata"] = {"price": 2, "colour": "red"}
        rows[3] = {"id": "3", "text": "text 3"}
        encoder = counting()
        assert encode(tmp_path / "it", rows, encoder).changes == Changes(replaced=3, unchanged=3)
        assert encoded(encoder) == 0
        assert state(tmp_path / "it") == state(encode(tmp_path / "whole", rows).uri)
        collection = Collection(tmp_path / "it")
        assert sorted(collection.select("colour = 'red' or price = 5")) == ["1", "2", "5"]
        collection.index(None)
        rows[4]["metadata"] = {"price": 7}
        encode(tmp_path / "it", rows)
        assert Collection(tmp_path / "it").select("price > 6") == ["4"]

    def test_another_type_in_an_update_is_named(self, small, tmp_path):
        kept = {"price": 1, "size": {"a": 1}, "sizes": [{"a": 1}]}
        rows = [{"id": str(number), "text": "x", "metadata": kept} for number in range(6)]
        encode(tmp_path, rows)
        before = state(tmp_path)
        for value, kind in (("low", "string"), (0.5, "double")):
            rows[4]["metadata"] = {"price": value}
            with pytest.raises(ValueError, match=f"the column 'price' .* holds int64, and some .* have {kind} now"):
                encode(tmp_path, rows)
            assert state(tmp_path) == before


class TestFullDisk:
    def test_a_commit_that_fails(self, small, tmp_path, monkeypatch):
        encode(tmp_path)
        before = state(tmp_path)
        calls = iter(range(100))
        original = LanceTable.add

        def add(table, *args, **options):
            if next(calls) == 2:
                raise RuntimeError("lance error: LanceError(IO): No space left on device (os error 28), /x/y.rs:1:2")
            return original(table, *args, **options)

        rows = [*tiny_rows(), *(row | {"id": f"new {row['id']}"} for row in tiny_rows())]
        with monkeypatch.context() as patch:
            patch.setattr(LanceTable, "add", add)
            with pytest.raises(OSError, match=r"cannot write the collection .*No space left on device.*resumes$"):
                encode(tmp_path, rows)
        assert state(tmp_path) == before
        assert encode(tmp_path, rows).changes.unchanged > ROWS
        assert len(state(tmp_path)) == 2 * ROWS
