"""MERIT evaluation against hand-made vectors, and against another tool on the miniature."""

import json

import datasets
import mini_merit
import numpy as np
import pytest

from conjoin.evaluation import EvaluateOptions, evaluate, read_qrels
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
    rows = []
    for pid, title in TITLES.items():
        row = {"idx": pid, "title": title, "country": "SG", "attribute": '{"brand": "x"}'}
        row |= {"image": {"bytes": png((int(pid) * 9, 90, 200)), "path": None}, "language": LANGUAGES.get(pid, "en")}
        rows.append(row | {"class": "table" if pid == "8" else "cloth"})
    root = tmp_path / "merit"
    write_products(root, rows)
    write_queries(root, QUERIES)
    return root


def run(root, out, encoder=None, **which):
    options = EvaluateOptions(baselines=False)
    return evaluate(encoder or letters_encoder(), "merit", out, options, data=str(root), **which)


def values(table):
    return {row[0]: [getattr(cell, "value", cell) for cell in row if cell != ""][-4:] for row in table.rows}


def test_scores(root, tmp_path):
    results = run(root, tmp_path / "out")
    assert [(score.name, score.queries, score.candidates) for score in results.scores] == [("test", 4, 16)]
    found = {entry.label: entry.metric.value for entry in results.headline}
    mrr = (1 / 2 + 1 / 3 + 1 / 2) / 4
    assert found == {"test, R@1": 0, "test, R@5": 0.75, "test, R@10": 0.75, "test, MRR@10": pytest.approx(mrr)}
    assert len(read_run(tmp_path / "out/runs/test.txt")["1"]) == 16


def test_the_products_of_a_query_can_be_left_out(root, tmp_path):
    results = run(root, tmp_path, exclude_query_products=True)
    metrics = results.metrics("test")
    assert metrics["hit_rate@1"].value == 0.25 and metrics["mrr@10"].value == pytest.approx((1 + 1 / 2 + 1 / 2) / 4)
    assert metrics["hit_rate@1"].chance == pytest.approx((2 + 1 + 1 + 1) / 15 / 4)  # among those that are left
    ranking = read_run(tmp_path / "runs/test.txt")
    assert "2" not in [found for found, _ in ranking["1"]] and len(ranking["1"]) == 15
    assert read_qrels(tmp_path / "qrels/test.txt")["1"] == {"1": 1, "4": 1}


def test_what_is_wrong_with_first_results(root, tmp_path):
    write_queries(root, [*QUERIES, query("aaa", ["2"], [3], attribute="others")])
    lines = (root / "queries-test.json").read_text()
    (root / "queries-test.json").write_text(lines.replace('"brand": "red"', '"brand": ["red", "y"]'))

    def shares(**which):
        table = run(root, tmp_path, **which).tables[-1]
        return [round(5 * row[1].value) for row in table.rows]

    # no product is red; the class of 8, which is first for "e", is not that of the right answer
    assert shares() == [0, 1, 3, 1]  # right, category, attribute, visual or detail
    assert shares(exclude_query_products=True) == [1, 1, 2, 1]


def test_tables_by_language_and_subset(root, tmp_path):
    _, by_language, subsets, _ = run(root, tmp_path).tables
    assert values(by_language) == {
        "en": [0.0, 0.5, 0.5, 0.25],
        "th": [0.0, 1.0, 1.0, pytest.approx((1 / 2 + 1 / 3) / 2)],
    }
    names = [("language", ("th", "ms", "id")), ("attribute", ("brand", "pattern/print", "region of origin"))]
    names = [f"{kind}:{name}" for kind, of in [*names, ("class", ("drink", "table", "phone"))] for name in of]
    assert [row[0] for row in subsets.rows] == names
    assert values(subsets)["attribute:brand"] == [0, 1, 1, pytest.approx(1 / 3)]
    assert values(subsets)["class:table"] == [None] * 4


def test_kinds_of_several_subsets_have_an_average(root, tmp_path):
    (root / "ood.json").write_text('{"language": ["th", "en"], "class": ["cloth"]}')
    found = values(run(root, tmp_path).tables[2])
    assert list(found) == ["language:th", "language:en", "average, language", "class:cloth"]
    (root / "ood.json").write_text('{"class": ["boat"]}')  # no query is of it
    assert [table.title for table in run(root, tmp_path).tables] == ["Scores", "By language", "First results"]


