"""Shared code of the claim scripts: a resumable record."""

import json
import platform
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import conjoin

ROOT = Path(__file__).parents[1]


class Record:
    """Finished runs in a JSON file, so that an interrupted script can resume.

    Args:
        path: The file.
        settings: The common settings of the runs; None to read a file of any.

    Raises:
        ValueError: The file has other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any] | None = None) -> None:
        self.path = path
        self.content: dict[str, Any] = {"settings": settings, "runs": []}
        if path.exists():
            self.content = json.loads(path.read_text())
            if settings is not None and self.content["settings"] != json.loads(json.dumps(settings)):
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
        """Add a run and save the file, with the runs that another process has added since."""
        if self.path.exists():
            self.content["runs"] = json.loads(self.path.read_text())["runs"]
        self.content["runs"].append({"name": name, "seed": seed} | found)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.content, indent=1, ensure_ascii=False)
        text = re.sub(r"\[[-\d.,\s]+\]", lambda numbers: " ".join(numbers[0].split()), text)  # on one line
        self.path.write_text(text + "\n", encoding="utf-8")

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
