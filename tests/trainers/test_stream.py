"""Training on streams: a resumed run equals an uninterrupted one; bad rows are left out and listed."""

import json

import pytest
from safetensors.torch import load_file

from conjoin.data import PairStream, load_training_pairs
from conjoin.training import PairArguments, SourceArguments, load_recipe, train
from conjoin.training.data import QueryArguments
from tiny_training import make_encoder, make_trainer, without_dropout, write_pairs

RECIPE = """
method: contrastive
model: {vision: %s, text: %s, config: {hidden_size: 16, num_attention_heads: 2}}
data: {source: %s, id_column: "", on_error: skip}
training: {output_dir: %s, max_steps: 2, per_device_train_batch_size: 2, use_cpu: true, report_to: none,
           save_strategy: "no", logging_steps: 1}
"""


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
    out = tmp_path / "out"
    path = tmp_path / "recipe.yaml"
    names = [tiny_checkpoints[one] for one in ("dinov2", "bert")]
    path.write_text(RECIPE % (*names, tmp_path / "rows", out))
    stream = {"data.streaming": "true", "data.shuffle_window": "1", "training.max_steps": "6"} if streaming else {}
    train(load_recipe(path, stream))
    listed = [json.loads(line) for line in (out / "skipped.jsonl").read_text().splitlines()]
    assert [(one["source"], one["id"][:3]) for one in listed] == [
        (str(tmp_path / "rows"), one["id"][:3]) for one in listed
    ]
    assert len(listed) == 2 and "cannot read the image" in listed[0]["reason"] and "text" in listed[1]["reason"]
    assert "2 in all" in caplog.text
    with pytest.raises(ValueError, match=r"text|image"):
        train(load_recipe(path, stream | {"data.on_error": "raise", "training.output_dir": str(tmp_path / "other")}))


def test_sources_of_a_recipe_are_mixed(folders):
    a, b = map(str, folders)
    sources = (SourceArguments(a, weight=3.0), SourceArguments(b, name="b", columns={"image": "file_name", "id": ""}))
    rows, _ = PairArguments(sources=sources, streaming=True).load()
    assert isinstance(rows, PairStream) and [*rows.sources] == [a, "b"] and rows.weights == [3.0, 1.0]
    assert QueryArguments(format="nli").sources == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_error": "ignore"}, "on_error='ignore'"),
        ({"shuffle_window": 0}, "shuffle_window=0"),
        ({"sources": (SourceArguments("a"),)}, "streaming: true"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        PairArguments(**options)


def test_settings_that_do_not_fit_together(folders):
    a = SourceArguments(str(folders[0]))
    with pytest.raises(ValueError, match="two sources are called"):
        PairArguments(sources=(a, a), streaming=True).load()
    with pytest.raises(ValueError, match="unknown roles"):
        PairArguments(sources=(SourceArguments("a", columns={"query": "a"}),), streaming=True).load()
    with pytest.raises(ValueError, match="is for pairs"):
        QueryArguments(on_error="skip")
