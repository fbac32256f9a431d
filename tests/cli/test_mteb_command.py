"""MTEB's own mock tasks, offline, run by `conjoin mteb` and by `mteb.evaluate`."""

import json

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer

from conjoin import ItemEncoder, load_encoder
from conjoin.cli.main import main
from tiny_encoder import tiny_encoder

pytest.importorskip("mteb")

import mteb

from conjoin.evaluation.mteb_model import MtebModel, mteb_model

KINDS = (
    *("MockAny2AnyRetrievalI2TTask", "MockAny2AnyRetrievalT2ITask", "MockMultiChoiceTask"),
    *("MockImageClassificationTask", "MockVisualSTSTask", "MockSTSTask", "MockRetrievalTask"),
)


def mock(name):
    from mteb.mocks import mock_tasks

    if not hasattr(mock_tasks, name):
        pytest.skip(f"mteb has no {name}")
    return getattr(mock_tasks, name)()


class Recorder(ItemEncoder):
    """A tiny encoder that keeps what it was asked for."""

    def encode(self, items, *args, ids=None, prompt=None, role=None, **options):
        self.__dict__.setdefault("seen", []).append((items, role, prompt))
        return super().encode(items, ids=ids)


def recorder():
    tiny = tiny_encoder()
    return Recorder(tiny.model, tiny.processor)


@pytest.mark.parametrize("kind", KINDS)
def test_mteb_evaluates_any_model(kind, tmp_path):
    task = mock(kind)
    results = mteb.evaluate(MtebModel(tiny_encoder(name="owner/tiny")), [task], cache=mteb.ResultCache(tmp_path))
    score = results.task_results[0].get_score()
    assert 0 <= score <= 1 or (kind == "MockVisualSTSTask" and np.isnan(score))  # its right answers are all equal
    (file,) = tmp_path.rglob(f"{task.metadata.name}.json")
    assert "owner__tiny" in str(file) and json.loads(file.read_text())["scores"]


def test_the_command_writes_mtebs_results_and_resumes(model, tmp_path, capsys, monkeypatch):
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
    assert main(["push", str(model), "me/model", "--dry-run", "--results", str(tmp_path / "out")]) == 0
    card = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if line.startswith("MockAny2AnyRetrievalT2I")]
    assert f"| MockAny2AnyRetrievalT2I, main score | {100 * float(line.split()[-1]):.1f} %" in card
    assert "name: MTEB MockAny2AnyRetrievalT2I" in card and "nan" not in card


def test_instructions_are_for_models_that_follow_them(retriever, monkeypatch):
    task = mock("MockAny2AnyRetrievalT2ITask")
    monkeypatch.setattr(task.metadata, "prompt", {"query": "Find the picture."})
    for encoder, told in ((recorder(), None), (Recorder(*retriever("qwen2_vl", 1)), "Find the picture. ")):
        model = MtebModel(encoder)
        encoder.seen.clear()
        mteb.evaluate(model, [task], cache=None)
        asked = {("image" in items[0], role, prompt) for items, role, prompt in encoder.seen}
        assert asked == {(False, "query", told), (True, "document", None)}


@pytest.mark.parametrize("kind", ["bert", "clip", "joint_encoder"])
def test_the_scores_are_those_of_mteb_itself(kind, exports, tiny_checkpoints, tmp_path, monkeypatch):
    """sentence-transformers loads each of them; its models do not get the instructions of tasks."""
    from mteb.models import ModelMeta, SentenceTransformerEncoderWrapper

    folder = tmp_path / "model"
    if kind == "joint_encoder":
        folder = exports(kind)[0]
    else:
        modules = [Transformer(str(tiny_checkpoints[kind])), *([Pooling(24)] if kind == "bert" else [])]
        prompts = {"query": "seek ", "document": "passage "} if kind == "bert" else {}
        SentenceTransformer(modules=modules, prompts=prompts, device="cpu").save_pretrained(str(folder))
    stock = SentenceTransformerEncoderWrapper(
        SentenceTransformer(str(folder), device="cpu", trust_remote_code=kind == "joint_encoder")
    )
    modalities = ["text"] if kind == "bert" else ["text", "image"]
    stock.mteb_model_meta = ModelMeta.create_empty(overwrites={"name": "stock/one", "modalities": modalities})
    scores = []
    for each in (mteb_model(load_encoder(folder)), stock):
        # new tasks for each, whose pictures are random but the same
        tasks = [mock(name) for name in ("MockRetrievalTask", "MockAny2AnyRetrievalT2ITask")[: len(modalities)]]
        for task in tasks if kind != "joint_encoder" else []:
            monkeypatch.setattr(task.metadata, "prompt", {"query": "Find what is asked for."})
        found = mteb.evaluate(each, tasks, cache=None, show_progress_bar=False)
        scores.append([_numbers(result.scores) for result in found.task_results])
    assert scores[0] == [pytest.approx(each) for each in scores[1]] and scores[0][0]["main_score"] > 0


def _numbers(scores):
    (subset,) = scores["test"]
    return {name: value for name, value in subset.items() if isinstance(value, float) and not np.isnan(value)}


def test_rows_become_items_and_errors_name_the_row(pictures):
    encoder = recorder()
    model, metadata = MtebModel(encoder), mock("MockVisualSTSTask").metadata
    where = {"task_metadata": metadata, "hf_split": "test", "hf_subset": "default"}
    batch = {"text": ["one", "", None], "image": [None, pictures[0], pictures[1]], "id": ["a", "b", "c"]}
    vectors = model.encode([batch, {"text": ["two"]}], **where)
    assert vectors.shape == (4, 8)
    model.encode([{"text": ["words"], "image": [pictures[0]]}], **where)
    assert [list(item) for item in encoder.seen[-1][0]] == [["image", "text"]], "image first, as in training"
    expected = tiny_encoder().encode(["one", pictures[0], pictures[1], "two"])
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    np.testing.assert_allclose(model.similarity(vectors, 2 * vectors), expected @ expected.T, atol=1e-6)
    np.testing.assert_allclose(model.similarity_pairwise(vectors, vectors), np.ones(4), atol=1e-6)
    with pytest.raises(ValueError, match=r"item '1 of MockVisualSTS, default, test'"):
        model.encode([{"text": ["one", None]}], **where)


def test_meta_says_what_the_model_is(tiny_checkpoints):
    meta = MtebModel(load_encoder(tiny_checkpoints["bert"], pooling="cls")).mteb_model_meta
    assert meta.modalities == ["text"] and meta.name.startswith("conjoin/bert") and meta.embed_dim == 24
    assert MtebModel(load_encoder(tiny_checkpoints["clip"])).mteb_model_meta.modalities == ["text", "image"]


def test_unknown_tasks_are_named(model, tmp_path, capsys, monkeypatch):
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
