"""Two ranks with FSDP take the steps that two with whole weights take, and save the same model."""

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
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback

from conjoin.hub import load_model
from conjoin.trainers.sharded import Sharding
from tiny_trainers import make_any
from tiny_training import hit_rates, make_encoder
from two_ranks import run_two_ranks

pytestmark = pytest.mark.slow
gathers = pytest.mark.skipif(torch.__version__ < "2.8", reason="gloo of torch 2.7 aborts in FSDP's gather on CPUs")

FSDP = Path(__file__).parents[2] / "training_args/accelerate/fsdp.yaml"
METHODS = (
    "contrastive", "GCL, LoRA, cached", "queries, cached", "GCL, MLLM", "SOLAR 1", "SOLAR 2", "PUMA 1",
    "PUMA 1, shared", "PUMA 2", "Coral", "Coral, cached",
)  # fmt: skip
CACHED = ", cached"


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
    """Train a method for two steps on two ranks, and save; returns losses, metrics, and the number of FSDP's units."""
    settings = {"optim": "sgd", "max_grad_norm": 1.0, "learning_rate": 0.1, "per_device_train_batch_size": 4}
    own = Path(spec["folder"]) / f"{name}-{rank}"
    own.mkdir()
    if name.endswith(CACHED):
        settings["gradient_cache_chunk_size"] = 2
    trainer = make_any(name.removesuffix(CACHED), spec["checkpoints"], spec["mllm"], own, rows=16, **settings)
    trainer.add_callback(ReshardRoot())
    trainer.train()
    trainer.save_model(f"{spec['folder']}/{name}")
    assert trainer.sharding.fsdp == spec["fsdp"]
    units = sum(isinstance(module, FSDPModule) for module in trainer.model.modules())
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, hit_rates(trainer, trainer.train_dataset), units


def main(spec):
    """What each rank runs."""
    rank, folder = int(os.environ["RANK"]), spec["folder"]
    if spec["fsdp"]:
        shard_on_cpus()
    found = {name: run_method(name, spec, rank) for name in METHODS}
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found))
    for run, resume in (("run", None), ("resumed", f"{folder}/run/checkpoint-1")):  # the optimiser has a state
        settings = {"learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 1}
        trainer = make_any("contrastive", spec["checkpoints"], None, f"{folder}/{run}", rows=16, **settings)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
    torch.distributed.barrier()
    time.sleep(0.5)  # gloo aborts a rank that leaves while another still talks
    os._exit(0)  # the destructors of its threads may wait for each other


def environment_of(launch_file):
    """The variables by which `accelerate launch` passes the settings of FSDP."""
    settings = yaml.safe_load(launch_file.read_text())["fsdp_config"]
    return {"ACCELERATE_USE_FSDP": "true"} | {key.upper(): str(value) for key, value in settings.items()}


@gathers
def test_sharded_ranks_equal_ranks_with_whole_weights(tiny_checkpoints, mllm_checkpoints, tmp_path):
    mllm = str(mllm_checkpoints("qwen2_vl")[0])
    for name, fsdp in (("whole", False), ("sharded", True)):
        (tmp_path / name).mkdir()
        spec = {"checkpoints": tiny_checkpoints, "mllm": mllm, "folder": str(tmp_path / name), "fsdp": fsdp}
        run_two_ranks("test_sharded", tmp_path / name, spec, **(environment_of(FSDP) if fsdp else {}))
    found, expected = (json.loads((tmp_path / name / "0.json").read_text()) for name in ("sharded", "whole"))
    (tmp_path / "untrained").mkdir()
    for name in METHODS:
        (losses, metrics, units), (wanted, measured, none) = found[name], expected[name]
        assert len(losses) == 2 and losses == pytest.approx(wanted, rel=1e-5) and metrics == pytest.approx(measured)
        assert none == 0 < units and (units > 5 or name not in ("contrastive", "GCL, LoRA, cached"))  # layer by layer
        whole, sharded = (load_model(tmp_path / kind / name)[0].state_dict() for kind in ("whole", "sharded"))
        assert all(torch.allclose(sharded[key], weight, atol=2e-6) for key, weight in whole.items()), name
        trainer = make_any(name.removesuffix(CACHED), tiny_checkpoints, mllm, tmp_path / "untrained", rows=4)
        trainer.save_model(tmp_path / "untrained" / name)
        before = load_model(tmp_path / "untrained" / name)[0].state_dict()
        assert max((sharded[key] - weight).abs().max().item() for key, weight in before.items()) > 1e-4, name
    resumed, whole = (load_model(tmp_path / "sharded" / run)[0].state_dict() for run in ("resumed", "run"))
    assert all(torch.equal(resumed[key], weight) for key, weight in whole.items())


def test_accelerate_reads_the_launch_files():
    known = {action.dest for action in launch_command_parser()._actions}
    config = load_config_from_file(str(FSDP))
    assert config.mixed_precision == "bf16" and config.fsdp_config["fsdp_version"] == 2
    assert known >= config.fsdp_config.keys()


@pytest.mark.parametrize(
    ("kind", "message"),
    [(DistributedType.FSDP, "fsdp_version is 1"), (DistributedType.DEEPSPEED, "DeepSpeed is not supported")],
)
def test_other_ways_to_shard_are_refused(tiny_checkpoints, kind, message):
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1))
    accelerator = SimpleNamespace(distributed_type=kind, state=state)
    with pytest.raises(ValueError, match=message):
        Sharding(accelerator, SimpleNamespace(encoder=make_encoder(tiny_checkpoints)[0]))
