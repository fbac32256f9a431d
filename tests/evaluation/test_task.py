"""The loop of all benchmarks: what is right, ties, exclusion, several corpora, views and examples."""

from dataclasses import dataclass

import numpy as np
import pytest
from PIL import Image

from conjoin.evaluation import Cell, EvaluateOptions, Rows, Task, evaluate, evaluate_cells, make_report
from conjoin.evaluation.benchmark import penalise_hubs
from tiny_letters import count_letters, count_letters_and_red, letters_encoder


@pytest.fixture
def encoder():
    return letters_encoder(count_letters_and_red)


def rows(name, texts):
    return Rows(name, [{"id": id_, "text": text} for id_, text in texts.items()])


QUERIES = rows("queries", {"q1": "a", "q2": "ab", "q3": "z"})
CORPUS = rows("corpus", {"c1": "a", "c2": "aab", "c3": "b", "d1": "aaa", "d2": "ab"})
QRELS = {"q1": ["c2"], "q2": ["c3", "d2"], "q3": ["c1"]}


def evaluate_one(encoder, cell, tmp_path, options=None):
    return evaluate_cells(encoder, [cell], tmp_path, options)[0]


def test_ranks(encoder, tmp_path):
    scores = evaluate_one(encoder, Cell("words", QUERIES, CORPUS, QRELS), tmp_path)
    # a: c1 and d1 are equal and better than c2; ab: d2 is exact; z: all tie at 0, which is the last rank
    assert scores.ranks.tolist() == [3, 1, 5] and scores.sizes.tolist() == [5, 5, 5]
    assert scores.metrics()["hit_rate@1"].value == pytest.approx(1 / 3)
    assert scores.metrics()["hit_rate@1"].chance == pytest.approx((1 + 2 + 1) / 15)
    assert scores.metrics(["q1"])["mrr@10"].value == pytest.approx(1 / 3)
    assert scores.metrics([]) == {}


def test_candidates_and_exclusion(encoder, tmp_path):
    right = {"q1": ["c2"]}
    cells = {
        "part": Cell("part", QUERIES, CORPUS, right, candidates=["c2", "c3"]),
        "own": Cell("own", QUERIES, CORPUS, right | {"q2": ["d2"]}, {"q2": ["c1", "d2"], "q1": ["d1", "c2", "c3"]}),
        "without": Cell("without", QUERIES, CORPUS, right, excluded={"q1": ["c1", "d1"]}),
    }
    found = dict(zip(cells, evaluate_cells(encoder, list(cells.values()), tmp_path), strict=True))
    expected = {"part": ([1], [2]), "own": ([2, 1], [3, 2]), "without": ([1], [3])}
    assert {name: (each.ranks.tolist(), each.sizes.tolist()) for name, each in found.items()} == expected
    assert found["own"].results.ids[0] == ["d1", "c2", "c3"]


def test_rows_of_one_name_are_encoded_once_and_kept(encoder, tmp_path):
    cells = [Cell(name, QUERIES, CORPUS, QRELS) for name in ("one", "two")]
    evaluate_cells(encoder, cells, tmp_path)
    assert encoder.model.rows == 8
    again = letters_encoder(count_letters_and_red)
    evaluate_cells(again, cells, tmp_path)
    assert again.model.rows == 0


def test_examples_are_spread_and_show_misses(encoder, tmp_path):
    many = rows("many", {f"m{n}": "a" * n + "b" * (140 - n) for n in range(141)})
    cell = Cell("words", rows("one", {"q": "a", "p": "b"}), many, {"q": ["m2"], "p": ["m0"]})
    scores = evaluate_one(encoder, cell, tmp_path, EvaluateOptions(ks=(1,), mrr=None))
    task = Task("words", "Words", "", object, list, ks=(1,), mrr=None)
    missed, found = make_report(task, [scores]).examples
    assert (missed.title, missed.rank, missed.gallery) == ("words · q", None, 141)  # beyond what was searched
    assert [hit.correct for hit in missed.results] == [False] * 5 and (found.title, found.rank) == ("words · p", 1)


def test_a_right_candidate_that_ties_has_no_tick(encoder, tmp_path):
    same = rows("same", {f"s{n}": "ab" for n in range(9)})
    scores = evaluate_one(encoder, Cell("ties", rows("one", {"q": "ab"}), same, {"q": ["s0"]}), tmp_path)
    (example,) = scores.examples(["q"])
    assert example.rank == 9 and not any(hit.correct for hit in example.results)


