"""Report curves of score distributions and thresholds, for one model or a training run (SOLAR Fig. 11)."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from conjoin.evaluation.results import Curve

MODALITIES = {"image": "patches against text", "text": "words against image"}
_MOMENTS = ("positive_mean", "positive_std", "negative_mean", "negative_std", "threshold")


def score_histogram(
    positive: ArrayLike, negative: ArrayLike, threshold: float | None = None, title: str = "Scores", bins: int = 40
) -> Curve:
    """Plot the score densities of matching (S⁺) and other pairs (S⁻), with the threshold as a vertical line.

    Raises:
        ValueError: A population is empty or not finite.
    """
    scores = {"S⁺": np.asarray(positive, dtype=float).ravel(), "S⁻": np.asarray(negative, dtype=float).ravel()}
    for name, values in scores.items():
        if not values.size or not np.isfinite(values).all():
            raise ValueError(f"{name} has {values.size} scores; expected some, all of them finite")
    every = np.concatenate(list(scores.values()))
    low, high = every.min(), every.max()
    edges = np.linspace(low, high if high > low else low + 1e-6, bins + 1)
    middles = (edges[:-1] + edges[1:]) / 2
    densities = {name: np.histogram(values, edges, density=True)[0] for name, values in scores.items()}
    return _with_threshold({name: (middles, density) for name, density in densities.items()}, threshold, title)


def score_gaussians(entry: Mapping[str, float], modality: str = "image", points: int = 81) -> Curve:
    """Plot the Gaussians and the threshold of one entry of a stage-1 log.

    Args:
        entry: Log entry of `SolarStage1Trainer`, with `{modality}_positive_mean` and the other moments.
        modality: `"image"` or `"text"`.
        points: Points per line.

    Raises:
        ValueError: The entry lacks a number, or a standard deviation is not positive.
    """
    missing = [f"{modality}_{name}" for name in _MOMENTS if f"{modality}_{name}" not in entry]
    if missing:
        raise ValueError(
            f"the entry has no {missing}; it is not from stage 1, or the modality is not one of {[*MODALITIES]}"
        )
    mean, std, other_mean, other_std, threshold = (float(entry[f"{modality}_{name}"]) for name in _MOMENTS)
    if min(std, other_std) <= 0:
        raise ValueError(f"standard deviations {std} and {other_std} must be positive")
    ends = [centre + sign * 4 * width for centre, width in ((mean, std), (other_mean, other_std)) for sign in (-1, 1)]
    x = np.linspace(min(ends), max(ends), points)
    lines = {
        name: (x, np.exp(-(((x - centre) / width) ** 2) / 2) / (width * math.sqrt(2 * math.pi)))
        for name, centre, width in (("S⁺", mean, std), ("S⁻", other_mean, other_std))
    }
    return _with_threshold(lines, threshold, f"{MODALITIES[modality]}, step {int(entry.get('step', 0))}")


def threshold_course(log: Sequence[Mapping[str, float]], modality: str = "image") -> Curve:
    """Plot the means of both populations and the threshold over training."""
    names = {"μ⁺": "positive_mean", "μ⁻": "negative_mean", "τ": "threshold"}
    entries = _stage1_entries(log, modality)
    series = {
        label: [[entry["step"], entry[f"{modality}_{name}"]] for entry in entries] for label, name in names.items()
    }
    return Curve(f"Mean scores and threshold: {MODALITIES[modality]}", series)


def distribution_curves(log: Sequence[Mapping[str, float]], snapshots: int = 3) -> list[Curve]:
    """Plot all charts of a stage-1 log: means and threshold over training, and Gaussians at evenly spaced steps.

    Raises:
        ValueError: The log is not from stage 1.
    """
    curves = []
    for modality in MODALITIES:
        entries = _stage1_entries(log, modality)
        chosen = np.unique(np.linspace(0, len(entries) - 1, min(snapshots, len(entries))).round().astype(int))
        curves += [threshold_course(log, modality), *(score_gaussians(entries[index], modality) for index in chosen)]
    return curves


def last_thresholds(log: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the last tau of each modality in a stage-1 log."""
    return {modality: float(_stage1_entries(log, modality)[-1][f"{modality}_threshold"]) for modality in MODALITIES}


def read_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Load a training log: a `recipe.json`, a `trainer_state.json`, or a JSONL file with one entry per line.

    Raises:
        ValueError: The file has another format.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        if str(path).endswith(".jsonl"):
            entries: Any = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            content = json.loads(text)
            entries = content.get("log", content.get("log_history")) if isinstance(content, dict) else content
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{path}: expected a list of log entries, or one under 'log' or 'log_history'")
    return entries


def _stage1_entries(log: Sequence[Mapping[str, float]], modality: str) -> list[Mapping[str, float]]:
    entries = [entry for entry in log if f"{modality}_threshold" in entry and f"{modality}_positive_mean" in entry]
    if not entries:
        raise ValueError(f"none of {len(log)} log entries has scores of the {modality}; is it a log of stage 1?")
    return entries


def _with_threshold(lines: Mapping[str, tuple[np.ndarray, np.ndarray]], threshold: float | None, title: str) -> Curve:
    series = {name: np.stack((x, y), axis=1).tolist() for name, (x, y) in lines.items()}
    if threshold is not None:
        top = max(float(y.max()) for _, y in lines.values())
        series[f"τ = {threshold:.3f}"] = [[threshold, 0.0], [threshold, top]]
    return Curve(title, series, "cosine")
