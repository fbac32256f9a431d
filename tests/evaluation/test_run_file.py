import numpy as np
import pytest

from conjoin.evaluation import read_qrels, write_run


def test_a_run_file(tmp_path):
    rankings = {"1:7": [("d1", 0.1 + 0.2), ("d2", 0.25), ("d3", 0.25)], "q2": [("d9", np.float32(-0.5))]}
    write_run(tmp_path / "run.txt", rankings, "joint")
    rows = [line.split() for line in (tmp_path / "run.txt").read_text().splitlines()]
    assert rows[1] == ["1:7", "Q0", "d2", "2", "0.25", "joint"] and len(rows) == 4
    assert [float(row[4]) for row in rows] == [0.1 + 0.2, 0.25, 0.25, -0.5]


@pytest.mark.parametrize(
    ("rankings", "tag", "message"),
    [
        ({"q 1": [("a", 1.0)]}, "t", "query id must be one word without white space, got 'q 1'"),
        ({"q": [("", 1.0)]}, "t", "document id must be one word"),
        ({"q": [("a", 1.0)]}, "two words", "tag must be one word"),
        ({"q": [("a", float("nan"))]}, "t", "scores must be finite"),
        ({"q": [("a", 1.0), ("b", 2.0)]}, "t", "not rise"),
    ],
)
def test_bad_rankings_are_not_written(tmp_path, rankings, tag, message):
    with pytest.raises(ValueError, match=message):
        write_run(tmp_path / "run.txt", rankings, tag)
    assert not (tmp_path / "run.txt").exists()


@pytest.mark.parametrize("task", ["", " 8"])
def test_qrels_of_four_and_of_five_columns(tmp_path, task):
    rows = ("9:1 0 9:10 1", "9:1 0 9:11 2", "", "9:2 0 9:12 1", "9:2 0 9:13 0", "9:3 0 9:10 0")  # 0 is dropped
    (tmp_path / "qrels.txt").write_text("".join(f"{row}{row and task}\n" for row in rows))
    assert read_qrels(tmp_path / "qrels.txt") == {"9:1": {"9:10": 1, "9:11": 2}, "9:2": {"9:12": 1}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q 0 a\n", r"qrels.txt, line 1: expected 'qid 0 docid rel \[task\]', got 3 columns: 'q 0 a'"),
        ("q 0 a 1\nq 0 b yes\n", "line 2: relevance must be an integer, got 'yes'"),
        ("q 0 a 1\nq 0 a 1\n", "line 2: document 'a' is judged twice for query 'q'"),
    ],
)
def test_bad_qrels(tmp_path, text, message):
    (tmp_path / "qrels.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_qrels(tmp_path / "qrels.txt")
