"""MERIT evaluation against hand-made vectors, and against another tool on the miniature."""

import json

import datasets
import mini_merit
import numpy as np
import pytest
import pytrec_eval

from conjoin.evaluation import format_results, read_qrels
from conjoin.evaluation.tasks.merit import evaluate_merit, merit_results
from tiny_encoder import tiny_encoder
from tiny_letters import letters_encoder
from tiny_merit import png, write_products, write_queries
from tiny_runs import read_run


@pytest.fixture(scope="module", autouse=True)
def own_datasets_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


TITLES = {  # ids 1 to 16
    "1": "aaab", "2": "aaa", "3": "aab", "4": "abb", "5": "cd", "6": "dc", "7": "cdd", "8": "e",
    **{str(number): "z" * (number - 8) + "y" for number in range(9, 17)},
}  # fmt: skip
LANGUAGES = {"5": "th", "6": "th", "7": "th", "8": "id"}


def write_root(root, queries):
    rows = [
        {
            "image": {"bytes": png((int(pid) * 9, 90, 200)), "path": None},
            "title": title,
            "idx": pid,
            "class": "table" if pid == "8" else "cloth",
            "country": "SG",
            "language": LANGUAGES.get(pid, "en"),
            "attribute": json.dumps({"brand": "x"}),
        }
        for pid, title in TITLES.items()
    ]
    write_products(root, rows)
    write_queries(root, queries)
    return root


def query(text, products, positives, negatives=(), attribute="color"):
    return {
        "query": {pid: {attribute: "red"} for pid in products},
        "pos_candidate": list(positives),
        "hard_negative": list(negatives),
        "query instruction": " ".join([text, *["<image>"] * len(products)]),
    }


QUERIES = [
    query("aaa", ["2"], [1, 4]),  # its own product is first, then 1
    query("cd", ["5"], [7], attribute="brand"),  # 5 and 6 are equal and better
    query("cd", ["7"], [5], [6]),  # 6 ties with 5
    query("e", ["9"], [16]),  # no letter in common: not among the first ten
]


@pytest.fixture
def root(tmp_path):
    return write_root(tmp_path / "merit", QUERIES)


def run(root, out, encoder=None, **options):
    return evaluate_merit(encoder or letters_encoder(), root, out, **options)


def values(table):
    return {row[0]: [getattr(cell, "value", cell) for cell in row[1:]] for row in table.rows}


def test_scores(root, tmp_path):
    scores = run(root, tmp_path / "out")
    assert scores.task.size == 16 and scores.ranks.tolist()[:3] == [2, 3, 2] and scores.ranks[3] > 10
    results = merit_results(scores)
    found = {entry.label: entry.metric for entry in results.headline}
    assert {name: metric.value for name, metric in found.items()} == {
        "R@1": 0.0,
        "R@5": 0.75,
        "R@10": 0.75,
        "MRR@10": pytest.approx((1 / 2 + 1 / 3 + 1 / 2) / 4),
    }
    assert found["R@1"].chance == pytest.approx(np.mean([2, 1, 1, 1]) / 16)
    assert found["R@5"].low is not None


def test_the_products_of_a_query_can_be_left_out(root, tmp_path):
    scores = run(root, tmp_path, exclude_query_products=True)
    assert scores.ranks.tolist()[:3] == [1, 2, 2]
    ranking = read_run(tmp_path / "runs/test.txt")
    assert all(pid not in [found for found, _ in ranking["1"]] for pid in ("2",)) and len(ranking["1"]) == 15
    assert read_qrels(tmp_path / "qrels/test.txt")["1"] == {"1": 1, "4": 1}


def test_tables_by_language_and_subset(root, tmp_path):
    results = merit_results(run(root, tmp_path))
    by_language, subsets, sizes = results.tables
    assert values(by_language) == {
        "en": [2, 0.0, 0.5, 0.5, 0.25],
        "th": [2, 0.0, 1.0, 1.0, pytest.approx((1 / 2 + 1 / 3) / 2)],
    }
    found = values(subsets)
    assert list(found) == [
        "language:th",
        "language:ms",
        "language:id",
        "attribute:brand",
        "attribute:pattern/print",
        "attribute:region of origin",
        "class:drink",
        "class:table",
        "class:phone",
    ]
    assert found["language:th"][0] == 2 and found["attribute:brand"] == [1, 0, 1, 1, pytest.approx(1 / 3)]
    assert found["class:table"] == [0, None, None, None, None]
    assert values(sizes)["1"][0] == 4
    assert "By language" in format_results(results) and "By number of products" not in format_results(results)


