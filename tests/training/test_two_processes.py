"""Two ranks take the step that one process takes on the full batch."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_training import make_encoder, make_rows, make_trainer

CASES = [("contrastive", 0), ("contrastive", 2), ("gcl", 0), ("gcl", 2)]


def run_case(checkpoints, folder, method, chunk_size, batch_size):
    """Weights after two float64 SGD steps without dropout."""
    model, processor = make_encoder(checkpoints)
    model = model.double()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    trainer = make_trainer(
        method, model, processor, folder, make_rows(16, groups=15), per_device_train_batch_size=batch_size,
        gradient_cache_chunk_size=chunk_size, optim="sgd", max_grad_norm=0.0, train_sampling_strategy="sequential",
        ddp_find_unused_parameters=True,
    )  # fmt: skip
    trainer.model.double()
    trainer.train()
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def main(spec):
    """What each rank runs."""
    from safetensors.torch import save_file

    for method, chunk_size in CASES:
        weights = run_case(spec["checkpoints"], spec["folder"], method, chunk_size, batch_size=4)
        assert torch.distributed.get_world_size() == 2
        if torch.distributed.get_rank() == 0:
            save_file(weights, f"{spec['folder']}/{method}-{chunk_size}.safetensors")


@pytest.fixture(scope="module")
def two_ranks(tiny_checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spec = json.dumps({"checkpoints": tiny_checkpoints, "folder": str(folder)})
    code = f"import json\nfrom test_two_processes import main\nmain(json.loads({spec!r}))"
    environment = os.environ | {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(Path(__file__).parent), "LOCAL_WORLD_SIZE": "2",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in ranks:
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output[-3000:]
    return folder


@pytest.mark.parametrize(("method", "chunk_size"), CASES)
def test_two_ranks_equal_one_process(two_ranks, tiny_checkpoints, tmp_path, method, chunk_size):
    from safetensors.torch import load_file

    found = load_file(two_ranks / f"{method}-{chunk_size}.safetensors")
    expected = run_case(tiny_checkpoints, tmp_path, method, 0, batch_size=8)
    untrained, _ = make_encoder(tiny_checkpoints)
    start = untrained.vl_encoder.cls_token.double()
    assert (expected["encoder.vl_encoder.cls_token"] - start).abs().max() > 1e-5
    for name, weight in expected.items():
        assert torch.allclose(found[name], weight, atol=1e-9), name
