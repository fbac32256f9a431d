import sys
import pytest, torch, re
from conjoin.models.mllm_retriever import MllmRetrieverModel
from trainers import tiny_puma
from tiny_training import without_dropout
FOLDER = "/tmp/golden/states"
def one(checkpoints, folder, rows=4, **arguments):
    model, processor = tiny_puma.make_student(checkpoints)
    teacher = MllmRetrieverModel.from_mllm(checkpoints)
    return tiny_puma.make_trainer("puma_stage1", model, processor, folder, tiny_puma.sentences(rows), teacher=teacher, **arguments)
def two(checkpoints, folder, rows=4, **arguments):
    model, processor = tiny_puma.make_student(checkpoints)
    return tiny_puma.make_trainer("puma_stage2", model, processor, folder, tiny_puma.Instructed(rows), **arguments)
T = {"PUMA 1": (one, {}), "PUMA 1, shared": (one, {"mode": "shared", "kind": "kl"}), "PUMA 2": (two, {})}
@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("name", T)
def test_golden(name, chunk, mllm_checkpoints, tmp_path):
    torch.manual_seed(0)
    make, own = T[name]
    trainer = make(mllm_checkpoints("qwen2_vl")[0], tmp_path, rows=8, gradient_cache_chunk_size=chunk, **own)
    without_dropout(trainer.model)
    trainer.train()
    keep = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos")
    log = [{k: v for k, v in e.items() if k not in keep} for e in trainer.state.log_history]
    from conjoin.hub import load_model
    trainer.save_model(str(tmp_path / "model"))
    state = load_model(tmp_path / "model")[0].state_dict()
    old = torch.load(f"{FOLDER}/{re.sub('[^A-Za-z0-9]+', '_', name)}-{chunk}.pt", weights_only=False)
    common = [{k: (o[k], e.get(k)) for k in o if o[k] != e.get(k)} for o, e in zip(old["log"], log, strict=True)]
    assert not any(common), common
    assert old["state"].keys() == state.keys()
    differ = {k: (old["state"][k] - state[k]).abs().max().item() for k in state if not torch.equal(old["state"][k], state[k])}
    assert not differ, list(differ.items())[:5]
