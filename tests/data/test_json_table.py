"""JSON tables: one type for each column, whatever its rows hold, and nothing is read as something else."""

import json

import pytest
from datasets import List, Value

from conjoin.data import load_pairs
from conjoin.data.json_files import MAX_KEYS, open_json

TEXT, WHOLE, REAL = Value("string"), Value("int64"), Value("float64")


def table(path, *values):
    path.write_text("".join(json.dumps({"x": value}) + "\n" for value in values))
    return open_json(path)


@pytest.mark.parametrize(
    ("values", "feature", "expected"),
    [
        (["2021-05-03", "2021-05-04 10:00:00"], TEXT, None),
        ([12345678901234567890, 12345678901234567891], TEXT, ["12345678901234567890", "12345678901234567891"]),
        ([-(2**63), 2**63 - 1, None], WHOLE, None),
        ([1, 2.5], REAL, [1.0, 2.5]),
        ([7, "7a", True, 0.5], TEXT, ["7", "7a", "true", "0.5"]),
        ([None, True], Value("bool"), None),
        ([None, None], Value("null"), None),
        (["a", ["b", "c"], []], List(TEXT), [["a"], ["b", "c"], []]),
        ([[], []], List(Value("null")), None),
        ([{}, None], Value("null"), [None, None]),
        ([{"a": 1}, {"b": "s"}], {"a": WHOLE, "b": TEXT}, [{"a": 1, "b": None}, {"a": None, "b": "s"}]),
        ([[{"a": 1}], [{"a": 2.5}]], List({"a": REAL}), [[{"a": 1.0}], [{"a": 2.5}]]),
    ],
)  # fmt: skip
def test_a_column_holds_what_all_its_values_can_be(tmp_path, values, feature, expected):
    found = table(tmp_path / "a.jsonl", *values)
    assert found.features["x"] == feature
    assert found["x"][:] == (expected or values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([{"a": 1}, 3], "row 2, 'x': an object here and another value elsewhere"),
        ([{"a": {"b": 1}}, None, {"a": {"b": {}}}], "row 3, 'b' in 'a' in 'x': an object"),
        ([{str(number): 1} for number in range(MAX_KEYS + 1)], f"'x': the objects so far have more than {MAX_KEYS}"),
    ],
)
def test_values_without_a_common_type_are_named(tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        table(tmp_path / "a.jsonl", *values)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_field_may_appear_late(tmp_path, streaming):
    path = tmp_path / "late.jsonl"  # behind the first 10 MB, by which `datasets` would judge
    rows = [{"id": f"2021-05-{n % 28 + 1:02}/{n}", "text": "word " * 300} for n in range(8000)]
    rows += [{"id": "last", "text": "z", "more": {"a": 1}}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert path.stat().st_size > 11 << 20
    found = [row["id"] for row in load_pairs(path, only="text", streaming=streaming)]
    assert found == [row["id"] for row in rows]


def test_an_array_or_lines_and_a_changed_file(tmp_path):
    rows = [{"x": 1}, {"x": 2}]
    for name, text in {"a.json": json.dumps(rows, indent=1), "b.json": '\ufeff{"x": 1}\n\n{"x": 2}'}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert open_json(tmp_path / name).to_list() == rows
        assert open_json(tmp_path / name).to_list() == rows
    (tmp_path / "a.json").write_text('[{"x": "other"}]')
    assert open_json(tmp_path / "a.json").to_list() == [{"x": "other"}]
    assert open_json(tmp_path / "b.json").to_list() == rows
    for text, message in {
        '[{"x": 1}, 2]': "entry 2: expected an object, got int",
        '{"x": 1}\n[2]': "line 2: expected an object, got list",
        '{\n"x": 1}': "line 1: not valid JSON",
        '[{"x": 1},\n{"x": ]': "the array that begins in line 1: not valid JSON",
        '{"x": 1, "x": 2}': "line 1: not valid JSON \\(an object has the name 'x' twice\\)",
    }.items():
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            open_json(tmp_path / "a.json")
    for empty in ("", "\n", "[]"):
        (tmp_path / "a.json").write_text(empty)
        assert open_json(tmp_path / "a.json") is None
