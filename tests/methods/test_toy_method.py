"""A method that another package registers trains by `conjoin train`, and no file of `conjoin` knows it."""

import json
import os
import subprocess
import sys

import pytest

from tiny_training import make_rows

pytestmark = pytest.mark.slow

TOY = """
from dataclasses import dataclass, field

from torch import nn

from conjoin.losses import symmetric_info_nce
from conjoin.training import METHODS, Method, RetrievalConfig, RetrievalTrainer


@dataclass
class Wishes:
    scale: float = 1.0


@dataclass
class ToyConfig(RetrievalConfig):
    sharpness: float = field(default=10.0)


class ToyLoss(nn.Module):
    def __init__(self, sharpness, scale):
        super().__init__()
        self.sharpness, self.scale = sharpness, scale

    def forward(self, image, text, ids=None):
        return {"toy_loss": self.scale * symmetric_info_nce(image, text, 1 / self.sharpness)}


class ToyTrainer(RetrievalTrainer):
    def __init__(self, model, args, scale=1.0, **kwargs):
        super().__init__(model, args, ToyLoss(args.sharpness, scale), **kwargs)


def prepare(run):
    return {"scale": run.recipe.sections.get("wishes", Wishes()).scale}


METHODS.register(Method("toy", ToyConfig, ToyTrainer, {"wishes": Wishes}, prepare))
"""

RECIPE = """
method: toy
model: {{vision: {vision}, text: {text}, config: {{hidden_size: 16, num_attention_heads: 2}}}}
data: {{source: {data}}}
wishes: {{scale: 2}}
training:
  {{output_dir: {out}, max_steps: 2, per_device_train_batch_size: 4, use_cpu: true, report_to: none,
   logging_steps: 1, save_strategy: "no", sharpness: 5}}
"""


MISTAKES = ["--wishes.scal", "3"], ["--training.sharpnes", "3"], ["--method", "toi"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder of installed packages with one that registers a method."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "toy-1.0.dist-info").mkdir()
    (folder / "toy-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (folder / "toy-1.0.dist-info/entry_points.txt").write_text("[conjoin.methods]\ntoy = toy\n")
    (folder / "toy.py").write_text(TOY)
    return folder


@pytest.fixture(scope="module")
def trained(tiny_checkpoints, site, tmp_path_factory):
    """The output folder and stderr of a run, and of runs with `MISTAKES`, where that package is installed."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "data").mkdir()
    for row in make_rows(8):
        row["image"].save(folder / f"data/{row['id']}.png")
        (folder / f"data/{row['id']}.txt").write_text(row["text"])
    towers = {"vision": tiny_checkpoints["dinov2"], "text": tiny_checkpoints["bert"]}
    path = folder / "toy.yaml"
    path.write_text(RECIPE.format(**towers, data=folder / "data", out=folder / "out"))
    commands = [["train", str(path), *overrides] for overrides in (["--wishes.scale", "3"], *MISTAKES)]
    code = f"from conjoin.cli.main import main\nprint([main(command) for command in {commands}])"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert found.stdout.endswith("[0, 2, 2, 2]\n"), found.stderr[-2000:]
    return folder / "out", found.stderr


def test_a_method_of_another_package_trains(trained):
    out, _ = trained
    record = json.loads((out / "recipe.json").read_text())
    assert (record["method"], record["wishes"], record["training"]["sharpness"]) == ("toy", {"scale": 3}, 5)
    losses = [entry["toy_loss"] for entry in record["log"] if "toy_loss" in entry]
    assert len(losses) == 2 and all(loss > 0 for loss in losses)
    assert {"model.safetensors", "modules.json", "processor_config.json"} <= set(os.listdir(out))


def test_its_keys_are_checked_like_any_other(trained):
    _, said = trained
    assert "unknown key 'scal'; did you mean 'scale'?" in said
    assert "did you mean 'sharpness'?" in said
    assert "did you mean 'toy'? expected one of ['contrastive', 'gcl'" in said
