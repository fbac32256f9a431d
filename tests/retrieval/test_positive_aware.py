"""Mining that compares negatives with the positive, as in sentence-transformers, and for images."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from test_mining import findings, mine, pairs

from conjoin.retrieval import Miner, Reranker, load_mined, mine_hard_negatives

WORDS = ["apple", "chair", "river", "cloud", "zebra", "violin", "tea", "lamp"]


def sentences(count=24):
    """Queries with one or two positives."""
    random = np.random.default_rng(1)
    queries = [" ".join(random.choice(WORDS, size=3)) + f" q{number}" for number in range(count)]
    positives = [" ".join([*query.split()[:2], f"p{number}"]) for number, query in enumerate(queries)]
    return queries, positives


def by_the_library(folder, queries, positives, extra, reranker=None, **limits):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import mine_hard_negatives as mine_in_library

    rows = [*zip(queries, positives, strict=True), (queries[0], extra)]
    table = Dataset.from_dict({"query": [query for query, _ in rows], "answer": [answer for _, answer in rows]})
    model = SentenceTransformer(str(folder), device="cpu")
    options = {"num_negatives": 3, "range_max": len(rows), "verbose": False} | limits
    found = {query: [] for query in queries}
    for row in mine_in_library(table, model, cross_encoder=reranker, **options):
        if row["negative"] not in found[row["query"]]:
            found[row["query"]].append(row["negative"])
    return found


@pytest.fixture(scope="module")
def cross_encoder(tiny_checkpoints):
    from sentence_transformers import CrossEncoder

    torch.manual_seed(0)
    model = CrossEncoder(tiny_checkpoints["bert"], num_labels=1, device="cpu")
    with torch.no_grad():  # a new head gives all pairs nearly the same score
        head = model.transformers_model.classifier
        head.weight.normal_(std=40.0)
        asked = list(zip(*sentences(), strict=True))
        logits = model.predict(asked, activation_fn=torch.nn.Identity(), show_progress_bar=False)
        head.bias -= float(logits.mean())
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"relative_margin": 0.02},
        {"absolute_margin": 0.01, "range_min": 2},
        {"max_score": 0.93, "range_min": 1},
        {"relative_margin": 0.01, "max_score": 0.95, "absolute_margin": 0.0},
        {"relative_margin": 0.005, "reranker": "tiny"},
        {"max_score": 0.52, "range_min": 1, "reranker": "tiny"},
    ],
)
def test_texts_as_sentence_transformers_mines_them(sentence_folders, cross_encoder, tmp_path, limits):
    queries, positives = sentences()
    extra = "another answer to the first"
    anchors = [{"id": f"{i}", "text": text, "group": f"g{i}"} for i, text in enumerate(queries)]
    corpus = [{"id": f"{i}", "text": text, "group": f"g{i}"} for i, text in enumerate(positives)]
    corpus.append({"id": "extra", "text": extra, "group": "g0"})
    miner = Miner("texts", str(sentence_folders["bert"]), "text", "text", 2.0, **limits)
    mine_hard_negatives(
        Dataset.from_list(corpus),
        [miner],
        tmp_path,
        anchors=Dataset.from_list(anchors),
        k=3,
        load_reranker=lambda name: Reranker(cross_encoder, name=name),
        block=7,
    )
    mined = load_mined(tmp_path)
    texts = {row["id"]: row["text"] for row in corpus}
    rest = {name: value for name, value in limits.items() if name != "reranker"}
    used = cross_encoder if "reranker" in limits else None
    wanted = by_the_library(sentence_folders["bert"], queries, positives, extra, used, **rest)
    for anchor in anchors:
        assert [texts[name] for name in mined[anchor["id"]]] == wanted[anchor["text"]]
    assert any(wanted.values())
    if rest:
        plain = by_the_library(sentence_folders["bert"], queries, positives, extra)
        assert plain != wanted


class Colours:
    """Prefers candidates whose pictures have the query's colour; stands in for a multimodal `CrossEncoder`."""

    num_labels = 1

    def predict(self, inputs, batch_size, show_progress_bar, activation_fn=None):
        means = [[np.asarray(part["image"], dtype=float).mean((0, 1)) for part in pair] for pair in inputs]
        return np.array([-np.abs(query - other).sum() for query, other in means])

    def children(self):
        return []

    def state_dict(self):
        return {}


def test_a_reranker_of_images_decides_the_order(tmp_path):
    rows = pairs(20)
    miner = Miner("fused", "two", "fused", "fused", 2.0, reranker="colours")
    mined = mine(rows, tmp_path, [miner], load_reranker=lambda name: Reranker(Colours(), name=name))
    colours = {row["id"]: np.asarray(row["image"], dtype=float).mean((0, 1)) for row in rows}
    for row in rows:
        far = {name: np.abs(colours[name] - colours[row["id"]]).sum() for name in colours if name != row["id"]}
        assert mined[row["id"]] == sorted(far, key=far.get)[:4]
        assert [found[0]["score"] for found in findings(mined)[row["id"]].values()] == pytest.approx(
            [-far[name] for name in mined[row["id"]]], rel=1e-4
        )


def test_a_margin_needs_a_positive(tmp_path):
    miner = Miner("own", "one", "text", "text", relative_margin=0.05)
    with pytest.raises(ValueError, match="anchor 'row0' has no positive among the candidates other than itself"):
        mine(pairs(6), tmp_path, [miner])
    groups = mine(pairs(9, groups=True), tmp_path / "groups", [miner])
    assert any(groups.values())
