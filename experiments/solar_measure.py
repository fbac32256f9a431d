"""Measure the rows of the SOLAR claims triplet by triplet, by the package's evaluation."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from scene_features import SceneTriplets, Vectors, embed_features, tower_vectors
from scene_truth import score_intersection
from scenes import TEST_SETS
from solar_scenes import SETS, Scenes
from solar_training import Trained
from torch import Tensor

Readouts = Mapping[str, Callable[[Vectors], Tensor]]

READOUTS: Readouts = {
    "fused": lambda views: views["fused"],
    "score fusion": lambda views: views["image"] + views["text"],
    "sum of three": lambda views: views["image"] + views["text"] + views["fused"],
}
TOWER_READOUTS: Readouts = {
    "global": lambda views: torch.cat([views["global"], views["words"]], dim=1),
    "patches": lambda views: torch.cat([views["patches"], views["words"]], dim=1),
}
MASKS: dict[str, Literal["global", "windows"]] = {"masks": "global", "window masks": "windows"}
SHARES = (0.1, 0.01, 0.001)
"""Of the mean variance, added to every variance before whitening."""


def measure_model(trained: Trained, scenes: Scenes) -> dict[str, Any]:
    """Every set by every readout, text → image search with and without heads, and the masks against the truth."""
    distractors = embed_features(trained.model, scenes.distractors, scenes.dtype)
    found: dict[str, Any] = {}
    for name in SETS:
        triplets = scenes.sets[name]
        views = embed_features(trained.model, triplets.features, scenes.dtype)
        found[name] = _outcomes(triplets, views, distractors, READOUTS)
        found[name]["text_to_image"] = triplets.text_to_image_ranks(views, distractors).tolist()
        if trained.heads is not None:
            with torch.inference_mode():
                projected, others = (trained.heads(each["image"], each["text"]) for each in (views, distractors))
            found[name]["text_to_image, heads"] = triplets.text_to_image_ranks(projected, others).tolist()
    for test in TEST_SETS:
        triplets = scenes.sets[f"test_{test}"]
        for kind, made_of in MASKS.items():
            found[f"test_{test}"][kind] = score_intersection(
                trained.model, scenes.processor, triplets.scenes, features=triplets.features, scores=made_of
            )
    return found


def measure_towers(scenes: Scenes, whitened: bool) -> dict[str, Any]:
    """The towers' score fusion; each tower whitened by the training scenes' statistics, if asked."""
    fit = tower_vectors(scenes.train) if whitened else None
    changes = {"": _same} if fit is None else {f", {share:g}": _whitener(fit, share) for share in SHARES}
    distractors = tower_vectors(scenes.distractors)
    found: dict[str, Any] = {}
    for name in SETS:
        triplets, views = scenes.sets[name], tower_vectors(scenes.sets[name].features)
        found[name] = {}
        for label, change in changes.items():
            outcomes = _outcomes(triplets, change(views), change(distractors), TOWER_READOUTS)
            readouts = {f"{readout}{label}": outcome for readout, outcome in outcomes.pop("readouts").items()}
            found[name] |= outcomes | {"readouts": found[name].get("readouts", {}) | readouts}
    return found


def _same(views: Vectors) -> Vectors:
    return views


def _whitener(fit: Vectors, share: float) -> Callable[[Vectors], Vectors]:
    """A function that gives every kind of vector mean 0 and equal variances, and unit length."""
    maps = {}
    for name, vectors in fit.items():
        values, axes = torch.linalg.eigh(vectors.T.cov())
        maps[name] = vectors.mean(0), axes / (values.clamp(min=0) + share * values.mean()).sqrt()

    def whiten(views: Vectors) -> Vectors:
        return {name: F.normalize((vectors - maps[name][0]) @ maps[name][1]) for name, vectors in views.items()}

    return whiten


def _outcomes(triplets: SceneTriplets, views: Vectors, distractors: Vectors, readouts: Readouts) -> dict[str, Any]:
    """Per triplet: the kind of the negative, and by readout whether Precision counts it, and the positive's rank."""
    found = {}
    for name, readout in readouts.items():
        outcome = triplets.outcomes(F.normalize(readout(views), dim=1), F.normalize(readout(distractors), dim=1))
        found[name] = {"wins": outcome.wins.int().tolist(), "ranks": outcome.ranks.tolist()}
    return {"kinds": triplets.kinds, "pool": outcome.pool, "readouts": found}