def test_kinds_of_several_subsets_have_an_average(root, tmp_path):
    (root / "ood.json").write_text('{"language": ["th", "en"], "class": ["cloth"]}')
    found = values(merit_results(run(root, tmp_path)).tables[1])
    assert list(found) == ["language:th", "language:en", "average, language", "class:cloth"]
    assert found["average, language"][0] == 4
    expected = (np.array(found["language:th"][1:]) + found["language:en"][1:]) / 2
    assert found["average, language"][1:] == pytest.approx(expected.tolist())
    (root / "ood.json").write_text('{"class": ["boat"]}')  # no query is of it
    titles = [table.title for table in merit_results(run(root, tmp_path)).tables]
    assert titles == ["By language", "By number of products in the query"]


def test_a_subset_alone(root, tmp_path):
    scores = run(root, tmp_path, subsets=["language:th"])
    assert scores.ids == ["2", "3"] and scores.task.size == 16
    assert list(read_run(tmp_path / "runs/test.txt")) == ["2", "3"]


def test_examples_show_the_images_of_a_query(root, tmp_path):
    write_queries(root, [query("aaa", ["2", "3"], [1])])
    (example,) = merit_results(run(root, tmp_path)).examples
    assert len(example.query.images) == 2 and example.query.text == "aaa [1] [2]"
    assert example.rank == 2 and [hit.correct for hit in example.results] == [False, True, False, False, False]


def test_ablations(root, tmp_path):
    (root / "captions.jsonl").write_text(
        "".join(json.dumps({"idx": pid, "caption": "q" * int(pid)}) + "\n" for pid in TITLES)
    )
    blind = run(root, tmp_path, without=["image"])
    assert (tmp_path / "collections/test-without-image/products").is_dir()
    assert blind.ranks.tolist() != run(root, tmp_path).ranks.tolist()
    untitled = run(root, tmp_path, without=["title"])  # all products are equal, and ties count as failures
    assert untitled.ranks.tolist() == [15, 16, 16, 16]
    (root / "captions.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"captions\.jsonl'; without images, --captions must"):
        run(root, tmp_path, without=["image"])


def test_bad_arguments(root, tmp_path):
    with pytest.raises(ValueError, match=r"unknown subset 'language:vi'; expected some of language:th, "):
        run(root, tmp_path, subsets=["language:vi"])
    with pytest.raises(ValueError, match="none of the 4 queries is in class:table, language:id"):
        run(root, tmp_path, subsets=["class:table", "language:id"])
    with pytest.raises(ValueError, match="without='images'; expected some of image, title"):
        run(root, tmp_path, without=["images"])
    with pytest.raises(FileNotFoundError, match="no such files"):
        run(root, tmp_path, split="validation")


def test_a_bad_query_is_found_before_anything_is_encoded(root, tmp_path):
    write_queries(root, [*QUERIES, query("a", ["99"], [1])])
    encoder = letters_encoder()
    with pytest.raises(ValueError, match=r"queries-test\.json', line 5: the query names the unknown product '99'"):
        run(root, tmp_path, encoder)
    assert encoder.model.rows == 0


@pytest.fixture(scope="module")
def mini(load_first_emoji, tmp_path_factory):
    def load(*args, **kwargs):
        rows = load_first_emoji(*args, **kwargs)
        return rows.select(range(0, len(rows), 3))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mini_merit, "load_emoji", load)
        out = tmp_path_factory.mktemp("mini") / "merit"
        return mini_merit.make_mini_merit(out, train_queries=5, validation_queries=5, test_queries=80)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"exclude_query_products": True}], ids=["all", "without query products"])
@pytest.mark.parametrize("input_type", ["avg", "cat"])
def test_another_tool_finds_the_same_scores_in_the_run_files(mini, tmp_path, input_type, options):
    scores = run(mini, tmp_path, tiny_encoder(batch_size=16, input_type=input_type), **options)
    ranking = {
        query: {product: score for product, score in found[:10]}
        for query, found in read_run(tmp_path / "runs/test.txt").items()
    }
    qrels = {query: dict(judged) for query, judged in read_qrels(tmp_path / "qrels/test.txt").items()}
    judged = pytrec_eval.RelevanceEvaluator(qrels, {"success_1,5,10", "recip_rank"}).evaluate(ranking)
    assert len(judged) == len(scores.ids) == 80
    found = {entry.label: entry.metric.value for entry in merit_results(scores).headline}
    expected = {f"R@{k}": np.mean([each[f"success_{k}"] for each in judged.values()]) for k in (1, 5, 10)}
    expected["MRR@10"] = np.mean([each["recip_rank"] for each in judged.values()])
    assert found == pytest.approx(expected) and 0 < found["MRR@10"] < found["R@10"] < 1
