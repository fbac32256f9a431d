"""What the demo compares its model with, on the same towers, pictures and names."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import datasets

    from conjoin.evaluation import Metric, Results, Table

DEMO = "sample/demo.yaml"
TOWERS = "frozen towers"
VIEWS = ("image", "text", "fused")
BOTH = {"both adapters": (DEMO, ["--freeze", "null"])}
JOINT: dict[str, tuple[str, list[str]]] = {"joint encoder": ("gcl/sample.yaml", [])}
"""The recipe and the flags of the baselines that are trained; a joint encoder takes as long as all the rest."""
DIRECTIONS = {
    "text → image, R@10": ("text", "image", "hit_rate@10"),
    "image → image, R@1": ("image", "image", "hit_rate@1"),
    "image + text → image, R@1": ("image+text", "image", "hit_rate@1"),
    "text → text, R@1": ("text", "text", "hit_rate@1"),
}
"""Query, candidates and metric of each row of the comparison."""
NOTE = (
    "All have the same towers, training pictures and names, loss and test. The frozen towers are this model before "
    "training. This model keeps their text vectors and trains the adapter of the images; both adapters trains that of "
    "the texts too"
)
WITH_JOINT = "; the joint encoder has three attention layers over patches and words, all trained"


def compare_models(
    trainer: Any,  # noqa: ANN401 - a `RetrievalTrainer` on cached features
    processor: Any,  # noqa: ANN401
    rows: "tuple[datasets.Dataset, datasets.Dataset]",
    results: "Results",
    flags: Sequence[str],
    folder: Path,
    joint_encoder: bool = False,
) -> "Table":
    """Train the baselines and compare them with the model of the demo.

    Args:
        trainer: Of the demo's model.
        processor: Of that model.
        rows: The queries and the candidates, as `emoji_rows` returns them.
        results: Of that model.
        flags: Of the demo's recipe; they apply to the baselines too.
        folder: Where the baselines and the features of the test pictures go.
        joint_encoder: Also train a joint encoder.
    """
    from conjoin.evaluation import Table
    from conjoin.trainers import CachedFeatures, load_recipe, recipe_folder, train

    def recipe(name: str, *more: str) -> Any:  # noqa: ANN401
        return load_recipe(recipe_folder() / name, [*flags, "--eval_strategy", "no", *more])

    test = [
        CachedFeatures(trainer.encoder, processor, each, folder / name, first_only=True)
        for name, each in zip(("queries", "gallery"), rows, strict=True)
    ]
    models = {TOWERS: recipe(DEMO).model.load()[0].to(trainer.args.device)}
    for name, (path, more) in (BOTH | JOINT if joint_encoder else BOTH).items():
        output = str(folder / name.replace(" ", "-"))
        models[name] = train(recipe(path, *more, "--output_dir", output, "--overwrite")).encoder
    named_twice = torch.tensor([name is not None for name in rows[1]["alternative_text"]])
    columns = [
        [results.metrics(f"local {query} → {candidate}")[metric] for query, candidate, metric in DIRECTIONS.values()],
        *(_score(model, test, named_twice) for model in models.values()),
    ]
    table = [[name, *metrics] for name, *metrics in zip(DIRECTIONS, *columns, strict=True)]
    note = NOTE + (WITH_JOINT if joint_encoder else "") + "."
    return Table("Compared on the same towers", ["", "this model", *models], table, note)


def _score(model: Any, test: list[Any], named_twice: torch.Tensor) -> list["Metric"]:  # noqa: ANN401
    """Each row's metric of one model; where both sides have text, of the concepts with two names, as `emoji_cells`."""
    from conjoin.evaluation import Metric, best_ranks

    queries, gallery = (_embed(model, features) for features in test)
    labels = torch.arange(len(named_twice))
    metrics = []
    for query, candidate, metric in DIRECTIONS.values():
        asked = labels[named_twice] if "text" in query and "text" in candidate else labels
        vectors = queries["fused" if "+" in query else query][asked]
        ranks = best_ranks(vectors, gallery[candidate], asked, labels)
        metrics.append(Metric(float((ranks <= int(metric.split("@")[1])).float().mean())))
    return metrics


@torch.inference_mode()
def _embed(model: Any, features: Any) -> dict[str, torch.Tensor]:  # noqa: ANN401
    """Unit vectors `(N, d)` of each view of cached features."""
    from conjoin.trainers import collate_features

    batches: list[torch.Tensor] = []
    for start in range(0, len(features), 128):
        pairs = collate_features([features[row] for row in range(start, min(start + 128, len(features)))])["pairs"]
        pairs = {name: value.to(model.device) for name, value in pairs.items()}
        batches.append(model.eval()(**pairs, views=VIEWS).embeddings.float().cpu().unflatten(0, (len(VIEWS), -1)))
    return dict(zip(VIEWS, torch.cat(batches, dim=1), strict=True))
