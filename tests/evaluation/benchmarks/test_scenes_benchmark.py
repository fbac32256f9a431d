import json

import numpy as np
import pytest
from test_symmetric_benchmark import Projection, processor

from conjoin.data import load_triplets, make_scenes
from conjoin.evaluation import EvaluateOptions, TripletVectors, evaluate_symmetric
from conjoin.evaluation.benchmark import BENCHMARKS
from conjoin.evaluation.benchmarks.scenes import evaluate_scenes
from conjoin.retrieval import ItemEncoder


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return make_scenes(tmp_path_factory.mktemp("scenes") / "out", train=2, distractors=6, triplets=12)


@pytest.fixture
def encoder():
    return ItemEncoder(Projection(), processor, batch_size=5, name="projection")


def test_scores_of_both_test_sets_equal_a_computation_by_hand(scenes, encoder, tmp_path):
    results = evaluate_scenes(encoder, scenes, tmp_path, EvaluateOptions(seed=3), distractors=False)
    assert [run.name for run in results.symmetric] == ["known objects", "unseen objects"]
    assert [entry.label for entry in results.headline[:2]] == ["Avg, known objects", "mR, known objects"]
    rows = load_triplets(scenes / "test_unseen.jsonl").to_list()
    vectors = [
        encoder.encode([{"image": row[f"{role}_image"], "text": row[f"{role}_text"]} for row in rows])
        for role in ("query", "positive", "negative")
    ]
    expected = evaluate_symmetric(TripletVectors(*vectors), seed=3)
    found = results.symmetric[1].metrics
    assert found["mean_recall"] == expected.metrics["mean_recall"]
    anchor, positive, negative = vectors
    plain = np.array([row["variant_text"] is None for row in rows])
    kinds = np.array([row["kind"] for row in rows])
    wins = (anchor * positive).sum(1) > (anchor * negative).sum(1)
    for row in np.flatnonzero(~plain):
        variant = encoder.encode([{"image": rows[row]["variant_image"], "text": rows[row]["variant_text"]}])[0]
        wins[row] = anchor[row] @ positive[row] > variant @ negative[row]
    assert (~plain).any() and found["precision"].value == pytest.approx(wins.mean())
    for kind in set(kinds):
        assert found[f"precision, {kind.replace('_', ' ')}"].value == pytest.approx(wins[kinds == kind].mean())
    same = load_triplets(scenes / "test_unseen_same_union.jsonl").to_list()
    other = encoder.encode([{"image": row["negative_image"], "text": row["negative_text"]} for row in same])
    assert [row["query_text"] for row in same] == [row["query_text"] for row in rows]
    wins = (anchor * positive).sum(1) > (anchor * other).sum(1)
    for row, triplet in enumerate(same):
        if triplet["variant_text"] is not None:
            variant = encoder.encode([{"image": triplet["variant_image"], "text": triplet["variant_text"]}])[0]
            wins[row] = anchor[row] @ positive[row] > variant @ other[row]
    assert found["precision, other intersection"].value == pytest.approx(wins.mean())
    assert found["precision, other intersection"].chance == 0.5
    texts = encoder.encode([{"text": row["positive_text"]} for row in rows])
    images = encoder.encode([{"image": row["query_image"]} for row in rows])
    scores = texts @ images.T
    ranks = (scores >= np.diagonal(scores)[:, None]).sum(1)
    assert results.tables[0].rows[1][3].value == pytest.approx((ranks <= 5).mean())


def test_distractors_enlarge_the_pool_of_both_sets(scenes, encoder, tmp_path):
    fewer = evaluate_scenes(encoder, scenes, tmp_path / "a", distractors=False)
    more = evaluate_scenes(encoder, scenes, tmp_path / "b")
    for with_, without in zip(more.symmetric, fewer.symmetric, strict=True):
        assert with_.pool == without.pool + 6
        assert with_.metrics["mean_recall"].value <= without.metrics["mean_recall"].value


def test_the_registered_benchmark_reads_its_options(scenes, encoder, tmp_path):
    import argparse

    parser = argparse.ArgumentParser()
    benchmark = BENCHMARKS["scenes"]
    benchmark.add_arguments(parser)
    args = parser.parse_args(["--split", "validation", "--no-distractors"])
    args.data, args.seed, args.quiet = str(scenes), 0, True
    results = benchmark.run(encoder, args, tmp_path)
    validation = (scenes / "validation_known.jsonl").read_text().splitlines()
    assert results.symmetric[0].triplets == len(validation) == 6
    assert "6 triplets of known objects" in results.summary
    assert json.loads(validation[0])["kind"]


def test_a_folder_without_scenes_is_named(encoder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"test_known\.jsonl"):
        evaluate_scenes(encoder, tmp_path, tmp_path / "out")
