import json

import pytest

from conjoin.evaluation.report.composition import distribution_results, write_distribution_report

COUNTS = {
    "products": 50,
    "candidates": 12,
    "kept": 4,
    "duplicates": 1,
    "attributes": {
        "products": {"color": 40, "size": 10},
        "conventional": {"color": 3, "size": 1},
        "drawn": {"color": 6, "size": 6},
        "kept": {"size": 6, "color": 2},
    },
    "languages": {
        "products": {"th": 30, "<b>": 20},
        **{name: {"th": 4} for name in ("conventional", "drawn", "kept", "positives")},
        "instructions": {"en": 4},
    },
    "conditions": {"drawn": {"2": 3, "4": 1}, "kept": {"2": 4}},
    "samplers": {"drawn": {"conventional": 4}, "kept": {"conventional": 4}},
    "rejected": {"no positive": 2, "too many positives": 5},
    "positives": {"10": 1, "2": 3},
    "hard_negatives": 10,
    "evenness": {"products": 0.72, "conventional": 0.81128, "drawn": 1.0, "kept": None},
}


def test_shares_are_of_each_column():
    results = distribution_results({"train": COUNTS}, {"seed": 4, "version": 1, "queries": 4})
    tables = {table.title: table for table in results.tables}
    values = [[cell if isinstance(cell, str) else cell.value for cell in row]
              for row in tables["Attributes, train"].rows]  # fmt: skip
    assert values == [["size", 0.2, 0.25, 0.5, 0.75], ["color", 0.8, 0.75, 0.5, 0.25]]
    assert tables["Queries"].rows == [["train", 50, 4, 1, 2.5, 0.811, None]]
    assert tables["Positives, train"].rows == [[2, 3], [10, 1]]
    assert tables["Draws that made no query, train"].rows[0] == ["too many positives", 5]
    assert results.curves[0].series["kept"] == [[1, 75.0], [2, 25.0]]
    assert results.seed == 4


def test_the_page_is_one_file_and_escapes(tmp_path):
    (tmp_path / "distribution.json").write_text(json.dumps({"train": COUNTS}))
    (tmp_path / "composition.json").write_text(json.dumps({"seed": 0, "version": 1}))
    page = write_distribution_report(tmp_path).read_text(encoding="utf-8")
    assert "&lt;b&gt;" in page
    assert "<b>\n" not in page
    with pytest.raises(FileNotFoundError):
        write_distribution_report(tmp_path / "absent")
