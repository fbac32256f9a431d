"""Tiny random checkpoints of real architectures, with real tokenizers and image processors, built offline once."""

import gc
import logging
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from huggingface_hub.utils import disable_progress_bars
from PIL import Image
from transformers.utils import logging as library_logging

from conjoin.hub.build import mllm_model, mllm_processor
from loopback_hub import serve
from tiny_checkpoints import CHECKPOINTS
from tiny_embedders import drop_video
from tiny_mllms import save_mllm

sys.path.append(str(Path(__file__).parents[1] / "experiments"))  # the miniatures

for disable in (datasets.disable_progress_bars, disable_progress_bars, library_logging.disable_progress_bar):
    disable()  # as the command line does without a terminal, before it imports the libraries

# Tests run side by side; and the processes they start, with one thread, must agree bit by bit.
torch.set_num_threads(1)

with suppress(ImportError):  # the tests of properties are skipped without it
    from hypothesis import HealthCheck, settings

    slow = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.differing_executors]
    settings.register_profile(
        "conjoin", derandomize=True, deadline=None, max_examples=40, database=None, suppress_health_check=slow
    )
    settings.load_profile("conjoin")


def pytest_collection_finish():
    """What the imports made stays: the garbage collection of each run of the library's trainer need not visit it."""
    gc.collect()
    gc.freeze()


BLOCK_CONJOIN = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "conjoin":
            raise ModuleNotFoundError("No module named 'conjoin'")

sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory):
    """`{name: folder}` of every tiny checkpoint, as `from_pretrained` reads them."""
    folders = {}
    for name, build in CHECKPOINTS.items():
        torch.manual_seed(0)
        model, *processors = build()
        with torch.no_grad():  # library initialisations are so small that all embeddings would be alike
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        folders[name] = str(tmp_path_factory.mktemp(name))
        for part in (model, *processors):
            part.save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="session")
def exports(tiny_checkpoints, mllm_checkpoints, tmp_path_factory):
    """`exports(kind)` is the folder of an export, its model and its processor; do not change them."""
    from conjoin.hub import export
    from tiny_kinds import KINDS

    cache = {}

    def get(kind):
        if kind not in cache:
            torch.manual_seed(0)
            model, processor = KINDS[kind](tiny_checkpoints, mllm_checkpoints)
            cache[kind] = export(model.eval(), processor, tmp_path_factory.mktemp(kind)), model, processor
        return cache[kind]

    return get


@pytest.fixture(scope="session")
def own_export(exports):
    """Our own export, its model and its processor."""
    return exports("joint_encoder")


@pytest.fixture(scope="session")
def mllm_checkpoints(tmp_path_factory):
    """`mllm_checkpoints(name)` is the folder of a tiny MLLM and the full model in it."""
    cache = {}

    def get(name):
        if name not in cache:
            folder = str(tmp_path_factory.mktemp(name))
            cache[name] = folder, save_mllm(name, folder)
        return cache[name]

    return get


@pytest.fixture(scope="session")
def retriever(mllm_checkpoints):
    """`retriever(name, keep_layers, ...)` is a tiny MLLM, pruned if told, and its processor."""

    def get(name, keep_layers=None, **config):
        folder, _ = mllm_checkpoints(name)
        return mllm_model(folder, keep_layers, **config), mllm_processor(folder)

    return get


@pytest.fixture(scope="session")
def pictures():
    """Four different RGB pictures of different sizes."""
    random = np.random.default_rng(0)
    return [
        Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for height, width in ((16, 16), (20, 30), (9, 5), (32, 17))
    ]


@pytest.fixture
def run_without_conjoin():
    """Run Python code in a fresh process, offline, in which `import conjoin` fails; returns what it prints."""

    def run(code):
        result = subprocess.run(
            [sys.executable, "-c", BLOCK_CONJOIN + code],
            capture_output=True,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


@pytest.fixture(scope="session")
def load_first_emoji(tmp_path_factory):
    """`load_emoji` of the first concepts of each split, enough of them to reach people."""
    from tiny_emoji import few_emoji

    return few_emoji(220, tmp_path_factory.mktemp("emoji"))


@pytest.fixture
def launch():
    """Run `conjoin` in two processes; returns what they print."""

    def run(*words):
        two_cpu = Path(__file__).parents[1] / "training_args/accelerate/two_cpu.yaml"
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(two_cpu)]
        command += ["--main_process_port", "0", "-m", "conjoin", *map(str, words)]
        environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
        assert result.returncode == 0, result.stderr[-3000:]
        return result.stdout

    return run


@pytest.fixture
def hub():
    """A hub on this machine, see `loopback_hub`."""
    with serve() as running:
        yield running


@pytest.fixture
def warnings(caplog):
    """What the library's logger warns of, as text; it warned of nothing before."""
    library_logging.warning_once.cache_clear()
    library_logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        yield lambda: caplog.text
    library_logging.disable_propagation()


@pytest.fixture
def without_video(monkeypatch):
    """Leave out processors of videos where torchvision is missing, without which none can be built."""
    drop_video(monkeypatch)
