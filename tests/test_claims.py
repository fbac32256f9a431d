"""The records of the claims: intervals over seeds, and the numbers that the log and the README take from them."""

import functools
import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
CLAIMS = ROOT / "benchmarks/claims"
RECORDS = CLAIMS / "results"


@pytest.fixture
def claims(monkeypatch):
    """Imports a script of the claims."""
    monkeypatch.syspath_prepend(CLAIMS)
    return importlib.import_module


def write_row(report, out, row, wins):
    """Records of a row, whose outcomes of a seed are all equal."""
    for seed, win in enumerate(wins):
        sets = {}
        for name in ("validation_known", "validation_unseen", "test_known", "test_unseen"):
            for end in ("", "_same_union"):
                readouts = {"fused": {"wins": [win] * 4, "ranks": [1 if win else 99] * 4}}
                sets[name + end] = {"kinds": ["image_content", "text_content"] * 2, "readouts": readouts}
        path = report.record_path(out, row, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"sets": sets, "cost": {"steps": 1}}))


def test_intervals_of_the_solar_claims_are_over_seeds(tmp_path, claims):
    report = claims("solar_report")
    write_row(report, tmp_path, "GCL", [1, 0])
    write_row(report, tmp_path, "CL", [0, 0])
    found = report.Finished.read(report.ROWS["GCL"], tmp_path, [0, 1])
    for metric in ("precision", "other_intersection", "image_content", "mean_recall", "average"):
        measured = report._metric(found, metric, "test_known")
        assert (measured["low"], measured["value"], measured["high"]) == (0, 0.5, 1), metric
    shown = report.compare("GCL", "CL", tmp_path, tmp_path, [0, 1])
    assert "| known | Precision | 50.0 | 0.0 | 50.0 [0.0, 100.0] | not significant |" in shown


def test_rows_of_the_solar_claims_are_compared_from_a_record(tmp_path, claims):
    report = claims("solar_report")
    write_row(report, tmp_path, "GCL", [1, 0])
    write_row(report, tmp_path, "CL", [0, 0])
    rows = report.summary([report.Finished.read(report.ROWS[row], tmp_path, [0, 1]) for row in ("GCL", "CL")])
    record = tmp_path / "results.json"
    record.write_text(json.dumps({"rows": rows}))
    from_rows, from_record = (report.compare("GCL", "CL", place, place, [0, 1]) for place in (tmp_path, record))
    kept = [line for line in from_rows.splitlines() if "_content" not in line.replace(" ", "_")]
    assert from_record.splitlines() == kept  # the record has no kinds
    with pytest.raises(ValueError, match="'CL' has no readout 'sum'; readouts: fused"):
        report.compare("GCL", "CL", record, record, [0, 1], ["fused", "sum"])


def ranks(demo, rank):
    return {f"{query} → {target}": [rank] * 4 for query in demo.VIEWS for target in demo.VIEWS}


def test_the_demo_compares_equal_seeds(claims):
    demo = claims("demo")
    runs = [{"name": demo.FIXED, "seed": seed, "ranks": ranks(demo, 1 if seed < 2 else 99)} for seed in range(4)]
    runs += [{"name": demo.JOINT, "seed": seed, "ranks": ranks(demo, 1)} for seed in range(2)]
    table = demo.report(SimpleNamespace(content={"runs": runs}))
    assert all(row.split("|")[-2].strip() == "+0.0 [+0.0, +0.0]" for row in table.splitlines()[2:])
    assert all(row.split("|")[2].strip() == "50.0 [0.0, 100.0]" for row in table.splitlines()[2:])


METRICS = ("average", "precision", "other_intersection")
SUM = "score fusion"
TRUE = "stage 2, true masks"
ROWS = ("towers", "GCL", "stage 1", TRUE)
DIFFERENCES = {
    "GCL: with the intersection − sum": (("GCL + intersection", f"{SUM} + intersection"), ("GCL", SUM)),
    "GCL: with random parts − sum": (("GCL + random parts", f"{SUM} + random parts"), ("GCL", SUM)),
    "GCL: with the intersection − with random parts": (
        ("GCL + intersection", f"{SUM} + intersection"),
        ("GCL + random parts", f"{SUM} + random parts"),
    ),
    "GCL: sum − fused": (("GCL", SUM), ("GCL", "fused")),
    "stage 2 on true masks − stage 1": ((TRUE, None), ("stage 1", None)),
    "GCL − stage 1": (("GCL", None), ("stage 1", None)),
    "GCL − stage 2 on true masks": (("GCL", None), (TRUE, None)),
}


def log_rows(labels):
    """The cells of each row of the log's table of intervals, and of its table of kinds."""
    log = (ROOT / "docs/LOG.md").read_text(encoding="utf-8")
    start = log.index("**On the new set**, 60 objects")
    lines = log[start : log.index("\n### ", start)].replace("−", "-").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    named = {label.replace("−", "-"): label for label in labels}
    found = [(named[row[0]], row[1:]) for row in cells if row[0] in named]
    return {name: row for name, row in found if "[" in row[0]}, {name: row for name, row in found if "[" not in row[0]}


