"""Streams of pairs: mixing, shuffling, division among processes, exact resumption, and rows without use."""

import io
import json
import tarfile
from collections import Counter
from itertools import islice

import datasets
import fsspec
import pytest
from PIL import Image

from conjoin.data import PairStream, load_training_pairs, without_problems


def png(colour=(1, 2, 3)):
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), colour).save(buffer, "png")
    return buffer.getvalue()


def write_parquet(path, name, count, rows=None):
    table = rows or [
        {"id": f"{name}{i}", "image": {"bytes": png((i, 0, 0))}, "text": f"{name} {i}"} for i in range(count)
    ]
    features = {
        "id": datasets.Value("string"),
        "image": datasets.Image(decode=False),
        "text": datasets.Value("string"),
    }
    datasets.Dataset.from_list(table, features=datasets.Features(features)).to_parquet(path)
    return path


def write_shard(path, name, count):
    with tarfile.open(path, "w") as tar:
        for i in range(count):
            for suffix, content in (("png", png((i, 0, 0))), ("txt", f"{name} {i}".encode())):
                info = tarfile.TarInfo(f"{name}{i}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return str(path)


@pytest.fixture
def sources(tmp_path):
    """A tar shard, two Parquet files in memory (as on object storage) and a local one."""
    memory = fsspec.filesystem("memory")
    for number in range(2):
        local = write_parquet(str(tmp_path / f"m{number}.parquet"), f"m{number}-", 4)
        memory.put(local, f"/bucket/part-{number}.parquet")
    yield {
        "tar": write_shard(tmp_path / "a.tar", "t", 5),
        "object": "memory://bucket/*.parquet",
        "file": write_parquet(str(tmp_path / "f.parquet"), "f", 3),
    }
    memory.rm("/bucket", recursive=True)


def make_stream(sources, **options):
    return PairStream({name: load_training_pairs(path, streaming=True) for name, path in sources.items()}, **options)


def batches(stream, count, **options):
    loader = stream.loader(lambda rows: [row["id"] for row in rows], 3, **options)
    found = []
    for ids, mark in islice(iter(loader), count):
        found.append(ids)
        stream.advance(mark)
    return found


def test_sources_are_mixed_evenly_by_weight_and_repeat(sources):
    stream = make_stream(sources, weights=[2, 1, 1], window=1)
    ids = [row["id"] for row in islice(iter(stream), 40)]
    for end in range(1, 41):  # at every moment, not only on average
        found = Counter(one[0] for one in ids[:end])
        assert abs(found["t"] - end / 2) <= 1 and abs(found["m"] - end / 4) <= 1, end
    assert [one for one in ids if one[0] == "t"][:10] == [f"t{i}" for i in range(5)] * 2
    assert [one for one in ids if one[0] == "m"][:8] == [f"m{n}-{i}" for n in range(2) for i in range(4)]


@pytest.mark.parametrize("weights", [[10] + [1] * 10, [2, 1, 1, 1], [0.5, 7.3, 0.1]])
def test_many_sources_of_unequal_weight_are_mixed_to_within_one_row(weights):
    rows = {str(n): datasets.Dataset.from_list([{"id": str(n)}]).to_iterable_dataset() for n in range(len(weights))}
    found = Counter()
    for end, row in enumerate(islice(PairStream(rows, weights, window=1), 60), start=1):
        found[row["id"]] += 1
        shares = (end * weight / sum(weights) for weight in weights)
        assert all(abs(found[str(n)] - share) < 1 for n, share in enumerate(shares)), end


def test_windows_are_shuffled_anew_in_each_pass(sources):
    stream = make_stream({"object": sources["object"]}, window=8)
    ids = [row["id"] for row in islice(iter(stream), 16)]
    assert sorted(ids[:8]) == sorted(ids[8:]) and ids[:8] != ids[8:] != sorted(ids[8:])


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("used", [1, 4, 7])
def test_a_resumed_stream_gives_the_rows_of_an_uninterrupted_one(sources, window, used):
    expected = batches(make_stream(sources, window=window), 12, seed=3)
    first = make_stream(sources, window=window)
    start = batches(first, used, seed=3)
    second = make_stream(sources, window=window)
    second.position = json.loads(json.dumps(first.position))
    assert start + batches(second, 12 - used, seed=3) == expected


def test_workers_resume_in_turn(sources):
    only = {"object": sources["object"]}
    fork = {"workers": 2, "multiprocessing_context": "fork"}  # the files in memory are those of this process
    expected = batches(make_stream(only, window=2), 8, **fork)
    assert {one[:2] for one in expected[0]} == {"m0"} and {one[:2] for one in expected[1]} == {"m1"}
    first = make_stream(only, window=2)
    start = batches(first, 1, **fork)
    with pytest.raises(ValueError, match="read by 2 workers; resume it with as many, not with 0"):
        first.loader(list, 3)
    start += batches(first, 2, **fork)
    second = make_stream(only, window=2)
    second.position = first.position
    assert start + batches(second, 5, **fork) == expected
    with pytest.raises(ValueError, match="read by 2 workers"):
        second.loader(list, 3)
    with pytest.raises(ValueError, match="2 shards for this process"):
        second.loader(list, 3, workers=3)


def test_processes_share_the_rows(sources):
    some = {name: sources[name] for name in ("object", "file")}
    found = [batches(make_stream(some, window=2), 4, rank=rank, processes=2) for rank in range(2)]
    ids = [{one for batch in part for one in batch} for part in found]
    assert not ids[0] & ids[1]
    assert {one[:2] for one in ids[0] if one[0] == "m"} == {"m0"}  # a whole shard each
    assert ids[0] | ids[1] >= {"f0", "f1", "f2"}


BAD = {
    "a missing text": ({"text": None}, "text"),
    "no image": (b"no image", "cannot read the image"),
    "a file that does not exist": ({"image": "nowhere.png"}, "no such file"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("streaming", [False, True])
def test_bad_rows_are_skipped_with_the_reason(tmp_path, kind, streaming):
    change, reason = BAD[kind]
    rows = [{"id": f"r{i}", "image": f"r{i}.png", "text": f"text {i}"} for i in range(4)]
    for i, row in enumerate(rows):
        (tmp_path / row["image"]).write_bytes(png((i, 0, 0)))
    if isinstance(change, bytes):
        (tmp_path / "r2.png").write_bytes(change)
    else:
        rows[2] |= change
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = load_training_pairs(path, streaming=streaming, on_error="skip")
    if streaming:
        stream = PairStream({"mine": kept}, window=1, skip=True)
        ((ids, mark),) = islice(stream.loader(lambda rows: [row["id"] for row in rows], 3), 1)
        skipped = mark.skipped
        assert all("problem" not in row for row in islice(iter(stream), 3))
    else:
        good, skipped = without_problems(kept, "mine")
        ids = good["id"][:]
        assert good.column_names == ["id", "image", "text"]
    assert ids == ["r0", "r1", "r3"]
    assert [(row.source, row.id) for row in skipped] == [("mine", "r2")]
    assert reason in skipped[0].reason


@pytest.mark.parametrize("streaming", [False, True])
def test_sources_without_a_good_row(tmp_path, streaming):
    path = write_parquet(str(tmp_path / "a.parquet"), "r", 2, [{"id": "a", "image": {"bytes": b"x"}, "text": "a"}] * 1)
    kept = load_training_pairs(path, streaming=streaming, on_error="skip")
    with pytest.raises(ValueError, match="can be used"):
        next(iter(PairStream({"mine": kept}, skip=True))) if streaming else without_problems(kept, "mine")


def test_bad_input(sources):
    for options in ({"weights": [1, 1]}, {"weights": [1, 0, 1]}, {"window": 0}):
        with pytest.raises(ValueError, match="positive number"):
            make_stream(sources, **options)
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_training_pairs("memory://bucket/nothing.parquet", streaming=True)
    with pytest.raises(ValueError, match=r"expected files ending in .parquet"):
        load_training_pairs("memory://bucket/a.csv", streaming=True)
