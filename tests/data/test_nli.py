import datasets
import pytest

from conjoin.data import NLI_FEATURES, load_nli


def write(folder, text, name="nli.csv"):
    path = folder / name
    path.write_text(text)
    return path


def test_the_published_csv(tmp_path):
    path = write(tmp_path, 'sent0,sent1,hard_neg\nA man eats.,"A man, eating",Nobody eats.\nnull,NA,None\n')
    rows = load_nli(path, hard_negatives=1)
    assert rows.features == NLI_FEATURES
    assert rows[0] == {
        "id": "0",
        "query": "A man eats.",
        "positive": "A man, eating",
        "negatives": ["Nobody eats."],
        "target_modality": "text",
    }
    assert (rows[1]["query"], rows[1]["positive"], rows[1]["negatives"]) == ("null", "NA", ["None"])


def test_hard_negatives_are_off_as_in_equation_3(tmp_path):
    for text in ("sent0,sent1\na,b\nc,d\n", "sent0,sent1,hard_neg\na,b,n\nc,d,\n"):
        rows = load_nli(write(tmp_path, text))
        assert rows["negatives"][:] == [[], []]


def test_any_dataset_with_other_columns():
    table = datasets.Dataset.from_dict({"premise": ["a"], "entails": ["b"], "contradicts": ["c"], "label": [0]})
    rows = load_nli(table, {"query": "premise", "positive": "entails", "negative": "contradicts"}, hard_negatives=1)
    assert (rows[0]["query"], rows[0]["positive"], rows[0]["negatives"]) == ("a", "b", ["c"])


@pytest.mark.parametrize(
    ("text", "columns", "negatives", "message"),
    [
        ("sent0,sent2\na,b\n", None, 0, "no column 'sent1'; the columns are 'sent0', 'sent2'; did you mean 'sent"),
        ("sent0,sent1\na,b\nc,\n", None, 0, "row 1, column 'sent1': text is empty"),
        ("sent0,sent1\na,b\n", None, 2, "hard_negatives=2; expected 0 or 1"),
        ("sent0,sent1\na,b\n", {"negative": "sent1"}, 0, "the negative column 'sent1' is named, but hard_negatives=0"),
        ("sent0,sent1\na,b\n", {"anchor": "sent0"}, 0, "unknown part 'anchor' in columns; expected one of"),
    ],
)
def test_mistakes_are_named(tmp_path, text, columns, negatives, message):
    with pytest.raises(ValueError, match=message):
        load_nli(write(tmp_path, text), columns, hard_negatives=negatives)
