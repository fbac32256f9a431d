import torch

from conjoin.evaluation import (
    MODALITIES,
    Embedded,
    Headline,
    Metric,
    Results,
    Symmetric,
    Table,
    evaluate_combinations,
    format_combinations,
    format_results,
    format_table,
)

SCORE = Metric(0.4512, 0.4012, 0.5012, 0.0271)


def cells(concepts=24):
    generator = torch.Generator().manual_seed(0)
    names = [f"c{number}" for number in range(concepts)]
    sets = {name: Embedded(torch.randn(concepts, 8, generator=generator), names) for name in MODALITIES}
    keep = {("image", "image"): [False] * concepts}
    return evaluate_combinations(sets, sets, settings=("local", "any"), keep=keep, resamples=10)


def test_combinations_are_aligned_and_narrow():
    text = format_combinations(cells())
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    rows = [line for line in lines if " → " in line and "–" in line]
    assert len(rows) == 12 and any(row.startswith("image+text → image+text") for row in rows)
    headers = [line for line in lines if line.startswith("query")]
    assert all("R@1 " in line and "chance" in line for line in headers)
    assert {len(line) for line in rows[:9]} == {len(headers[0])} and {len(line) for line in rows[9:]} == {
        len(headers[1])
    }
    assert "text → any" in text and "(24 candidates)" in text and "(72 candidates)" in text


def test_a_table_shows_intervals_and_chance_only_where_scores_have_them():
    rows = [["a", SCORE, Metric(0.5), 1234, 0.25], ["b", None, None, "", None]]
    lines = format_table(Table("Title", ["name", "full", "bare", "count", "rate"], rows, "A note.")).splitlines()
    assert lines[0] == "Title" and lines[-1] == "A note."
    assert lines[1].split() == "name full 95 % CI chance bare count rate".split()
    assert lines[2].split() == "a 45.1 40–50 2.7 50.0 1,234 0.25".split()
    assert lines[3].split() == "b – – –".split()
    assert len({len(line) for line in lines[1:4]}) == 1
    assert format_table(Table("Empty", ["a", "b"], [])).splitlines() == ["Empty", "a  b"]


def test_all_parts_of_results_are_printed():
    results = Results(
        title="A benchmark",
        summary="s",
        seed=0,
        headline=[Headline("main score", SCORE, "on 3 items"), Headline("other", Metric(0.1))],
        combinations=cells(),
        symmetric=[Symmetric("runs", 1214, 3000, {"precision": SCORE, "recall@5": Metric(0.2)})],
        tables=[Table("Shown", ["a"], [[1]]), Table("For the page", ["a"], [[1]], report_only=True)],
    )
    text = format_results(results)
    parts = ["A benchmark", "main score (on 3 items)", "Local:", "Symmetric triplets", "Shown"]
    assert [text.index(part) for part in parts] == sorted(text.index(part) for part in parts)
    assert "For the page" not in text
    lines = [line.split() for line in text.splitlines()]
    assert ["triplets", "1,214"] in lines and ["candidates", "of", "each", "3,000"] in lines
    assert ["Precision", "45.1", "40–50", "2.7"] in lines and ["R@5", "20.0"] in lines
    assert format_results(Results(title="t", summary="s", seed=0)) == ""