def test_each_query_is_encoded_with_its_instruction(tmp_path):
    seen = []

    def instructed(items, instruction=()):
        seen.extend(zip(instruction, [item["text"] for item in items], strict=False))
        return count_letters(items)

    queries = Rows("queries", [{"id": f"2:{n}", "text": "abcd"[n]} for n in range(4)], ["u", "v", "u", "v"])
    corpus = Rows("corpus", [{"id": letter, "text": letter} for letter in "abcd"])
    qrels = {f"2:{n}": ["abcd"[n]] for n in range(4)}
    scores = evaluate_one(letters_encoder(instructed), Cell("t", queries, corpus, qrels), tmp_path)
    assert sorted(seen) == [("u ", "a"), ("u ", "c"), ("v ", "b"), ("v ", "d")]
    assert scores.ranks.tolist() == [1, 1, 1, 1]


def test_hubness_penalty_ranks_as_the_formula_says():
    generator = np.random.default_rng(0)
    queries, pool = (generator.normal(size=(n, 6)) for n in (9, 20))
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    scores = queries @ pool.T
    penalised = scores - 0.2 * scores.mean(axis=0)
    moved = penalise_hubs(queries, 0.2)
    np.testing.assert_array_equal(np.argsort(moved @ pool.T), np.argsort(penalised))
    np.testing.assert_allclose(np.linalg.norm(moved, axis=1), 1)
    assert penalise_hubs(queries, 0.0) is queries


def test_a_benchmark_is_its_cells(encoder, tmp_path):
    @dataclass
    class Words:
        letters: int

    def cells(options):
        groups = {"length": {"one letter": ["q1", "q3"], "two letters": ["q2"]}}
        return [Cell("words", QUERIES, CORPUS, QRELS, groups=groups)]

    task = Task("words", "Words", "Words search words.", Words, cells, ks=(1, 3))
    results = evaluate(encoder, task, tmp_path, EvaluateOptions(seed=4), letters=3)
    scores, by_length = results.tables
    assert (results.title, results.seed, results.headline[0].label) == ("Words", 4, "words, R@1")
    assert (results.benchmark, results.dataset) == ("words", {"letters": 3})
    assert scores.columns == ["", "n", "candidates", "R@1", "R@3", "MRR@10"]
    assert scores.rows[0][:3] == ["words", 3, 5] and scores.rows[0][4].value == pytest.approx(2 / 3)
    assert [row[:2] for row in by_length.rows] == [["one letter", 2], ["two letters", 1]]
    assert len(results.examples) == 3
    assert (tmp_path / "runs/words.txt").read_text().splitlines()[0].split()[:4] == ["q1", "Q0", "c1", "1"]
    assert (tmp_path / "qrels/words.txt").read_text().splitlines()[1] == "q2 0 c3 1"
    with pytest.raises(ValueError, match="no benchmark 'merti'; expected one of emoji, mbeir, "):
        evaluate(encoder, "merti", tmp_path)


def test_ids_of_a_run_file_are_one_word(encoder, tmp_path):
    evaluate_cells(encoder, [Cell("words", rows("q", {"q 1": "a"}), CORPUS, {"q 1": ["c1"]})], tmp_path)
    assert (tmp_path / "runs/words.txt").read_text().startswith("q%201 Q0 c1 1 ")
    assert (tmp_path / "qrels/words.txt").read_text() == "q%201 0 c1 1\n"


def test_a_mixed_gallery_says_which_kinds_are_found(encoder, tmp_path):
    red = {"image": Image.new("RGB", (4, 4), "red")}
    corpus = Rows("mixed", [{"id": "1", "text": "a"}, {"id": "2", **red}, {"id": "3", "text": "b", **red}])
    task = Task("letters", "Letters", "How many.", object, lambda options: [])
    cells = [Cell("mixed", QUERIES, corpus, {"q1": ["1"], "q2": ["3"]}), Cell("texts", QUERIES, CORPUS, QRELS)]
    tables = {each.title: each for each in make_report(task, evaluate_cells(encoder, cells, tmp_path)).tables}
    table = tables["Kinds found"]
    (row,) = table.rows
    assert row[0] == "mixed" and table.columns[1:] == [
        "image",
        "of 10",
        "(right)",
        "text",
        "of 10",
        "(right)",
        "both",
        "of 10",
        "(right)",
    ]
    shares = [each.value for each in row[1:]]
    assert shares[1::3] == pytest.approx([1 / 3] * 3) and shares[2::3] == [0, 0.5, 0.5] and shares[3] >= 0.5
    assert [row[:2] for row in tables["Gap between kinds"].rows] == [
        ["mixed", "image – text"],
        ["mixed", "image – both"],
        ["mixed", "text – both"],
    ]
    assert tables["Gap between kinds"].rows[0][2] == pytest.approx(2**0.5, abs=1e-3), (
        "a picture and a text share nothing here"
    )
