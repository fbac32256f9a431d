"""Training on streams: mixed sources, a resumed run that equals a whole one, bad rows that are left out and listed."""

import json
from collections import Counter
from itertools import islice

import datasets
import fsspec
import pytest
from datasets import IterableDataset
from safetensors.torch import load_file

from conjoin import load_recipe
from conjoin.data import DataArguments, SkippedFile
from conjoin.trainers import build_trainer, run
from tiny_training import make_encoder, make_rows, make_trainer, small_run, without_dropout, write_pairs, write_recipe


@pytest.fixture
def sources(tmp_path):
    """A folder of seven pairs, and two Parquet files in memory, as on object storage, of four rows each."""
    write_pairs(tmp_path / "a", 7)
    memory = fsspec.filesystem("memory")
    for number in range(2):
        rows = make_rows(8).select(range(4 * number, 4 * number + 4))
        rows.to_parquet(tmp_path / "b.parquet")
        memory.put(str(tmp_path / "b.parquet"), f"/bucket/part-{number}.parquet")
    yield [{"path": str(tmp_path / "a"), "weight": 3.0}, {"path": "memory://bucket/*.parquet", "name": "b"}]
    memory.rm("/bucket", recursive=True)


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 1)  # the library waits so long at each end

    def load(sources, seed=0, **options):
        data = DataArguments(dataset_mixture=sources, dataset_streaming=True, **options)
        rows, _ = data.load(seed, SkippedFile(tmp_path / "out"))
        assert isinstance(rows, IterableDataset)
        return rows

    return load


def first_ids(rows, count):
    return [row["id"] for row in islice(iter(rows), count)]


def test_sources_are_mixed_by_weight_and_repeat(sources, load):
    counts = Counter(name.endswith(".png") for name in first_ids(load(sources), 400))
    assert counts[True] == pytest.approx(300, abs=35)
    even = [source | {"weight": 1.0} for source in sources]
    assert Counter(name.endswith(".png") for name in first_ids(load(even, shuffle_window=1), 60)) == {
        True: 30,
        False: 30,
    }


def test_rows_are_shuffled_in_a_window(sources, load):
    alone = sources[1:]
    shuffled = first_ids(load(alone), 16)
    assert first_ids(load(alone, shuffle_window=1), 16) != shuffled
    assert first_ids(load(alone), 16) == shuffled != first_ids(load(alone, seed=1), 16)
    assert {*first_ids(load(alone, shuffle_window=8), 40)} == {f"row{i}" for i in range(8)}  # none is lost


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": -1.0}, "weight.: -1.0.*expected path, split, weight .a positive number"),
        ({"path": "memory://bucket/nothing.parquet"}, "nothing.parquet"),
        ({"path": "memory://bucket/a.csv"}, "expected files ending in .parquet"),
    ],
)
def test_a_source_that_cannot_be_used_is_named(sources, load, change, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load([sources[0], sources[1] | change])


def stream_trainer(checkpoints, rows, out):
    model, processor = make_encoder(checkpoints)
    without_dropout(model)
    settings = {
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 3,
        "max_steps": 5,
        "mask_false_negatives": False,
    }
    return make_trainer("contrastive", model, processor, out, rows, **settings)


def test_a_resumed_run_reads_on_where_it_stopped(tiny_checkpoints, sources, load, tmp_path):
    whole = stream_trainer(tiny_checkpoints, load(sources, shuffle_window=4), tmp_path / "whole")
    whole.train()
    second = stream_trainer(tiny_checkpoints, load(sources, shuffle_window=4), tmp_path / "part")
    second.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    for trainer, folder in ((whole, "whole"), (second, "part")):
        trainer.save_model(str(tmp_path / folder / "model"))
    found, expected = (load_file(tmp_path / one / "model/model.safetensors") for one in ("part", "whole"))
    assert all(found[name].equal(expected[name]) for name in expected)
    losses = [[entry["loss"] for entry in one.state.log_history if "loss" in entry] for one in (whole, second)]
    assert losses[0] == losses[1] and len(set(losses[0])) == 5


@pytest.mark.parametrize("streaming", [False, True])
def test_skipped_rows_are_counted_and_listed(tiny_checkpoints, tmp_path, caplog, streaming):
    write_pairs(tmp_path / "rows", 6)
    (tmp_path / "rows/row1.png").write_bytes(b"no picture")
    (tmp_path / "rows/row4.txt").write_text(" ")
    out, data = tmp_path / "out", {"columns": {"id": ""}, "on_error": "skip"}
    path = write_recipe(tmp_path, tiny_checkpoints, "contrastive", tmp_path / "rows", **data)
    words = small_run(out, per_device_train_batch_size=2)
    words += ["--dataset_streaming", "true", "--max_steps=6"] if streaming else []
    run(build_trainer(load_recipe(path, words)))
    listed = [json.loads(line) for line in (out / "skipped.jsonl").read_text().splitlines()]
    assert [one["source"] for one in listed] == [str(tmp_path / "rows")] * 2
    reasons = " ".join(one["reason"] for one in listed)
    assert "cannot read the image" in reasons and "text" in reasons
    assert "2 in all" in caplog.text
    with pytest.raises(ValueError, match=r"text|image"):
        run(build_trainer(load_recipe(path, [*words, "--on_error=raise", f"--output_dir={tmp_path / 'other'}"])))


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_which_none_can_be_used_are_refused(tiny_checkpoints, tmp_path, streaming):
    write_pairs(tmp_path / "rows", 2)
    for name in ("row0", "row1"):
        (tmp_path / f"rows/{name}.png").write_bytes(b"no picture")
    path = write_recipe(tmp_path, tiny_checkpoints, "contrastive", tmp_path / "rows", on_error="skip")
    words = [*small_run(tmp_path / "out"), *(["--dataset_streaming=true", "--max_steps=2"] if streaming else [])]
    with pytest.raises(ValueError, match=r"none of the (2 )?rows of .* can be used"):
        build_trainer(load_recipe(path, words))
