"""Writes or compares logs and weights after two steps of every variant: GOLDEN=write|check."""
import os, re
import pytest, torch
from tiny_trainers import TRAINERS, make_any

FOLDER = "/tmp/golden/states"

@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("name", TRAINERS)
def test_golden(name, chunk, tiny_checkpoints, mllm_checkpoints, tmp_path):
    torch.manual_seed(0)
    trainer = make_any(name, tiny_checkpoints, mllm_checkpoints("qwen2_vl")[0], tmp_path, rows=8, gradient_cache_chunk_size=chunk)
    trainer.train()
    keep = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos")
    log = [{k: v for k, v in e.items() if k not in keep} for e in trainer.state.log_history]
    from conjoin.hub import load_model
    trainer.save_model(str(tmp_path / "model"))
    state = load_model(tmp_path / "model")[0].state_dict()
    path = f"{FOLDER}/{re.sub('[^A-Za-z0-9]+', '_', name)}-{chunk}.pt"
    if os.environ["GOLDEN"] == "write":
        os.makedirs(FOLDER, exist_ok=True)
        torch.save({"log": log, "state": state}, path)
        return
    old = torch.load(path, weights_only=False)
    common = [{k: (old_e[k], e.get(k)) for k in old_e if old_e[k] != e.get(k)} for old_e, e in zip(old["log"], log, strict=True)]
    assert not any(common), common
    assert old["state"].keys() == state.keys()
    differ = {k: (old["state"][k] - state[k]).abs().max().item() for k in state if not torch.equal(old["state"][k], state[k])}
    assert not differ, list(differ.items())[:5]
