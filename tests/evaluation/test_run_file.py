import pytest

from conjoin.evaluation import read_qrels


@pytest.mark.parametrize("task", ["", " 8"])
def test_qrels_of_four_and_of_five_columns(tmp_path, task):
    rows = ("9:1 0 9:10 1", "9:1 0 9:11 2", "", "9:2 0 9:12 1", "9:2 0 9:13 0", "9:3 0 9:10 0")  # 0 is dropped
    (tmp_path / "qrels.txt").write_text("".join(f"{row}{row and task}\n" for row in rows))
    assert read_qrels(tmp_path / "qrels.txt") == {"9:1": {"9:10": 1, "9:11": 2}, "9:2": {"9:12": 1}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q 0 a\n", r"qrels.txt, line 1: expected 'qid 0 docid rel \[task\]', got 'q 0 a'"),
        ("q 0 a 1\nq 0 b yes\n", "line 2: expected .* got 'q 0 b yes'"),
    ],
)
def test_bad_qrels(tmp_path, text, message):
    (tmp_path / "qrels.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_qrels(tmp_path / "qrels.txt")
