"""Two ranks take the step that one process takes on the full batch."""

import functools
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conjoin.hub import load_trainable
from conjoin.trainers import solar
from conjoin.trainers.gradient_cache import average_gradients
from tiny_any import save_any
from tiny_solar import everything_but_the_first
from tiny_trainers import make_any
from tiny_training import hit_rates, make_encoder, make_rows, make_trainer, without_dropout
from two_ranks import run_two_ranks

pytestmark = pytest.mark.slow

METHODS = ("PUMA 1", "PUMA 2", "SOLAR 1", "SOLAR 2", "Coral, partial")
"""Of `tiny_trainers.TRAINERS`."""
ANY = "any model"
"""GCL of a family that sentence-transformers reads."""
CASES = [
    *(("contrastive", 0, 1, 10), ("gcl", 0, 1, 0), ("gcl", 2, 1, 0), ("gcl", 3, 2, 12), ("gcl", 0, 1, 0, "stream")),
    *((method, chunk_size, 1, 0) for method in (ANY, *METHODS) for chunk_size in (0, 2)),
]
"""The method, rows of a chunk (0: any), accumulated batches, tokens of a chunk, and whether the rows stream."""
ROWS = 4
"""Of a batch of each of two ranks. SOLAR's statistics are those of a rank, so one process takes such chunks."""


def case_name(case):
    return "-".join(map(str, case))


def run_case(checkpoints, folder, method, chunk_size, accumulation, chunk_tokens, kind=None, *, batch_size):
    """Weights, the largest change of one, logs and metrics of two float64 SGD steps without dropout."""
    settings = {
        "per_device_train_batch_size": batch_size, "gradient_cache_chunk_size": chunk_size, "optim": "sgd",
        "gradient_cache_chunk_tokens": chunk_tokens, "max_grad_norm": 0.0, "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": accumulation, "train_sampling_strategy": "sequential",
    }  # fmt: skip
    if method in METHODS:
        more = {"decoded_rows": 3} if "Coral" in method else {}
        trainer = make_any(method, checkpoints, checkpoints["qwen2_vl"], folder, rows=16, **more, **settings)
        if isinstance(teacher := getattr(trainer, "teacher", None), torch.nn.Module):  # not a submodule
            teacher.double()
        solar.construct_samples = everything_but_the_first  # which is drawn
    else:
        model, processor = load_trainable(checkpoints["gemma3"]) if method == ANY else make_encoder(checkpoints)
        without_dropout(model)
        rows, eval_rows = make_rows(32, groups=15), make_rows(11, groups=9)
        if kind == "stream":  # the batches of the ranks differ in their padding
            texts = [text + " b" * (number % 7) for number, text in enumerate(rows["text"])]
            rows = rows.remove_columns("text").add_column("text", texts).to_iterable_dataset()
        method = "gcl" if method == ANY else method
        trainer = make_trainer(method, model, processor, folder, rows, eval_rows, **settings)
    trainer.model.double()
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    if trainer.eval_dataset:
        trainer.evaluate()  # before training it changes nothing
    trainer.train()
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    moved = max((weights[name] - value).abs().max().item() for name, value in start.items())
    known = ("temperature", "masked_negatives")
    log = [
        [value for key, value in sorted(entry.items()) if key.endswith("_loss") or key in known]
        for entry in trainer.state.log_history[:-1]
    ]
    return weights, moved, [trainer.args.world_size, log, hit_rates(trainer) if trainer.eval_dataset else {}]


def query_steps(checkpoints, folder, resume=None):
    """The ids of the candidates of each step of a run on queries, of three steps an epoch."""
    model, processor = make_encoder(checkpoints)
    rows = [{"query": f"q {i}", "positive": f"p {i}"} for i in range(24)]
    trainer = make_trainer("queries", model, processor, folder, rows, max_steps=6, save_strategy="steps", save_steps=4)
    steps, plain = [], trainer.training_step
    trainer.training_step = lambda *given: steps.append(given[1]["ids"].tolist()) or plain(*given)
    trainer.train(resume_from_checkpoint=resume)
    return steps


class Layers(torch.nn.ModuleList):
    """Layers with the forward without inputs of a `Step`."""

    def forward(self):
        return next(each.sum() * 0 for each in self.parameters() if each.grad is not None)


def average_some():
    """Gradients after averaging: of a parameter that one rank used, that both did, that none did."""
    layers = Layers(torch.nn.Linear(1, 1, bias=False) for _ in range(3))
    model = torch.nn.parallel.DistributedDataParallel(layers, find_unused_parameters=True)
    for _ in range(2):
        layers.zero_grad()
        with model.no_sync():
            for layer in layers[torch.distributed.get_rank() : 2]:
                (4 * layer.weight).sum().backward()
        average_gradients(model)
    return [None if layer.weight.grad is None else layer.weight.grad.item() for layer in layers]


def main(checkpoints, folder):
    """What each rank runs."""
    rank, found = int(os.environ["RANK"]), {}
    for name, case in zip(map(case_name, CASES), CASES, strict=True):
        weights, _, found[name] = run_case(checkpoints, folder, *case, batch_size=ROWS)
        if rank == 0:
            save_file(weights, f"{folder}/{name}.safetensors")
    found["whole"] = query_steps(checkpoints, f"{folder}/queries")
    found["resumed"] = query_steps(checkpoints, f"{folder}/other", f"{folder}/queries/checkpoint-4")
    found["average"] = average_some()
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()  # gloo aborts a rank that leaves while another still talks
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def checkpoints(tiny_checkpoints, mllm_checkpoints, tmp_path_factory):
    gemma = tmp_path_factory.mktemp("gemma3")
    save_any("gemma3", gemma)
    return tiny_checkpoints | {"qwen2_vl": mllm_checkpoints("qwen2_vl")[0], "gemma3": str(gemma)}


@pytest.fixture(scope="module")
def folder(checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_two_ranks("test_two_processes", folder, checkpoints, str(folder))
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def alone(checkpoints, tmp_path_factory):
    """What one process makes of a case."""
    return functools.cache(
        lambda *case: run_case(checkpoints, tmp_path_factory.mktemp("alone"), *case, batch_size=2 * ROWS)
    )


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_two_ranks_equal_one_process(folder, ranks, alone, case, monkeypatch):
    method, chunk_size, accumulation, _, *kind = case
    chunk_size = (chunk_size or ROWS) if "SOLAR" in method else 0
    monkeypatch.setattr(solar, "construct_samples", everything_but_the_first)
    expected, moved, (processes, logs, metrics) = alone(method, chunk_size, accumulation, 0, *kind)
    assert moved > 1e-4 and processes == 1
    found = load_file(folder / f"{case_name(case)}.safetensors")
    for name, weight in expected.items():
        assert torch.allclose(found[name], weight, atol=1e-6 if method == ANY else 1e-9), (
            name
        )  # its vectors are float32
    for rank in ranks:  # every rank knows the mean over ranks, and the metrics over the whole evaluation set
        assert rank[case_name(case)] == [2, [pytest.approx(log, abs=1e-5) for log in logs], pytest.approx(metrics)]


def test_a_parameter_that_no_rank_used_keeps_no_gradient(ranks):
    assert [rank["average"] for rank in ranks] == [[2.0, 4.0, None]] * 2


def test_a_resumed_run_on_queries_has_the_batches_of_the_whole_run(ranks):
    for rank in ranks:
        assert len(rank["whole"]) == 6 and rank["resumed"] == rank["whole"][4:]