@pytest.mark.parametrize("metric", METRICS)
def test_the_log_has_the_intervals_of_the_new_negatives(metric, claims):
    report = claims("solar_report")
    read = functools.cache(
        lambda name: report.Finished.read(report.ROWS[name], RECORDS / "solar_scenes_union.json", range(5))
    )
    intervals, _ = log_rows([*ROWS, *DIFFERENCES])
    assert intervals.keys() == {*ROWS, *DIFFERENCES}
    for label, cells in intervals.items():
        for test in ("known", "unseen"):
            (first, of_first), *others = DIFFERENCES.get(label, [(label, None)])
            values = read(first).values(metric, f"test_{test}", readout=of_first)
            for other, of_other in others:
                values = values - read(other).values(metric, f"test_{test}", readout=of_other)
            low, high = (f"{100 * end:.1f}" for end in report.bootstrap_ci(values))
            expected = f"{100 * values.mean():.1f} [{low}, {high}]"
            assert cells[3 * (test == "unseen") + METRICS.index(metric)] == expected, (label, test)


def test_the_log_has_the_precisions_of_the_kinds(claims):
    report = claims("solar_report")
    _, kinds = log_rows(ROWS)
    stored = json.loads((RECORDS / "solar_scenes_union.json").read_text())["rows"]
    assert kinds == {
        row["row"]: [
            f"{100 * row[test][kind]['value']:.1f}" for test in ("known", "unseen") for kind in report.NEGATIVES
        ]
        for row in stored
        if row["row"] in ROWS
    }


def test_the_log_has_the_differences_of_coral(claims):
    coral, read = claims("coral"), claims("common").Record
    log = (ROOT / "docs/LOG.md").read_text(encoding="utf-8")
    baseline = read(RECORDS / "coral_4_layers_paper.json")
    rows = coral.compare(baseline, baseline).splitlines()[2:]
    rows += coral.compare(read(RECORDS / "coral_4_layers_paper_normalized.json"), baseline).splitlines()[2:]
    assert len(rows) == 4 and all(row.split(", full ")[1] in log for row in rows)


@pytest.mark.parametrize("of", ["4_layers_paper_600_steps", "30_layers_paper"])
def test_the_log_has_the_scores_of_coral(claims, of):
    coral, read = claims("coral"), claims("common").Record
    log = (ROOT / "docs/LOG.md").read_text(encoding="utf-8")
    columns = [*coral.COLUMNS[:4], *(f"OOD {kind}" for kind in coral.KINDS)]
    baseline = read(RECORDS / f"coral_{of}.json")
    for record, ending in ((of, ""), (f"{of}_normalized", ", normalised targets")):
        runs = read(RECORDS / f"coral_{record}.json")
        rows = runs.table(columns).splitlines()[2:] + coral.compare(runs, baseline).splitlines()[2:]
        assert rows
        for row in rows:
            name, scores = row.split(", ", 1)[1].split(" | ", 1)
            assert f"\n| {name.removesuffix(', full')}{ending} | {scores}\n" in log


def test_coral_is_compared_with_contrastive_training_of_the_same_start_and_precision(claims, tmp_path):
    coral, record = claims("coral"), claims("common").Record(tmp_path / "runs.json", {})
    for seed in range(2):
        for method, rank in (("contrastive", 2), ("+ both", 1)):
            scores = dict.fromkeys(coral.COLUMNS[:4], 0.0) | {"ranks": [rank, 3], "float32": seed == 0}
            record.add(f"4 layers, PUMA stage 1, {method}, full", seed, **scores)
        record.add("4 layers, + both, full, without class", seed, **{"OOD class": 0.5})
    assert coral.compare(record, record).splitlines()[2:] == [
        "| 4 layers, PUMA stage 1, + both, full | 2 "
        "| 50.0 [0.0, 100.0] | 0.0 [0.0, 0.0] | 0.0 [0.0, 0.0] | 25.0 [0.0, 50.0] |"
    ]
    record.content["runs"][0]["float32"] = False
    with pytest.raises(ValueError, match="seed 0: not of the precision of its baseline"):
        coral.compare(record, record)


def test_the_readme_has_the_numbers_of_the_demo(claims):
    demo = claims("demo")
    runs = {}
    for run in json.loads((RECORDS / "demo.json").read_text())["runs"]:
        runs.setdefault(run["name"], {})[run["seed"]] = run["ranks"]
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())

    def outcomes(row, query, target, k=1):
        return demo.hits([runs[row][seed] for seed in range(5)], (query, target, k))

    def mean(*case):
        return f"{100 * outcomes(*case).mean():.1f}"

    ours, theirs = (outcomes(row, "text", "image", 10) for row in (demo.FIXED, demo.JOINT))
    assert f"in {100 * ours.mean():.1f} % of the queries (five seeds;" in text
    assert f"in {100 * theirs.mean():.1f} %: {demo.cell(ours - theirs).replace(' ', ' points ', 1)}" in text
    lost = outcomes(demo.FIXED, "text", "text") - outcomes(demo.JOINT, "text", "text")
    low, high = (100 * end for end in demo.bootstrap_ci(lost))
    assert f"tower, {mean(demo.FIXED, 'text', 'text')} %" in text
    assert f"loses {100 * lost.mean():.0f} points of that [{low:.0f}, {high:.0f}]" in text
    for words, case in (
        ("picture → picture {} against {} %", ("image", "image")),
        ("name → picture {} against {})", ("fused", "image")),
        ("names ({} against {})", ("image", "text")),
    ):
        assert words.format(mean(demo.BOTH, *case), mean(demo.FIXED, *case)) in text
