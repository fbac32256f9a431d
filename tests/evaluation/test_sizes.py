"""What smaller vectors find, against a loop over queries and numbers."""

import numpy as np
import pytest
import torch

from conjoin.evaluation import Cell, EvaluateOptions, Rows, Task, evaluate_cells, make_report
from conjoin.evaluation.sizes import size_tables
from tiny_letters import letters_encoder

NAMES = [str(number) for number in range(60)]
QUERIES = Rows("queries", [{"id": name, "text": f"query {name}"} for name in NAMES])
CORPUS = Rows("corpus", [{"id": name, "text": f"row {name}"} for name in NAMES])
QRELS = {name: [name] for name in NAMES}


def noisy(items):
    """128 numbers, of which the later ones say less: those of a query are those of its row, with noise."""
    scale, rows = 0.98 ** np.arange(128), []
    for item in items:
        role, number = item["text"].split()
        own = np.random.default_rng(int(number)).normal(size=128)
        noise = np.random.default_rng(1000 + int(number)).normal(size=128)
        rows.append(scale * (own + (2.5 * noise if role == "query" else 0)))
    return {"text": torch.tensor(np.array(rows), dtype=torch.float32)}


@pytest.fixture
def scores(tmp_path):
    return evaluate_cells(letters_encoder(noisy), [Cell("numbers", QUERIES, CORPUS, QRELS)], tmp_path)


def expected_rate(width, precision, k=5):
    """The rate of one row of the table, in float64 and one pair at a time."""
    queries, rows = (
        noisy([{"text": f"{role} {name}"} for name in NAMES])["text"].double().numpy() for role in ("query", "row")
    )
    found = 0
    for own, query in enumerate(queries[:, :width] / np.linalg.norm(queries[:, :width], axis=1)[:, None]):
        cut = [row[:width] / np.linalg.norm(row[:width]) for row in rows]
        whole = [float(query @ row) for row in cut]
        if precision == "int8":
            low, high = np.min(cut, axis=0), np.max(cut, axis=0)
            cut = [low + np.round((row - low) / (high - low) * 255) / 255 * (high - low) for row in cut]
        elif precision != "float32":
            cut = [np.sign(row) for row in cut]
        kept = [float(query @ row) for row in cut]
        first = sorted(range(60), key=kept.__getitem__, reverse=True)
        if precision == "1 bit, rescored":
            first = sorted(first[: 4 * k], key=whole.__getitem__, reverse=True)
        found += own in first[:k]
    return found / 60


def test_each_size_finds_what_a_loop_finds(scores):
    table, curve = size_tables(scores, 5)
    assert [row[1] for row in table.rows[::4]] == [128, 64, 32, 16] and [row[2] for row in table.rows[:3]] == [
        512,
        128,
        16,
    ]
    for precision, width, size, metric in table.rows:
        assert metric.value == pytest.approx(expected_rate(width, precision), abs=1e-9), (precision, width)
        assert [size, metric.value] in curve.series[precision] and metric.low <= metric.value <= metric.high
    rates = {tuple(row[:2]): row[3].value for row in table.rows}
    assert rates["float32", 128] > rates["float32", 16] and rates["float32", 128] > rates["1 bit", 128]


def test_a_benchmark_without_one_gallery_is_refused_before_anything_is_encoded(tmp_path):
    cell, encoder = Cell("numbers", QUERIES, CORPUS, QRELS, excluded={"0": ["1"]}), letters_encoder(noisy)
    with pytest.raises(ValueError, match=r"in no cell .* same candidates"):
        evaluate_cells(encoder, [cell], tmp_path, EvaluateOptions(sizes=True))
    assert not encoder.model.rows


def test_the_report_has_them_when_asked(tmp_path):
    cells = [Cell("numbers", QUERIES, CORPUS, QRELS)]
    options = EvaluateOptions(sizes=True)
    report = make_report(
        Task("n", "N", "", dict, list), evaluate_cells(letters_encoder(noisy), cells, tmp_path, options)
    )
    assert [curve.title for curve in report.curves] == ["R@10 by bytes of a vector"]
    assert "Smaller vectors" in [table.title for table in report.tables]
