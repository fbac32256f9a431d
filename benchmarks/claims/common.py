"""Shared code of the claim scripts: cached tower features of the sample, untrained models, a resumable record."""

import copy
import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.utils import logging

import conjoin
from conjoin.models.joint_encoder import JointEncoderModel
from conjoin.training import CachedFeatures, build_model, cache_features, collate_features, load_recipe

ROOT = Path(__file__).parents[2]
FEATURES = Path("runs/claims/features")


class Sample:
    """The demo's towers and processor, and the tower features of rows."""

    def __init__(self) -> None:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.recipe = load_recipe(ROOT / "training_args/sample/demo.yaml", {"training.output_dir": "runs/claims"})
        self.encoder, self.processor = build_model(self.recipe.model)

    def cache(self, name: str, rows: Any) -> Path:  # noqa: ANN401 - any rows
        """Folder of the tower features of rows, computed once per name, ids and texts."""
        columns = {column: [row[column] for row in rows] if isinstance(rows, list) else list(rows[column])
                   for column in ("id", "text")}  # fmt: skip
        key = hashlib.sha256(repr(columns).encode()).hexdigest()
        return cache_features(
            self.encoder, self.processor, rows, FEATURES / f"{name} {key[:8]}", dtype=torch.bfloat16, key={"rows": key}
        )

    def new_model(self, seed: int, **config: Any) -> JointEncoderModel:  # noqa: ANN401 - fields of the configuration
        """An untrained model on the shared frozen towers."""
        torch.manual_seed(seed)
        settings = copy.deepcopy(self.encoder.config)
        for name, value in config.items():
            setattr(settings, name, value)
        model = JointEncoderModel(settings)
        model.vision_model, model.text_model = self.encoder.vision_model, self.encoder.text_model
        return model


def copy_of(model: JointEncoderModel) -> JointEncoderModel:
    """A copy that shares the frozen towers."""
    return copy.deepcopy(model, {id(tower): tower for tower in (model.vision_model, model.text_model)})


@torch.inference_mode()
def embed(model: JointEncoderModel, features: CachedFeatures, views: tuple[str, ...]) -> dict[str, Tensor]:
    """Embeddings of every row in the given views."""
    model.eval()
    parts: dict[str, list[Tensor]] = {view: [] for view in views}
    for start in range(0, len(features), 128):
        batch = collate_features([features[index] for index in range(start, min(start + 128, len(features)))])
        embedded = model(**batch["pairs"], views=views).embeddings
        for view, rows in zip(views, embedded.chunk(len(views)), strict=True):
            parts[view].append(rows)
    return {view: torch.cat(rows) for view, rows in parts.items()}


class Record:
    """Finished runs in a JSON file, so that an interrupted script can resume.

    Args:
        path: The file.
        settings: The common settings of the runs.

    Raises:
        ValueError: The file has other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.content: dict[str, Any] = {"settings": settings, "runs": []}
        if path.exists():
            self.content = json.loads(path.read_text())
            if self.content["settings"] != json.loads(json.dumps(settings)):
                raise ValueError(f"{path} has the settings {self.content['settings']}; choose another --out")
        versions = {
            "conjoin": conjoin.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        self.content["versions"] = versions | {"python": platform.python_version(), "device": "cpu"}

    def has(self, name: str, seed: int) -> bool:
        """Whether this run is finished."""
        return any((run["name"], run["seed"]) == (name, seed) for run in self.content["runs"])

    def add(self, name: str, seed: int, **found: Any) -> None:  # noqa: ANN401 - any JSON value
        """Add a run and save the file."""
        self.content["runs"].append({"name": name, "seed": seed} | found)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")

    def table(self, columns: list[str], scale: float = 100.0) -> str:
        """Mean ± standard deviation over seeds for each run and column, as Markdown."""
        names = list(dict.fromkeys(run["name"] for run in self.content["runs"]))
        lines = [f"| run | seeds | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
        for name in names:
            runs = [run for run in self.content["runs"] if run["name"] == name]
            cells = []
            for column in columns:
                values = [scale * run[column] for run in runs if run.get(column) is not None]
                cells.append(f"{np.mean(values):.1f} ± {np.std(values):.1f}" if values else "")
            lines.append(f"| {name} | {len(runs)} | {' | '.join(cells)} |")
        return "\n".join(lines)
