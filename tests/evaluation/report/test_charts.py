import re

import pytest

from conjoin.evaluation.report.charts import line_chart


def corners(svg):
    return [
        [tuple(map(float, pair.split(","))) for pair in points.split()]
        for points in re.findall(r'points="([^"]+)"', svg)
    ]


def test_points_are_placed_in_order_and_inside():
    (line,) = corners(line_chart({"loss": [[0, 4.0], [5, 1.0], [10, 2.0]]}, "step", "Loss"))
    (x0, y0), (x1, y1), (x2, y2) = line
    assert x0 < x1 < x2
    assert y0 < y2 < y1  # up is smaller in SVG
    assert all(0 <= x <= 520 and 0 <= y <= 260 for x, y in line)


def test_flat_and_single_points_are_drawn():
    assert len(corners(line_chart({"a": [[1, 0.5]], "b": [[1, 0.5]]}, "step", "t"))) == 2
    assert len(corners(line_chart({"a": [[0, 3.0], [1, 3.0]]}, "step", "t"))) == 1


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e7])
def test_ticks_are_few_and_round(scale):
    svg = line_chart({"a": [[0, 0.13 * scale], [977, 0.94 * scale]]}, "step", "t")
    labels = re.findall(r'text-anchor="end">([^<]+)<', svg)
    assert 3 <= len(labels) <= 7
    values = [float(label) for label in labels]
    assert values == sorted(set(values))


def test_long_series_are_thinned():
    (line,) = corners(line_chart({"a": [[step, step % 7] for step in range(10_000)]}, "step", "t"))
    assert len(line) == 300


def test_no_values_are_said_so():
    assert "no values" in line_chart({"a": []}, "step", "t")


def test_names_are_escaped():
    svg = line_chart({"<b>": [[0, 1.0]]}, '"x"', '"><script>')
    assert "<b>" not in svg
    assert "<script>" not in svg
