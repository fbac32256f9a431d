import json

import numpy as np
import pytest

from conjoin.methods.solar.explain.charts import (
    distribution_curves,
    last_thresholds,
    read_log,
    score_gaussians,
    score_histogram,
    threshold_course,
)


def entry(step, threshold=0.2):
    moments = {"positive_mean": 0.4, "positive_std": 0.1, "negative_mean": 0.0, "negative_std": 0.05}
    numbers = {f"{modality}_{name}": value for modality in ("image", "text") for name, value in moments.items()}
    return {"step": step, "loss": 1.0, "image_threshold": threshold, "text_threshold": -threshold} | numbers


LOG = [{"step": 0, "eval_loss": 2.0}, *(entry(step, step / 10) for step in range(1, 6)), {"train_runtime": 3.0}]


def test_a_histogram_is_a_density_with_the_threshold_upright():
    random = np.random.default_rng(0)
    curve = score_histogram(random.normal(0.5, 0.1, 5000), random.normal(0.0, 0.1, 5000), 0.25, "title", bins=30)
    assert list(curve.series) == ["S⁺", "S⁻", "τ = 0.250"]
    peaks = {}
    for name in ("S⁺", "S⁻"):
        x, y = np.array(curve.series[name]).T
        assert len(x) == 30
        assert np.sum(y) * (x[1] - x[0]) == pytest.approx(1.0)
        peaks[name] = x[y.argmax()]
    assert peaks["S⁺"] == pytest.approx(0.5, abs=0.1)
    assert peaks["S⁻"] == pytest.approx(0.0, abs=0.1)
    assert [point[0] for point in curve.series["τ = 0.250"]] == [0.25, 0.25]


def test_a_histogram_of_alike_scores_is_drawn_and_of_none_refused():
    assert len(score_histogram([0.5], [0.5]).series) == 2
    with pytest.raises(ValueError, match="S⁻ has 0 scores"):
        score_histogram([0.5], [])
    with pytest.raises(ValueError, match="S⁺ has 1 scores; expected some, all of them finite"):
        score_histogram([np.nan], [0.5])


def test_gaussians_have_the_logged_moments():
    curve = score_gaussians(entry(7), "text", points=2001)
    for name, mean, std in (("S⁺", 0.4, 0.1), ("S⁻", 0.0, 0.05)):
        x, y = np.array(curve.series[name]).T
        weight = y * (x[1] - x[0])
        assert weight.sum() == pytest.approx(1, abs=1e-3)
        assert (weight * x).sum() == pytest.approx(mean, abs=1e-3)
        assert np.sqrt((weight * (x - mean) ** 2).sum()) == pytest.approx(std, abs=1e-3)
    assert curve.title.endswith("step 7")
    assert "τ = -0.200" in curve.series


def test_the_course_and_snapshots_of_a_log():
    course = threshold_course(LOG)
    assert course.series["τ"] == [[step, step / 10] for step in range(1, 6)]
    titles = [curve.title for curve in distribution_curves(LOG, snapshots=3)]
    assert [title.rpartition(" ")[2] for title in titles if "step" in title] == ["1", "3", "5"] * 2
    assert len(distribution_curves(LOG[1:2])) == 4
    assert last_thresholds(LOG) == {"image": 0.5, "text": -0.5}


def test_logs_are_read_from_all_that_write_them(tmp_path):
    files = {
        "recipe.json": json.dumps({"method": "solar_stage1", "log": LOG}),
        "trainer_state.json": json.dumps({"log_history": LOG}),
        "log.jsonl": "\n".join(map(json.dumps, LOG)) + "\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        assert read_log(tmp_path / name) == LOG
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        read_log(tmp_path / "bad.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="expected a list of log entries"):
        read_log(tmp_path / "other.json")


def test_other_logs_are_refused():
    with pytest.raises(ValueError, match="none of 1 log entries has scores of the image"):
        threshold_course([{"step": 1, "loss": 2.0}])
    with pytest.raises(ValueError, match=r"no \['text_positive_mean'"):
        score_gaussians({"step": 1}, "text")
    with pytest.raises(ValueError, match="must be positive"):
        score_gaussians(entry(1) | {"image_positive_std": 0.0})