def test_a_subset_alone(root, tmp_path):
    (score,) = run(root, tmp_path, subset=["language:th"]).scores
    assert (score.queries, score.candidates) == (2, 16) and list(read_run(tmp_path / "runs/test.txt")) == ["2", "3"]


def test_examples_show_the_images_of_a_query(root, tmp_path):
    write_queries(root, [query("aaa", ["2", "3"], [1])])
    (example,) = run(root, tmp_path).examples
    assert len(example.query.images) == 2 and example.query.text == "aaa [1] [2]"
    assert example.rank == 2 and [hit.correct for hit in example.results] == [False, True, False, False, False]


def test_ablations(root, tmp_path):
    captions = [json.dumps({"idx": pid, "caption": "q" * int(pid)}) + "\n" for pid in TITLES]
    (root / "captions.jsonl").write_text("".join(captions))
    assert run(root, tmp_path, without=["image"]).examples[0].results != run(root, tmp_path).examples[0].results
    assert (tmp_path / "collections/test-without-image/products").is_dir()
    untitled = run(root, tmp_path, without=["title"])  # all products are equal, and ties count as failures
    assert {metric.value for metric in untitled.metrics("test").values()} == {0}


@pytest.mark.parametrize(
    ("which", "error", "message"),
    [
        ({"subset": ["language:vi"]}, ValueError, "unknown subset 'language:vi'; expected some of language:th, "),
        ({"subset": ["class:table", "language:id"]}, ValueError, "none of the 4 queries is in class:table, "),
        ({"without": ["images"]}, ValueError, r"without \['images'\]; expected some of image, title"),
        ({"without": ["image"]}, FileNotFoundError, r"captions\.jsonl"),
        ({"split": "validation"}, FileNotFoundError, "no such file"),
        ({}, ValueError, r"queries-test\.json', line 5: the query names the unknown product '99'"),
    ],
)
def test_bad_data_is_named_before_anything_is_encoded(root, tmp_path, which, error, message):
    write_queries(root, QUERIES if which else [*QUERIES, query("a", ["99"], [1])])
    encoder = letters_encoder()
    with pytest.raises(error, match=message):
        run(root, tmp_path, encoder, **which)
    assert encoder.model.rows == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"exclude_query_products": True}], ids=["all", "without query products"])
@pytest.mark.parametrize("input_type", ["avg", "cat"])
def test_another_tool_finds_the_same_scores_in_the_run_files(
    load_first_emoji, tmp_path_factory, tmp_path, monkeypatch, input_type, options
):
    def load(*args, **kwargs):
        rows = load_first_emoji(*args, **kwargs)
        return rows.select(range(0, len(rows), 3))

    monkeypatch.setattr(mini_merit, "load_emoji", load)
    data = tmp_path_factory.getbasetemp() / "mini-merit-of-another-tool"
    mini_merit.make_mini_merit(data, train_queries=5, validation_queries=5, test_queries=80)
    results = run(data, tmp_path, tiny_encoder(batch_size=16, input_type=input_type), **options)
    ranking = {
        query: {product: score for product, score in found[:10]}
        for query, found in read_run(tmp_path / "runs/test.txt").items()
    }
    qrels = {query: dict(judged) for query, judged in read_qrels(tmp_path / "qrels/test.txt").items()}
    pytrec_eval = pytest.importorskip("pytrec_eval")
    judged = pytrec_eval.RelevanceEvaluator(qrels, {"success_1,5,10", "recip_rank"}).evaluate(ranking)
    assert len(judged) == results.scores[0].queries == 80
    found = {name: metric.value for name, metric in results.metrics("test").items()}
    expected = {f"hit_rate@{k}": np.mean([each[f"success_{k}"] for each in judged.values()]) for k in (1, 5, 10)}
    expected["mrr@10"] = np.mean([each["recip_rank"] for each in judged.values()])
    assert found == pytest.approx(expected) and 0 < found["mrr@10"] < found["hit_rate@10"] < 1
