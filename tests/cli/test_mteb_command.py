"""MTEB's own mock tasks, offline, run by `conjoin mteb` and by `mteb.evaluate`."""

import json

import numpy as np
import pytest

from conjoin.cli.main import main
from conjoin.evaluation.mteb_model import MtebModel
from tiny_encoder import tiny_encoder

KINDS = (
    *("MockAny2AnyRetrievalI2TTask", "MockAny2AnyRetrievalT2ITask", "MockMultiChoiceTask"),
    *("MockImageClassificationTask", "MockVisualSTSTask", "MockSTSTask", "MockRetrievalTask"),
)


@pytest.fixture(autouse=True)
def mteb():
    """The library, imported where these tests run: it takes seconds."""
    return pytest.importorskip("mteb")


def mock(name):
    from mteb.mocks import mock_tasks

    if not hasattr(mock_tasks, name):
        pytest.skip(f"mteb has no {name}")
    return getattr(mock_tasks, name)()


class Recorder:
    """A tiny encoder that keeps what it was asked for."""

    def __init__(self):
        self.encoder = tiny_encoder()
        self.seen = []

    def __getattr__(self, name):
        return getattr(self.encoder, name)

    def encode(self, items, *, ids=None, prompt=None, role=None):
        self.seen.append((items, role, prompt))
        return self.encoder.encode(items, ids=ids)


@pytest.mark.parametrize("kind", KINDS)
def test_mteb_evaluates_any_model(kind, mteb, tmp_path):
    task = mock(kind)
    results = mteb.evaluate(MtebModel(tiny_encoder(name="owner/tiny")), [task], cache=mteb.ResultCache(tmp_path))
    score = results.task_results[0].get_score()
    assert 0 <= score <= 1 or (kind == "MockVisualSTSTask" and np.isnan(score))  # its right answers are all equal
    (file,) = tmp_path.rglob(f"{task.metadata.name}.json")
    assert "owner__tiny" in str(file) and json.loads(file.read_text())["scores"]


def test_the_command_writes_mtebs_results_and_resumes(model, mteb, tmp_path, capsys, monkeypatch):
    tasks = [mock("MockAny2AnyRetrievalT2ITask"), mock("MockVisualSTSTask")]
    monkeypatch.setattr(mteb, "get_tasks", lambda **options: tasks)
    command = ["mteb", str(model), "--tasks", "a", "b", "--out", str(tmp_path / "out"), "--quiet"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "MockAny2AnyRetrievalT2I" in printed and "MockVisualSTS" in printed
    files = {file.stem: file for file in (tmp_path / "out").rglob("Mock*.json")}
    assert set(files) == {task.metadata.name for task in tasks}
    assert f"conjoin__{model.name}" in str(files["MockVisualSTS"])
    assert str(model.parent) not in files["MockVisualSTS"].read_text()
    monkeypatch.setattr(MtebModel, "encode", None)
    assert main(command) == 0 and capsys.readouterr().out == printed  # nothing is computed again


def test_instructions_go_to_queries(mteb, monkeypatch):
    task = mock("MockAny2AnyRetrievalT2ITask")
    monkeypatch.setattr(task.metadata, "prompt", {"query": "Find the picture."})
    found = []
    for options in ({}, {"instructions": {task.metadata.name: "Mine."}}):
        recorder = Recorder()
        model = MtebModel(recorder, **options)
        recorder.seen.clear()
        mteb.evaluate(model, [task], cache=None)
        found.append({("image" in items[0], role, told) for items, role, told in recorder.seen})
    picture = (True, "document", None)
    assert found == [{(False, "query", "Find the picture. "), picture}, {(False, "query", "Mine. "), picture}]


def test_rows_become_items_and_errors_name_the_row(pictures):
    recorder = Recorder()
    model, metadata = MtebModel(recorder), mock("MockVisualSTSTask").metadata
    where = {"task_metadata": metadata, "hf_split": "test", "hf_subset": "default"}
    batch = {"text": ["one", "", None], "image": [None, pictures[0], pictures[1]], "id": ["a", "b", "c"]}
    vectors = model.encode([batch, {"text": ["two"]}], **where)
    assert vectors.shape == (4, 8)
    model.encode([{"text": ["words"], "image": [pictures[0]]}], **where)
    assert [list(item) for item in recorder.seen[-1][0]] == [["image", "text"]], "image first, as in training"
    expected = recorder.encoder.encode(["one", pictures[0], pictures[1], "two"])
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    np.testing.assert_allclose(model.similarity(vectors, 2 * vectors), expected @ expected.T, atol=1e-6)
    np.testing.assert_allclose(model.similarity_pairwise(vectors, vectors), np.ones(4), atol=1e-6)
    with pytest.raises(ValueError, match=r"item '1 of MockVisualSTS, default, test'"):
        model.encode([{"text": ["one", None]}], **where)


def test_meta_says_what_the_model_is(tiny_checkpoints):
    from conjoin import load_encoder

    meta = MtebModel(load_encoder(tiny_checkpoints["bert"], pooling="cls")).mteb_model_meta
    assert meta.modalities == ["text"] and meta.name.startswith("conjoin/bert") and meta.embed_dim == 24
    assert MtebModel(load_encoder(tiny_checkpoints["clip"])).mteb_model_meta.modalities == ["text", "image"]


def test_mistakes_are_one_line(model, mteb, tmp_path, capsys, monkeypatch):
    def refuse(*names, tasks=()):
        raise KeyError(f"{[*names, *tasks]} not found")

    monkeypatch.setattr(mteb, "get_benchmark", refuse)  # the library imports all of its tasks, for 15 seconds
    monkeypatch.setattr(mteb, "get_tasks", lambda tasks: refuse(*tasks))
    for words, message in (
        (("--tasks", "NoSuchTask"), "NoSuchTask"),
        (("--benchmark", "NoSuchBenchmark"), "NoSuchBenchmark"),
    ):
        assert main(["mteb", str(model), *words, "--out", str(tmp_path / "out"), "--quiet"]) == 2
        assert message in capsys.readouterr().err
