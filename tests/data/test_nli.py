import datasets
import pytest

from conjoin.data import NLI_FEATURES, load_nli


def write(folder, text, name="nli.csv"):
    path = folder / name
    path.write_text(text)
    return path


def test_the_published_csv(tmp_path):
    rows = load_nli(write(tmp_path, 'sent0,sent1,hard_neg\nA man eats.,"A man, eating",Nobody eats.\nnull,NA,None\n'))
    assert rows.features == NLI_FEATURES
    assert rows[0] == {
        "id": "0",
        "query": "A man eats.",
        "positive": "A man, eating",
        "negatives": ["Nobody eats."],
        "target_modality": "text",
    }
    assert (rows[1]["query"], rows[1]["positive"], rows[1]["negatives"]) == ("null", "NA", ["None"])


def test_hard_negatives_may_be_absent(tmp_path):
    rows = load_nli(write(tmp_path, "sent0,sent1\na,b\nc,d\n"))
    assert rows["negatives"][:] == [[], []]


def test_any_dataset_with_other_columns():
    table = datasets.Dataset.from_dict({"premise": ["a"], "entails": ["b"], "contradicts": ["c"], "label": [0]})
    rows = load_nli(table, {"query": "premise", "positive": "entails", "negative": "contradicts"})
    assert (rows[0]["query"], rows[0]["positive"], rows[0]["negatives"]) == ("a", "b", ["c"])


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        ("sent0,sent2\na,b\n", None, "no column 'sent1'; the columns are 'sent0', 'sent2'; did you mean 'sent"),
        ("sent0,sent1\na,b\nc,\n", None, "row 1, column 'sent1': text is empty"),
        ("sent0,sent1,hard_neg\na,b, \n", None, "row 0, column 'hard_neg': text is empty"),
        ("sent0,sent1\na,b\n", {"negative": "hard_neg"}, "no column 'hard_neg'"),
        ("sent0,sent1\na,b\n", {"anchor": "sent0"}, "unknown part 'anchor' in columns; expected one of"),
    ],
)
def test_mistakes_are_named(tmp_path, text, columns, message):
    with pytest.raises(ValueError, match=message):
        load_nli(write(tmp_path, text), columns)


def test_no_such_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.csv"):
        load_nli(tmp_path / "none.csv")
