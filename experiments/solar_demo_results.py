"""What the demo of SOLAR shows: its table, searches, and heat maps against the truth."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from scene_features import Outcomes, SceneTriplets, Vectors, embed_features, tower_vectors
from scene_truth import draw_scene_scores, score_intersection, score_scenes
from torch import Tensor

from conjoin import JointEncoderModel, SolarStage1Config
from conjoin.evaluation import (
    Curve,
    Example,
    Headline,
    Metric,
    Results,
    Shown,
    ShownHit,
    Table,
    bootstrap_ci,
    picture,
    score_ranks,
)
from conjoin.evaluation.results import TableRow
from conjoin.processing import load_image
from conjoin.trainers import CachedFeatures, RetrievalTrainer

BASELINE, STAGE1, STAGE2 = "GCL", "SOLAR stage 1", "SOLAR stage 2"
TOWERS = "towers, score fusion"
READOUTS: dict[str, Callable[[Vectors], Tensor]] = {
    "fused": lambda views: views["fused"],
    "score fusion": lambda views: views["image"] + views["text"],
}
SHOWN = f"{STAGE1}, score fusion"
"""The run of the searches, fixed in advance."""
COMPARED = [(SHOWN, TOWERS), *((f"{STAGE1}, {label}", f"{BASELINE}, {label}") for label in READOUTS)]
"""A run and what it is compared with, triplet by triplet."""
FOUND = 5
"""A search finds the positive if it is among so many."""
FIGURES_PER_SET = 4
OBJECTS = ("image_objects", "text_objects")
NAMES = {"known": "known objects", "unseen": "unseen objects"}
KINDS = {"image content": "picture", "text content": "text"}

TITLE = "SOLAR on scenes"
SUMMARY = (
    "A query is a picture of objects and a text that names some of them and others. Its positive shares exactly what "
    "picture and text of the query share: another artist draws what the text named, and the text names what the "
    "picture showed. A small joint encoder on two frozen towers is trained without labels. Stage 1 masks what picture "
    "and text do not share; stage 2 adds constructed samples and mined negatives. {triplets} test triplets of "
    "{objects} known objects in new compositions, as many of objects that no training scene has, and {distractors} "
    "distractors."
)
TABLE_NOTE = (
    "Precision: the positive is closer than its hard negative; then by kind of negative: the picture's objects drawn "
    "and named (picture), the text's (text). A random order has 50, and a model that compares pictures with pictures "
    "and texts with texts has 0. mR: mean of R@1, R@5 and R@10 among {pool} items. T→I: text → image R@10. Score "
    "fusion: the sum of the vectors of picture and text."
)
MASKS_NOTE = (
    "AUROC: whether tokens of shared objects score above tokens of private ones in the same scene (chance 50). "
    "Kept: % of the tokens of shared / private objects that the mask keeps. Background and other words have no truth."
)
DIFFERENCES_NOTE = "In points, with 95 % bootstrap intervals over the triplets; one seed."
USAGE = """from sentence_transformers import SentenceTransformer
model = SentenceTransformer("{folder}", trust_remote_code=True)
picture, text = model.encode([{{"image": "scene.jpg"}}, "an owl and an anchor"])
vector = picture + text  # score fusion; {{"image": ..., "text": ...}} gives the fused embedding
"""

Parts = dict[str, Tensor]
"""Unit vectors of the distractors, under `""`, and of the items of each test set."""


@dataclass
class DemoRuns:
    """What the demo has trained, and what it measures on.

    Attributes:
        trainers: By run.
        models: Their models.
        processor: Of all models.
        dtype: To compute in.
        sets: The test triplets, by the kind of their objects.
        features: Of the distractors.
        distractors: Their rows.
    """

    trainers: Mapping[str, RetrievalTrainer]
    models: Mapping[str, JointEncoderModel]
    processor: Any
    dtype: torch.dtype
    sets: Mapping[str, SceneTriplets]
    features: CachedFeatures
    distractors: Any

    @property
    def args(self) -> SolarStage1Config:
        """The configuration of stage 1."""
        return self.trainers[STAGE1].args  # type: ignore[return-value]

    def vectors(self) -> tuple[dict[str, Parts], dict[tuple[str, str], float]]:
        """The vectors of every run and readout, and text → image R@10 by run, readout and test set."""
        features = {"": self.features} | {name: triplets.features for name, triplets in self.sets.items()}
        towers = {name: tower_vectors(each) for name, each in features.items()}
        raw = {TOWERS: {n: torch.cat([each["global"], each["words"]], dim=1) for n, each in towers.items()}}
        recall: dict[tuple[str, str], float] = {}
        for run, model in self.models.items():
            views = {name: embed_features(model, each, self.dtype) for name, each in features.items()}
            for label, readout in READOUTS.items():
                raw[f"{run}, {label}"] = {name: readout(each) for name, each in views.items()}
                for name, triplets in self.sets.items():
                    ranks = triplets.text_to_image_ranks(views[name], views[""])
                    recall[f"{run}, {label}", name] = float((ranks <= 10).float().mean())
        unit = {run: {name: F.normalize(each, dim=1) for name, each in parts.items()} for run, parts in raw.items()}
        return unit, recall


def demo_results(runs: DemoRuns, sizes: Mapping[str, int], folder: Path) -> Results:
    """Measure every run on both test sets.

    Args:
        runs: What was trained.
        sizes: Of the scenes, as `make_scenes` takes them.
        folder: Of the model of stage 1.
    """
    model, seed = runs.models[STAGE1], runs.args.seed
    vectors, recall = runs.vectors()
    outcomes = {
        (run, name): triplets.outcomes(parts[name], parts[""])
        for run, parts in vectors.items()
        for name, triplets in runs.sets.items()
    }
    scores = {key: _symmetric(runs.sets[key[1]].kinds, outcome, seed) for key, outcome in outcomes.items()}
    examples, note = _searches(runs, vectors, outcomes)
    for name in runs.sets:
        _draw_scores(runs, name, seed, folder.parent / "pictures")
    parameters = list(model.parameters())
    return Results(
        title=TITLE,
        summary=SUMMARY.format(**sizes),
        seed=seed,
        model={
            "architecture": type(model).__name__,
            "parameters": sum(each.numel() for each in parameters),
            "trained parameters": sum(each.numel() for each in parameters if each.requires_grad),
            "dimension": model.config.hidden_size,
        },
        dataset={"name": "scenes of Twemoji (CC BY 4.0) and OpenMoji (CC BY-SA 4.0)", **sizes},
        config={run: _settings(trainer) for run, trainer in runs.trainers.items()},
        headline=[
            Headline(run, scores[run, "known"]["average"], "symmetric Avg, known objects")
            for run in (TOWERS, f"{BASELINE}, score fusion", SHOWN)
        ],
        tables=[
            *(_table(name, scores, recall, outcomes[TOWERS, name].pool) for name in runs.sets),
            _differences(outcomes, seed),
            _masks(runs),
        ],
        curves=_curves(runs),
        examples=examples,
        examples_note=note,
        usage=USAGE.format(folder=folder),
        created=date.today().isoformat(),
    )


def _settings(trainer: RetrievalTrainer) -> dict[str, Any]:
    return {
        "steps": trainer.state.max_steps,
        "batch size": trainer.args.per_device_train_batch_size,
        "learning rate": trainer.args.learning_rate,
    }


def _symmetric(kinds: Sequence[str | None], outcome: Outcomes, seed: int) -> dict[str, Metric]:
    """The metrics of a run, and the precision of each kind of negative."""
    metrics = score_ranks(outcome.ranks, 1, outcome.pool, mrr=None, seed=seed, wins=outcome.wins)
    for kind in KINDS:
        wins = outcome.wins[torch.tensor([other == kind.replace(" ", "_") for other in kinds])].double()
        metrics |= {f"precision, {kind}": Metric.from_values(wins, 0.5, seed=seed)} if len(wins) else {}
    return metrics


def _table(
    name: str, scores: Mapping[tuple[str, str], dict[str, Metric]], recall: Mapping[tuple[str, str], float], pool: int
) -> Table:
    """One row per run; intervals for Avg and Precision only."""
    chosen = {run: result for (run, of), result in scores.items() if of == name}
    rows: list[TableRow] = []
    for run, result in chosen.items():
        values = {key: Metric(each.value) for key, each in result.items()}
        average, precision = (result[key] for key in ("average", "precision"))
        main = [Metric(each.value, each.low, each.high) for each in (average, precision)]
        kinds = [values.get(f"precision, {kind}") for kind in KINDS]
        text = Metric(recall[run, name]) if (run, name) in recall else None
        rows.append([run, *main, *kinds, values["mean_recall"], text])
    columns = ["", "Avg", "Precision", *KINDS.values(), "mR", "T→I"]
    return Table(f"Symmetric retrieval, {NAMES[name]}", columns, rows, TABLE_NOTE.format(pool=pool))


def _differences(outcomes: Mapping[tuple[str, str], Outcomes], seed: int) -> Table:
    """Paired differences, triplet by triplet."""
    rows: list[TableRow] = []
    for name in NAMES:
        for run, other in COMPARED:
            ours, theirs = _values(outcomes[run, name]), _values(outcomes[other, name])
            rows.append([f"{run} − {other}", NAMES[name], *map(_difference, ours, theirs, (seed, seed))])
    return Table("Paired differences", ["", "scenes", "Avg", "Precision"], rows, DIFFERENCES_NOTE)


def _values(outcomes: Outcomes) -> tuple[Tensor, Tensor]:
    """Avg and Precision `(N,)` of each triplet."""
    wins = outcomes.wins.double()
    recall = torch.stack([(outcomes.ranks <= k).double() for k in (1, 5, 10)]).mean(0)
    return (recall + wins) / 2, wins


def _difference(ours: Tensor, theirs: Tensor, seed: int) -> str:
    low, high = bootstrap_ci(ours - theirs, seed=seed)
    return f"{100 * float((ours - theirs).mean()):+.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _masks(runs: DemoRuns) -> Table:
    """Compare the scores of both kinds with the truth."""
    rows: list[TableRow] = []
    kinds: dict[str, Literal["global", "windows"]] = {"global tokens": "global", "windows": "windows"}
    for run in (BASELINE, STAGE1):
        for name, triplets in runs.sets.items():
            for label, made_of in kinds.items():
                scores = score_intersection(
                    runs.models[run], runs.processor, triplets.scenes, features=triplets.features, scores=made_of
                )
                row: TableRow = [f"{run}, {label}", NAMES[name]]
                for part in ("patch", "token"):
                    kept = [f"{100 * scores[f'{part}_{which}_kept']:.0f}" for which in ("shared", "private")]
                    row += [Metric(scores[f"{part}_auroc"]), " / ".join(kept)]
                rows.append(row)
    columns = ["scores", "scenes", "patch AUROC", "patches kept", "word AUROC", "words kept"]
    return Table("What picture and text share", columns, rows, MASKS_NOTE)


def _searches(
    runs: DemoRuns, vectors: Mapping[str, Parts], outcomes: Mapping[tuple[str, str], Outcomes]
) -> tuple[list[Example], str]:
    """Show, for each set, what both find for the first query that `SHOWN` answers and the towers do not."""
    examples: list[Example] = []
    counts = []
    for name in runs.sets:
        hits = {run: outcomes[run, name].ranks <= FOUND for run in (TOWERS, SHOWN)}
        wins = hits[SHOWN] & ~hits[TOWERS]
        losses = int((hits[TOWERS] & ~hits[SHOWN]).sum())
        counts.append(f"{NAMES[name]}: {int(wins.sum())} and {losses} of {len(wins)}")
        if wins.any():
            query = int(wins.nonzero()[0])
            examples += [_search(runs, name, vectors[run], query, f"{NAMES[name]}: {run}") for run in (TOWERS, SHOWN)]
    note = (
        f"Of each test set the first query, in their order, for which {SHOWN} has the positive among the first "
        f"{FOUND} and the towers' score fusion has not. Queries for which this holds, and the reverse: "
        f"{'; '.join(counts)}."
    )
    return examples, note


def _search(runs: DemoRuns, name: str, parts: Parts, query: int, title: str) -> Example:
    triplets = runs.sets[name]
    count = len(triplets.kinds)
    candidates = [index for index in range(3 * count) if index != query]
    embeddings = torch.cat([parts[name][candidates], parts[""]])
    gallery = _Gallery([triplets.items[index] for index in candidates], runs.distractors)
    right = candidates.index(count + query)
    scores = F.normalize(embeddings.float(), dim=1) @ F.normalize(parts[name][query].float(), dim=0)
    first = scores.topk(5).indices.tolist()
    hits = [ShownHit(gallery[index], float(scores[index]), index == right) for index in first]
    rank = int((scores >= scores[right]).sum())  # ties count as better
    return Example(_shown(triplets.items[query]), hits, rank, len(gallery), title)


class _Gallery(Sequence[Shown]):
    """Items that are drawn when they are shown."""

    def __init__(self, items: Sequence[Mapping[str, Any]], distractors: Any) -> None:  # noqa: ANN401
        self.items, self.distractors = items, distractors

    def __len__(self) -> int:
        return len(self.items) + len(self.distractors)

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - as of a sequence
        count = len(self.items)
        return _shown(self.items[index] if index < count else self.distractors[index - count])


def _shown(item: Mapping[str, Any]) -> Shown:
    return Shown(item["text"], picture(load_image(item["image"])))


def _draw_scores(runs: DemoRuns, name: str, seed: int, folder: Path) -> None:
    """Draw scores of stage 1 on random queries whose picture shows something that the text does not."""
    triplets = runs.sets[name]
    objects = [[{each["object"] for each in scene[part]} for part in OBJECTS] for scene in triplets.scenes]
    partly = [index for index, (shown, named) in enumerate(objects) if shown & named and shown - named]
    count = min(FIGURES_PER_SET, len(partly))
    chosen = np.random.default_rng(seed).choice(partly, size=count, replace=False).tolist()
    scores = runs.args.scores
    scored = list(
        score_scenes(runs.models[STAGE1], runs.processor, triplets.scenes, features=triplets.features, scores=scores)
    )
    folder.mkdir(parents=True, exist_ok=True)
    for index in chosen:
        scene, image = triplets.scenes[index], load_image(triplets.items[index]["image"])
        drawn = draw_scene_scores(image, scene, scored[index], runs.processor.tokenizer)
        drawn.save(folder / f"{name}-{index}.png")


def _curves(runs: DemoRuns) -> list[Curve]:
    losses = {
        run: [[entry["step"], entry["loss"]] for entry in trainer.state.log_history if "loss" in entry]
        for run, trainer in runs.trainers.items()
    }
    log = [entry for entry in runs.trainers[STAGE1].state.log_history if "image_positive_mean" in entry]
    curves = [Curve("Training loss", losses)]
    for modality, title in {"image": "patches against text", "text": "words against image"}.items():
        names = {"μ⁺": "positive_mean", "μ⁻": "negative_mean", "τ": "threshold"}
        series = {label: [[each["step"], each[f"{modality}_{name}"]] for each in log] for label, name in names.items()}
        curves.append(Curve(f"Mean scores and threshold: {title}", series))
        curves += [_distributions(log[index], modality, title) for index in sorted({0, len(log) // 2, len(log) - 1})]
    return curves


def _distributions(entry: Mapping[str, float], modality: str, title: str) -> Curve:
    """The Gaussians of both populations and the threshold at one step of stage 1 (SOLAR Fig. 11)."""
    moments = {
        label: (entry[f"{modality}_{sign}_mean"], max(entry[f"{modality}_{sign}_std"], 1e-6))
        for label, sign in (("S⁺", "positive"), ("S⁻", "negative"))
    }
    ends = [mean + side * std for mean, std in moments.values() for side in (-4, 4)]
    x, tau = np.linspace(min(ends), max(ends), 81), entry[f"{modality}_threshold"]
    densities = {
        label: np.exp(-(((x - mean) / std) ** 2) / 2) / (std * np.sqrt(2 * np.pi))
        for label, (mean, std) in moments.items()
    }
    series = {label: np.stack((x, density), axis=1).tolist() for label, density in densities.items()}
    series[f"τ = {tau:.3f}"] = [[tau, 0.0], [tau, max(float(density.max()) for density in densities.values())]]
    return Curve(f"{title}, step {int(entry['step'])}", series, "cosine")
