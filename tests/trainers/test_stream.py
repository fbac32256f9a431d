"""Training on streams: a resumed run equals an uninterrupted one; bad rows are left out and listed."""

import json

import pytest
from safetensors.torch import load_file

from conjoin.data import PairStream, load_training_pairs
from conjoin.trainers.recipe import DataArguments, load_recipe
from conjoin.trainers.runs import build_trainer, run
from tiny_training import make_encoder, make_trainer, small_run, without_dropout, write_pairs, write_recipe


@pytest.fixture
def folders(tmp_path):
    for name, count in (("a", 7), ("b", 3)):
        write_pairs(tmp_path / name, count)
    return [tmp_path / "a", tmp_path / "b"]


def stream_trainer(checkpoints, folders, out, **arguments):
    model, processor = make_encoder(checkpoints)
    without_dropout(model)
    rows = PairStream({str(one): load_training_pairs(one, streaming=True) for one in folders}, window=4)
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5, "mask_false_negatives": False}
    return make_trainer("contrastive", model, processor, out, rows, **settings | arguments)


def test_a_resumed_run_reads_on_where_it_stopped(tiny_checkpoints, folders, tmp_path):
    whole = stream_trainer(tiny_checkpoints, folders, tmp_path / "whole")
    whole.train()
    first = stream_trainer(tiny_checkpoints, folders, tmp_path / "part")
    step = first.training_step

    def interrupted(*args, **kwargs):
        if first.state.global_step == 3:
            raise KeyboardInterrupt
        return step(*args, **kwargs)

    first.training_step = interrupted
    with pytest.raises(KeyboardInterrupt):
        first.train()
    second = stream_trainer(tiny_checkpoints, folders, tmp_path / "part")
    second.train(resume_from_checkpoint=str(tmp_path / "part/checkpoint-2"))
    assert second.stream.rows.position == whole.stream.rows.position
    for trainer, folder in ((whole, "whole"), (second, "part")):
        trainer.save_model(str(tmp_path / folder / "model"))
    found, expected = (load_file(tmp_path / one / "model/model.safetensors") for one in ("part", "whole"))
    assert all(found[name].equal(expected[name]) for name in expected)
    losses = [[entry["loss"] for entry in one.state.log_history if "loss" in entry] for one in (whole, second)]
    assert losses[0] == losses[1] and len(set(losses[0])) == 5


def test_a_checkpoint_of_other_processes_is_refused(tiny_checkpoints, folders, tmp_path):
    trainer = stream_trainer(tiny_checkpoints, folders, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match=r"stream-0\.json"):
        trainer.train(resume_from_checkpoint=str(tmp_path))
    (tmp_path / "stream-0.json").write_text(json.dumps({"processes": 2, "batches": 1, "workers": {}}))
    with pytest.raises(ValueError, match="divided among 2 processes"):
        trainer.train(resume_from_checkpoint=str(tmp_path))


@pytest.mark.parametrize("streaming", [False, True])
def test_skipped_rows_are_counted_and_listed(tiny_checkpoints, tmp_path, caplog, streaming):
    write_pairs(tmp_path / "rows", 6)
    (tmp_path / "rows/row1.png").write_bytes(b"no picture")
    (tmp_path / "rows/row4.txt").write_text(" ")
    out, data = tmp_path / "out", {"columns": {"id": ""}, "on_error": "skip"}
    path = write_recipe(tmp_path, tiny_checkpoints, "contrastive", tmp_path / "rows", **data)
    words = small_run(out, per_device_train_batch_size=2)
    words += ["--dataset_streaming", "true", "--shuffle_window=1", "--max_steps=6"] if streaming else []
    run(build_trainer(load_recipe(path, words)))
    listed = [json.loads(line) for line in (out / "skipped.jsonl").read_text().splitlines()]
    assert [(one["source"], one["id"][:3]) for one in listed] == [
        (str(tmp_path / "rows"), one["id"][:3]) for one in listed
    ]
    assert len(listed) == 2 and "cannot read the image" in listed[0]["reason"] and "text" in listed[1]["reason"]
    assert "2 in all" in caplog.text
    with pytest.raises(ValueError, match=r"text|image"):
        run(build_trainer(load_recipe(path, [*words, "--on_error=raise", f"--output_dir={tmp_path / 'other'}"])))


def test_sources_of_a_recipe_are_mixed(folders):
    a, b = map(str, folders)
    sources = [{"path": a, "weight": 3.0}, {"path": b, "name": "b", "columns": {"image": "file_name", "id": ""}}]
    rows, _ = DataArguments(dataset_mixture=sources, dataset_streaming=True).load()
    assert isinstance(rows, PairStream) and [*rows.sources] == [a, "b"] and rows.weights == [3.0, 1.0]
