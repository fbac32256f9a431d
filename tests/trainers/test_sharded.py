"""Two ranks with FSDP take the steps that one process takes on the full batch, and save the same model."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate import DistributedType, PartialState
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.state import AcceleratorState
from peft import LoraConfig
from PIL import Image
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback

from conjoin.data import EpochRows
from conjoin.hub import load_model
from conjoin.trainers.contrastive import ContrastiveConfig, QueryContrastiveTrainer
from conjoin.trainers.sharded import Sharding
from tiny_trainers import make_any
from tiny_training import METHODS, make_encoder, make_rows, make_trainer, without_dropout
from two_ranks import run_two_ranks

pytestmark = pytest.mark.slow
gathers = pytest.mark.skipif(torch.__version__ < "2.8", reason="gloo of torch 2.7 aborts in FSDP's gather on CPUs")

LAUNCH_FILES = Path(__file__).parents[2] / "training_args/accelerate"
CASES = {
    "contrastive": {"method": "contrastive", "max_grad_norm": 1.0},
    "gcl-cached-lora": {"method": "gcl", "gradient_cache_chunk_size": 2, "lora": r"(vision|text)_model\..*"},
    "queries-cached": {"method": "queries", "gradient_cache_chunk_size": 2},
}
OTHER_METHODS = ("GCL, MLLM", "SOLAR 1", "SOLAR 2", "PUMA 1", "PUMA 1, shared", "PUMA 2", "Coral", "Coral, cached")
CACHED = ", cached"
TRAINERS = METHODS | {"queries": (ContrastiveConfig, QueryContrastiveTrainer)}


def query_rows():
    """Queries of texts and of images, so that one rank may have texts alone; some rows have negatives."""
    rows = []
    for i in range(16):
        colour = (40 * i % 256, 90 * i % 256, 255 - 30 * i % 256)
        query = {"image": Image.new("RGB", (16, 16), colour)} if i % 3 == 0 else f"{chr(97 + i)} {i}"
        rows.append({"query": query, "positive": f"p {i}", "positive_id": f"p{i}"})
        rows[-1] |= {"negatives": [f"n {i}"], "negative_ids": [f"n{i}"]} if i % 4 == 0 else {}
    return rows


def run_case(checkpoints, folder, batch_size, method, lora=None, resume=None, **arguments):
    """Train for two steps, perhaps from a checkpoint, and save; returns the trainer."""
    model, processor = make_encoder(checkpoints)
    without_dropout(model)
    if lora is not None:
        torch.manual_seed(1)
        arguments["peft_config"] = LoraConfig(r=2, lora_alpha=4, target_modules=lora)
    rows = query_rows() if method == "queries" else make_rows(32, groups=15)
    settings = {"optim": "sgd", "max_grad_norm": 0.0, "train_sampling_strategy": "sequential", "learning_rate": 0.1}
    settings |= {"per_device_train_batch_size": batch_size, "save_strategy": "steps", "save_steps": 1} | arguments
    evaluated = EpochRows(query_rows()[:5]) if method == "queries" else make_rows(11)
    trainer = make_trainer(method, model, processor, folder, rows, evaluated, methods=TRAINERS, **settings)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    return trainer


class ReshardRoot(TrainerCallback):
    """Gathers the weights outside the layers for each forward alone, as FSDP does with accelerate 1.13 and earlier."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if isinstance(model, FSDPModule):
            model.set_reshard_after_forward(True)


def shard_on_cpus():
    """Let accelerate use FSDP, which it refuses for processes on CPUs."""
    original = AcceleratorState.__init__

    def patched(self, *args, **kwargs):
        if not AcceleratorState._shared_state:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        original(self, *args, **kwargs)

    AcceleratorState.__init__ = patched


