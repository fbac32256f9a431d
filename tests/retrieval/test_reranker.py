"""A `CrossEncoder` sorts the first results again: the function, `conjoin search` and `conjoin evaluate`."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from conjoin.cli.main import main
from conjoin.retrieval import Hit, Hits, Ranking, Reranker, encode_collection, load_encoder, load_reranker, rerank
from conjoin.retrieval.reranker import rerank_hits
from tiny_merit import write_merit

TEXTS = ["a red apple", "two chairs", "the sea", "nine boats on a lake", "no"]


@pytest.fixture(scope="module")
def text_reranker(tiny_checkpoints, tmp_path_factory):
    from sentence_transformers import CrossEncoder

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("reranker")
    CrossEncoder(tiny_checkpoints["bert"], num_labels=1, device="cpu").save_pretrained(str(folder))
    return folder


class Brightness:
    """Scores a pair by how equally bright its pictures are; stands in for a multimodal `CrossEncoder`."""

    num_labels = 1

    def __init__(self):
        self.asked = []

    def predict(self, inputs, batch_size, show_progress_bar, activation_fn=None, prompt=None):
        self.asked.append((inputs, prompt))
        return [-abs(np.asarray(a, float).mean() - np.asarray(b["image"], float).mean()) for a, b in inputs]


def test_the_scores_are_those_of_the_library(text_reranker):
    from sentence_transformers import CrossEncoder

    reranker = load_reranker(text_reranker, device="cpu", batch_size=2)
    library = CrossEncoder(str(text_reranker), device="cpu")
    pairs = [("what", text) for text in TEXTS]
    found = reranker.score({"text": "what"}, [{"text": text} for text in TEXTS], activate=True)
    np.testing.assert_allclose(found, library.predict(pairs), atol=1e-6)
    logits = library.predict(pairs, activation_fn=torch.nn.Identity())
    np.testing.assert_allclose(reranker.score("what", TEXTS), logits, atol=1e-6)
    assert reranker.fingerprint == load_reranker(text_reranker, device="cpu").fingerprint


def test_the_first_are_sorted_and_the_others_follow():
    levels = {"a": 0, "b": 90, "c": 40, "d": 60, "e": 70, "f": 80}
    grey = {name: {"image": Image.new("RGB", (2, 2), (level,) * 3), "text": "x"} for name, level in levels.items()}
    found = Ranking([list("abcdef")], np.array([[0.9, 0.8, -np.inf, 0.6, 0.5, 0.4]], dtype=np.float32))
    model = Brightness()
    sorted_again = rerank(found, [Image.new("RGB", (3, 3), (65,) * 3)], grey.get, Reranker(model), 3, ["tell"])
    assert sorted_again.ids == [["d", "b", "a", "e", "f", "c"]]
    np.testing.assert_allclose(sorted_again.scores[0], [-5, -25, -65, -66, -66.1, -np.inf], rtol=1e-5)
    assert model.asked[0][1] == "tell" and found.ids == [list("abcdef")]
    everything = rerank(found, [Image.new("RGB", (3, 3))], grey.get, Reranker(model), 99)
    assert everything.ids == [["a", "d", "e", "f", "b", "c"]]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        rerank(found, ["x"], grey.get, Reranker(model), 0)


def test_models_that_do_not_fit(tiny_checkpoints, text_reranker, tmp_path):
    from sentence_transformers import CrossEncoder

    with pytest.raises(ValueError, match="gives 3 scores per pair; expected one"):
        Reranker(CrossEncoder(tiny_checkpoints["bert"], num_labels=3, device="cpu"), name="three")
    with pytest.raises(FileNotFoundError):
        load_reranker(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"cannot score these items: .*not supported"):
        load_reranker(text_reranker, device="cpu").score("a", [Image.new("RGB", (4, 4))])


@pytest.fixture(scope="module")
def made(own_export, tmp_path_factory):
    """A collection of texts."""
    rows = [{"id": str(number), "text": text} for number, text in enumerate(TEXTS)]
    return encode_collection(rows, load_encoder(own_export[0], device="cpu"), tmp_path_factory.mktemp("made")).uri


def test_search(made, text_reranker, capsys):
    words = ["search", str(made), "--text", "what", "--json", "--device", "cpu"]
    assert main([*words, "-k", "5"]) == 0
    plain = [hit["id"] for hit in json.loads(capsys.readouterr().out)["results"]]
    scores = load_reranker(text_reranker, device="cpu").score("what", TEXTS)
    for top, depth in ((3, 3), (100, 5)):
        reranked = ["--rerank", str(text_reranker), "--rerank-top", str(top)]
        assert main([*words, *reranked, "-k", "5"]) == 0
        hits = json.loads(capsys.readouterr().out)["results"]
        first = sorted(plain[:depth], key=lambda name: -scores[int(name)])
        assert [hit["id"] for hit in hits] == first + plain[depth:]
        assert hits[0]["score"] == pytest.approx(float(scores[int(first[0])]), abs=1e-6)
    assert main([*words, "--rerank", str(text_reranker), "-k", "1"]) == 0
    assert [hit["id"] for hit in json.loads(capsys.readouterr().out)["results"]] == first[:1]
    assert main([*words, "--rerank", str(text_reranker), "--rerank-top", "0"]) == 2
    assert "--rerank-top must be at least 1, got 0" in capsys.readouterr().err


def test_hits_with_several_images(tmp_path):
    for name, level in (("a", 10), ("b", 80), ("c", 200)):
        Image.new("RGB", (4, 4), (level,) * 3).save(tmp_path / f"{name}.png")
    kept = [{"image": [f"{tmp_path}/{name}.png" for name in some]} for some in ("ac", "bb")]
    first, second = Hit("0", 0.9, kept[0]), Hit("1", 0.8, kept[1])
    queries = [Image.new("RGB", (2, 2), (level,) * 3) for level in (80, 105)]
    again = rerank_hits(Hits([[first, second], [second, first]]), queries, Reranker(MeanBrightness()), 2)
    assert again.ids == [["1", "0"], ["0", "1"]] and again[0][0].row == kept[1]


def test_run_files_carry_the_new_order(own_export, tmp_path, monkeypatch):
    data = tmp_path / "merit"
    data.mkdir()
    write_merit(data)
    monkeypatch.setattr("conjoin.retrieval.load_reranker", lambda name, **options: Reranker(Averages(), name=name))
    words = ["evaluate", str(own_export[0]), "--benchmark", "merit", "--data", str(data), "--input", "avg"]
    words += ["--device", "cpu", "--quiet"]
    assert main([*words, "--out", str(tmp_path / "plain")]) == 0
    assert main([*words, "--out", str(tmp_path / "new"), "--rerank", "averages", "--rerank-top", "4"]) == 0
    plain, new = {}, {}
    for name, run in (("plain", plain), ("new", new)):
        for query, _, found, *_ in map(str.split, (tmp_path / name / "runs" / "test.txt").read_text().splitlines()):
            run.setdefault(query, []).append(found)
    assert plain.keys() == new.keys()
    for query, ranking in new.items():
        assert sorted(ranking[:4]) == sorted(plain[query][:4]) and ranking[4:] == plain[query][4:]
    assert new != plain
    config = json.loads((tmp_path / "new" / "results.json").read_text())["config"]
    assert (config["reranker"], config["reranked candidates"]) == ("averages", 4)


class MeanBrightness(Brightness):
    def predict(self, inputs, batch_size, show_progress_bar, activation_fn=None, prompt=None):
        means = [np.mean([np.asarray(image, float).mean() for image in b["image"]]) for _, b in inputs]
        return [-abs(np.asarray(a, float).mean() - mean) for (a, _), mean in zip(inputs, means, strict=True)]


class Averages(Brightness):
    def predict(self, inputs, batch_size, show_progress_bar, activation_fn=None, prompt=None):
        return [np.asarray(candidate["image"], float).mean() for _, candidate in inputs]
