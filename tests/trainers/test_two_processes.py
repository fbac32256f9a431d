"""Two ranks take the step that one process takes on the full batch."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conjoin.trainers.contrastive import ContrastiveConfig, QueryContrastiveTrainer
from conjoin.trainers.gradient_cache import average_gradients
from tiny_training import make_encoder, make_rows, make_trainer, without_dropout
from two_ranks import run_two_ranks

pytestmark = pytest.mark.slow

CASES = [
    *(("contrastive", 0, 1, 0), ("contrastive", 2, 1, 0), ("gcl", 0, 1, 0), ("gcl", 2, 1, 0), ("gcl", 2, 2, 0)),
    *(("contrastive", 0, 1, 10), ("gcl", 3, 2, 12)),
]
"""The method, the rows of a chunk of the gradient cache (0: any), the accumulated batches, the tokens of a chunk."""
LOGGED = {
    "contrastive": ("contrastive_loss", "temperature", "masked_negatives"),
    "gcl": ("gcl_loss", "temperature", "masked_negatives"),
}


def case_name(case):
    return "-".join(map(str, case))


def run_case(checkpoints, folder, method, chunk_size, accumulation, chunk_tokens, batch_size):
    """Weights, logs and metrics of two float64 SGD steps without dropout."""
    model, processor = make_encoder(checkpoints)
    without_dropout(model)
    trainer = make_trainer(
        method, model, processor, folder, make_rows(32, groups=15), per_device_train_batch_size=batch_size,
        gradient_cache_chunk_size=chunk_size, gradient_cache_chunk_tokens=chunk_tokens, optim="sgd",
        max_grad_norm=0.0, train_sampling_strategy="sequential",
        gradient_accumulation_steps=accumulation, eval_rows=make_rows(11, groups=9), per_device_eval_batch_size=3,
    )  # fmt: skip
    trainer.model.double()
    trainer.train()
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    log = [{key: entry[key] for key in LOGGED[method]} for entry in trainer.state.log_history[:-1]]
    return weights, {"world_size": trainer.args.world_size, "log": log, "metrics": trainer.evaluate()}


def query_steps(checkpoints, folder, resume=None):
    """The ids of the candidates of each step of a run on queries, of three steps an epoch."""
    model, processor = make_encoder(checkpoints)
    rows = [{"query": f"q {i}", "positive": f"p {i}"} for i in range(24)]
    trainer = make_trainer(
        "queries", model, processor, folder, rows, methods={"queries": (ContrastiveConfig, QueryContrastiveTrainer)},
        max_steps=6, save_strategy="steps", save_steps=4,
    )  # fmt: skip
    steps, plain = [], trainer.training_step

    def training_step(model, inputs, count=None):
        steps.append(inputs["ids"].tolist())
        return plain(model, inputs, count)

    trainer.training_step = training_step
    trainer.train(resume_from_checkpoint=resume)
    return steps


def average_some():
    """Gradients after averaging: of a parameter that one rank used, that both did, that none did."""
    layers = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(3))
    for layer in layers[torch.distributed.get_rank() : 2]:
        layer.weight.grad = torch.full((1, 1), 4.0)
    average_gradients(layers)
    return [None if layer.weight.grad is None else layer.weight.grad.item() for layer in layers]


def main(spec):
    """What each rank runs."""
    rank = int(os.environ["RANK"])
    for case in CASES:
        weights, found = run_case(spec["checkpoints"], spec["folder"], *case, batch_size=4)
        if rank == 0:
            save_file(weights, f"{spec['folder']}/{case_name(case)}.safetensors")
        Path(f"{spec['folder']}/{case_name(case)}-{rank}.json").write_text(json.dumps(found))
    whole = query_steps(spec["checkpoints"], f"{spec['folder']}/queries")
    resumed = query_steps(spec["checkpoints"], f"{spec['folder']}/other", f"{spec['folder']}/queries/checkpoint-4")
    Path(f"{spec['folder']}/queries-{rank}.json").write_text(json.dumps([whole, resumed]))
    Path(f"{spec['folder']}/average-{rank}.json").write_text(json.dumps(average_some()))
    torch.distributed.barrier()  # gloo aborts a rank that leaves while another still talks
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tiny_checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_two_ranks("test_two_processes", folder, {"checkpoints": tiny_checkpoints, "folder": str(folder)})
    return folder


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_two_ranks_equal_one_process(two_ranks, tiny_checkpoints, tmp_path, case):
    ranks = [json.loads((two_ranks / f"{case_name(case)}-{rank}.json").read_text()) for rank in range(2)]
    assert [rank["world_size"] for rank in ranks] == [2, 2]
    method, _, accumulation, _ = case
    expected, alone = run_case(tiny_checkpoints, tmp_path, method, 0, accumulation, 0, batch_size=8)
    assert alone["world_size"] == 1
    untrained, _ = make_encoder(tiny_checkpoints)
    start = untrained.vl_encoder.cls_token.double()
    assert (expected["encoder.vl_encoder.cls_token"] - start).abs().max() > 1e-5
    found = load_file(two_ranks / f"{case_name(case)}.safetensors")
    for name, weight in expected.items():
        assert torch.allclose(found[name], weight, atol=1e-9), name
    for rank in ranks:  # every rank knows the mean over ranks, and the metrics over the whole evaluation set
        assert len(rank["log"]) == 2
        for entry, wanted in zip(rank["log"], alone["log"], strict=True):
            assert entry == pytest.approx(wanted, abs=1e-5)
        assert rank["metrics"] == pytest.approx(alone["metrics"])


def test_a_parameter_that_no_rank_used_keeps_no_gradient(two_ranks):
    for rank in range(2):
        assert json.loads((two_ranks / f"average-{rank}.json").read_text()) == [2.0, 4.0, None]


def test_a_resumed_run_on_queries_has_the_batches_of_the_whole_run(two_ranks):
    for rank in range(2):
        whole, resumed = json.loads((two_ranks / f"queries-{rank}.json").read_text())
        assert len(whole) == 6 and resumed == whole[4:]