def run_method(name, spec, rank):
    """Train a method of `OTHER_METHODS` for two steps on two ranks, and save; returns the losses."""
    settings = {"optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 0.1, "per_device_train_batch_size": 4}
    own = Path(spec["folder"]) / f"{name}-{rank}"
    own.mkdir()
    if name.endswith(CACHED):
        settings["gradient_cache_chunk_size"] = 2
    trainer = make_any(name.removesuffix(CACHED), spec["checkpoints"], spec["mllm"], own, rows=16, **settings)
    trainer.add_callback(ReshardRoot())
    trainer.train()
    trainer.save_model(f"{spec['folder']}/{name}")
    assert trainer.sharding.fsdp == spec["fsdp"]
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(spec):
    """What each rank runs."""
    rank = int(os.environ["RANK"])
    if spec["fsdp"]:
        shard_on_cpus()
    for name in spec["cases"]:
        trainer = run_case(spec["checkpoints"], f"{spec['folder']}/{name}", 4, **CASES[name])
        found = {"fsdp": trainer.sharding.fsdp, "metrics": trainer.evaluate()}
        found["units"] = sum(isinstance(module, FSDPModule) for module in trainer.model.modules())
        Path(f"{spec['folder']}/{name}-{rank}.json").write_text(json.dumps(found))
    if spec["cases"]:  # the optimiser has a state
        for name, resume in (("whole", None), ("resumed", f"{spec['folder']}/whole/checkpoint-1")):
            adam = CASES["contrastive"] | {"optim": "adamw_torch", "learning_rate": 1e-3}
            run_case(spec["checkpoints"], f"{spec['folder']}/{name}", 4, resume=resume, **adam)
    losses = {name: run_method(name, spec, rank) for name in spec["methods"]}
    Path(f"{spec['folder']}/losses-{rank}.json").write_text(json.dumps(losses))
    torch.distributed.barrier()
    time.sleep(0.5)  # gloo aborts a rank that leaves while another still talks
    os._exit(0)  # the destructors of its threads may wait for each other


def environment_of(launch_file):
    """The variables by which `accelerate launch` passes the settings of FSDP."""
    settings = yaml.safe_load(launch_file.read_text())["fsdp_config"]
    return {"ACCELERATE_USE_FSDP": "true"} | {key.upper(): str(value) for key, value in settings.items()}


def start(folder, fsdp, checkpoints, cases=(), methods=(), mllm=None):
    """Run `main` in two processes."""
    spec = {"checkpoints": checkpoints, "mllm": mllm, "folder": str(folder), "fsdp": fsdp}
    spec |= {"cases": list(cases), "methods": list(methods)}
    run_two_ranks("test_sharded", folder, spec, **(environment_of(LAUNCH_FILES / "fsdp.yaml") if fsdp else {}))


@pytest.fixture(scope="module")
def two_ranks(tiny_checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    start(folder, True, tiny_checkpoints, cases=CASES)
    return folder


@gathers
def test_sharded_ranks_equal_ranks_with_whole_weights(tiny_checkpoints, mllm_checkpoints, tmp_path):
    mllm = str(mllm_checkpoints("qwen2_vl")[0])
    for name, fsdp in (("whole", False), ("sharded", True)):
        (tmp_path / name).mkdir()
        start(tmp_path / name, fsdp, tiny_checkpoints, methods=OTHER_METHODS, mllm=mllm)
    found, expected = (json.loads((tmp_path / name / "losses-0.json").read_text()) for name in ("sharded", "whole"))
    assert {name: len(losses) for name, losses in found.items()} == dict.fromkeys(OTHER_METHODS, 2)
    (tmp_path / "untrained").mkdir()
    for name in OTHER_METHODS:
        assert found[name] == pytest.approx(expected[name], rel=1e-5)
        whole, sharded = (load_model(tmp_path / kind / name)[0].state_dict() for kind in ("whole", "sharded"))
        assert all(torch.allclose(sharded[key], weight, atol=2e-6) for key, weight in whole.items()), name
        trainer = make_any(name.removesuffix(CACHED), tiny_checkpoints, mllm, tmp_path / "untrained", rows=4)
        trainer.save_model(tmp_path / "untrained" / name)
        before = load_model(tmp_path / "untrained" / name)[0].state_dict()
        assert max((sharded[key] - weight).abs().max().item() for key, weight in before.items()) > 1e-4, name


@gathers
@pytest.mark.parametrize("name", CASES)
def test_two_sharded_ranks_equal_one_process(two_ranks, tiny_checkpoints, tmp_path, name):
    alone = run_case(tiny_checkpoints, tmp_path / "alone", 8, **CASES[name])
    ranks = [json.loads((two_ranks / f"{name}-{rank}.json").read_text()) for rank in range(2)]
    assert [rank["fsdp"] for rank in ranks] == [True, True]
    assert (ranks[0]["units"] > 5) == (name != "queries-cached")  # the layers, or the step as a whole
    expected, _ = load_model(tmp_path / "alone")
    found, _ = load_model(two_ranks / name)
    untrained, _ = make_encoder(tiny_checkpoints)
    moved = 0.0
    for key, weight in expected.state_dict().items():
        assert torch.allclose(found.state_dict()[key], weight, atol=2e-6), key
        moved = max(moved, (weight - untrained.state_dict()[key]).abs().max().item())
    assert moved > 1e-4
    assert [rank["metrics"] for rank in ranks] == [pytest.approx(alone.evaluate())] * 2
    resumed, whole = (load_model(two_ranks / run)[0].state_dict() for run in ("resumed", "whole"))
    assert all(torch.equal(resumed[key], weight) for key, weight in whole.items())


def test_accelerate_reads_the_launch_files():
    known = {action.dest for action in launch_command_parser()._actions}
    zero3 = {"zero_stage": 3, "zero3_save_16bit_model": True}
    for name, expected in (
        ("fsdp", {"fsdp_version": 2}),
        ("deepspeed_zero2", {"zero_stage": 2}),
        ("deepspeed_zero3", zero3),
    ):
        config = load_config_from_file(str(LAUNCH_FILES / f"{name}.yaml"))
        settings = vars(config)[f"{name.partition('_')[0]}_config"]
        assert config.mixed_precision == "bf16" and settings.items() >= expected.items() and known >= settings.keys()


def test_the_first_version_of_fsdp_is_refused(tiny_checkpoints):
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1))
    accelerator = SimpleNamespace(distributed_type=DistributedType.FSDP, state=state)
    with pytest.raises(ValueError, match="fsdp_version is 1"):
        Sharding(accelerator, SimpleNamespace(encoder=make_encoder(tiny_checkpoints)[0]))
