import numpy as np
import pytest
import torch

from conjoin.evaluation import MODALITIES, Embedded, evaluate_combinations
from conjoin.evaluation.metrics import chance_hit_rate


def random_sets(rows=24, noise=0.6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(rows, 16, generator=generator)
    ids = [f"c{number}" for number in range(rows)]
    return {
        modality: Embedded(base + noise * torch.randn(rows, 16, generator=generator), ids) for modality in MODALITIES
    }


def score_matrix(queries, candidates):
    normalise = torch.nn.functional.normalize
    return (normalise(queries.double()) @ normalise(candidates.double()).T).numpy()


def test_local_cells_equal_a_naive_loop():
    queries, candidates = random_sets(seed=0), random_sets(seed=1, noise=3.0)
    cells = evaluate_combinations(queries, candidates, settings=("local",), ks=(1, 5), resamples=50)
    assert [(cell.query, cell.candidates) for cell in cells] == [(q, c) for q in MODALITIES for c in MODALITIES]
    for cell in cells:
        scores = score_matrix(queries[cell.query].embeddings, candidates[cell.candidates].embeddings)
        ranks = [1 + sum(row[j] >= row[i] for j in range(24) if j != i) for i, row in enumerate(scores)]
        for k in (1, 5):
            metric = cell.metrics[f"hit_rate@{k}"]
            assert metric.value == pytest.approx(np.mean([rank <= k for rank in ranks]))
            assert metric.chance == pytest.approx(k / 24)
            assert metric.low <= metric.value <= metric.high
        expected = np.mean([1 / rank if rank <= 10 else 0 for rank in ranks])
        assert cell.metrics["mrr@10"].value == pytest.approx(expected)
        assert (cell.queries, cell.gallery) == (24, 24)


def test_global_asks_for_one_modality():
    ids = ["x", "y"]
    x, y = [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]
    gap = [0.0, 0.0, 5.0]  # texts live elsewhere: a modality gap
    pictures = Embedded(torch.tensor([x, y]), ids)
    texts = Embedded(torch.tensor([x, y]) + torch.tensor(gap), ids)
    cells = evaluate_combinations({"image": pictures}, {"image": pictures, "text": texts}, ks=(1, 2, 3), resamples=10)
    value = {
        (cell.setting, cell.candidates): [cell.metrics[f"hit_rate@{k}"].value for k in (1, 2, 3)] for cell in cells
    }
    assert value["local", "text"] == [1, 1, 1]
    assert value["global", "image"] == [1, 1, 1]
    assert value["global", "text"] == [0, 1, 1]  # the picture itself stands first
    chances = {cell.candidates: cell.metrics["hit_rate@1"].chance for cell in cells if cell.setting != "local"}
    assert chances == {"image": 0.25, "text": 0.25}


def test_several_right_candidates_count_by_the_best():
    queries = {"text": Embedded(np.array([[1.0, 0.0]]), ["a"])}
    gallery = Embedded(np.array([[0.0, 1.0], [0.6, 0.8], [1.0, 0.1]]), ["a", "b", "a"])
    (cell,) = evaluate_combinations(queries, {"image": gallery}, settings=("local",), ks=(1, 2), resamples=10)
    assert cell.metrics["hit_rate@1"].value == 1.0
    assert cell.metrics["hit_rate@1"].chance == pytest.approx(chance_hit_rate(2, 3, 1)) == pytest.approx(2 / 3)


def test_ties_count_against_us():
    constant = {modality: Embedded(torch.ones(12, 4), list(range(12))) for modality in MODALITIES}
    for cell in evaluate_combinations(constant, constant, ks=(1, 10), resamples=10):
        assert set(cell.metrics) == {"hit_rate@1", "hit_rate@10", "mrr@10"}
        assert {metric.value for metric in cell.metrics.values()} == {0}


def test_masked_queries_are_left_out():
    sets = random_sets(noise=2.0)
    keep = {("text", "text"): [number < 5 for number in range(24)], ("image", "image"): [False] * 24}
    cells = {
        (cell.query, cell.candidates): cell
        for cell in evaluate_combinations(sets, sets, settings=("local",), keep=keep, ks=(1,), resamples=10)
    }
    assert (cells["text", "text"].queries, cells["text", "text"].gallery) == (5, 24)
    assert cells["text", "image"].queries == 24
    assert (cells["image", "image"].queries, cells["image", "image"].metrics) == (0, {})
    few = {"text": Embedded(sets["text"].embeddings[:5], sets["text"].concepts[:5])}
    (expected,) = evaluate_combinations(few, {"text": sets["text"]}, settings=("local",), ks=(1,), resamples=10)
    assert cells["text", "text"].metrics == expected.metrics


def test_bad_input():
    sets = random_sets()
    with pytest.raises(ValueError, match=r"unknown query modality 'text,image'; expected one of \['image', 'text'"):
        evaluate_combinations({"text,image": sets["text"]}, sets)
    with pytest.raises(ValueError, match="unknown setting 'mixed'"):
        evaluate_combinations(sets, sets, settings=("mixed",))
    with pytest.raises(ValueError, match=r"unknown keep \('text', 'audio'\)"):
        evaluate_combinations(sets, sets, keep={("text", "audio"): [True] * 24})
    with pytest.raises(ValueError, match=r"keep\['text', 'text'\] must be 24 booleans"):
        evaluate_combinations(sets, sets, keep={("text", "text"): [True] * 3}, resamples=10)
    with pytest.raises(ValueError, match="text: 24 embeddings but 2 concepts"):
        evaluate_combinations({"text": Embedded(sets["text"].embeddings, ["a", "b"])}, sets)
    strangers = {"text": Embedded(sets["text"].embeddings[:2], ["c0", "stranger"])}
    with pytest.raises(ValueError, match=r"1 queries have no right candidate in the gallery, such as \['stranger'\]"):
        evaluate_combinations(strangers, sets, resamples=10)
