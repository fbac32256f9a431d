"""Stage 2 of PUMA: the loss over instructed queries, its course, its batches, its evaluation."""

import logging
import math

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from tiny_puma import Instructed, make_student, make_trainer, sentences
from transformers import TrainerCallback
from transformers.utils import logging as library_logging

from conjoin.data import RetrievalBatchSampler, RetrievalCollator
from conjoin.data.training_rows import NamedCandidates, QueryRows
from conjoin.losses import info_nce
from conjoin.methods.puma import PumaStage2Config
from conjoin.methods.puma.stage2 import PumaStage2Objective


@pytest.fixture(scope="module")
def folder(mllm_checkpoints):
    return mllm_checkpoints("qwen2_vl")[0]


def make_config(tmp_path, **arguments):
    return PumaStage2Config(output_dir=str(tmp_path), report_to="none", use_cpu=True, **arguments)


def make_batch(processor, count=6, **rows):
    collator = NamedCandidates(RetrievalCollator(processor))
    data = QueryRows(Instructed(count, **rows))
    return collator([data[i] for i in range(count)])


def test_the_loss_is_a_loop_over_queries(folder, tmp_path):
    model, processor = make_student(folder)
    objective = PumaStage2Objective(model, make_config(tmp_path, temperature=0.1, decay=0.5)).eval()
    objective.progress = 0.4
    batch = make_batch(processor)
    with torch.no_grad():
        terms = objective(**batch)
        parts = [
            F.normalize(model(**batch[part]).pooler_output, dim=1) for part in ("queries", "positives", "negatives")
        ]
    modality = batch["candidate_modality"]
    hard = 0.1 * math.exp(-0.5 * 0.4)
    candidates = torch.cat(parts[1:])
    rows = []
    for i, query in enumerate(parts[0]):
        temperatures = torch.where(modality == modality[i], hard, 0.1)
        rows.append(F.cross_entropy((candidates @ query / temperatures)[None], torch.tensor([i])))
    torch.testing.assert_close(terms["mac_loss"], torch.stack(rows).mean(), rtol=1e-5, atol=1e-6)
    assert terms["hard_temperature"] == pytest.approx(hard)
    assert terms["temperature"] == pytest.approx(0.1)
    assert 0 < terms["same_modality_rate"] < 1


def test_without_decay_it_is_info_nce_and_reversed_it_swaps_the_temperatures(folder, tmp_path):
    model, processor = make_student(folder)
    batch = make_batch(processor)

    def terms(**arguments):
        objective = PumaStage2Objective(model, make_config(tmp_path, temperature=0.1, **arguments)).eval()
        objective.progress = 1.0
        with torch.no_grad():
            return objective(**batch)

    with torch.no_grad():
        queries, positives, negatives = (
            model(**batch[p]).pooler_output for p in ("queries", "positives", "negatives")
        )
    expected = info_nce(queries, torch.cat([positives, negatives]), 0.1)
    torch.testing.assert_close(terms(decay=0.0)["mac_loss"], expected, rtol=1e-5, atol=1e-6)
    plain, reverse = terms(decay=0.7), terms(decay=0.7, reverse=True)
    decayed = 0.1 * math.exp(-0.7)
    assert [plain[name].item() for name in ("temperature", "hard_temperature")] == pytest.approx([0.1, decayed])
    assert [reverse[name].item() for name in ("temperature", "hard_temperature")] == pytest.approx([decayed, 0.1])
    assert len({plain["mac_loss"].item(), reverse["mac_loss"].item(), expected.item()}) == 3


def test_the_temperature_falls(folder, tmp_path):
    model, processor = make_student(folder)
    trainer = make_trainer(
        "puma_stage2", model, processor, tmp_path, Instructed(16), max_steps=4, decay=0.5, temperature=0.05,
        gradient_cache_chunk_size=3, dataloader_num_workers=2, activation_checkpointing=True,
    )  # fmt: skip
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "mac_loss" in entry]
    assert [entry["hard_temperature"] for entry in log] == pytest.approx(
        [0.05 * math.exp(-0.5 * step / 4) for step in range(4)]
    )


def test_batches_are_of_one_dataset_without_common_positives(folder, tmp_path):
    model, processor = make_student(folder)
    rows = [Instructed(24, negatives=0)[i] for i in range(24)]
    for row in rows[::3]:
        row["positive_id"] = "the same"
    trainer = make_trainer("puma_stage2", model, processor, tmp_path, rows, one_dataset_per_batch=True)
    loader = trainer.get_train_dataloader()
    assert isinstance(loader.batch_sampler, RetrievalBatchSampler)
    batches = list(loader.batch_sampler)
    assert batches
    for batch in batches:
        assert len({rows[i]["dataset"] for i in batch}) == 1
        assert sum(rows[i]["positive_id"] == "the same" for i in batch) <= 1


def test_each_epoch_has_its_own_batches_and_draws(folder, tmp_path, caplog):
    found = []

    class Seen(TrainerCallback):
        def on_step_begin(self, *_args, train_dataloader, **_kwargs):
            sampler, rows = train_dataloader.batch_sampler, train_dataloader.dataset
            found.append((sampler.epoch, rows.epoch, next(iter(sampler))))

    model, processor = make_student(folder)
    library_logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        trainer = make_trainer("puma_stage2", model, processor, tmp_path, Instructed(12), max_steps=6)
        trainer.add_callback(Seen())
        trainer.train()
    library_logging.disable_propagation()
    assert [seen[:2] for seen in found] == [(epoch, epoch) for epoch in (0, 0, 0, 1, 1, 1)]
    assert found[0][2] != found[3][2]
    assert "callbacks" not in caplog.text  # the library warns of two of one kind


def test_false_negatives_are_told_by_id_or_text(folder):
    _, processor = make_student(folder)
    collator = NamedCandidates(RetrievalCollator(processor))
    rows = [dict(row) for row in sentences(3)]
    rows[2]["negatives"] = [rows[0]["positive"]]
    ids = collator(rows)["ids"]
    assert ids.shape == (6,)
    assert ids[5] == ids[0]
    assert len(ids.unique()) == 5
    assert "ids" not in collator([{"query": "a", "positive": {"text": "b"}}])


def test_evaluation_ranks_queries_among_all_different_candidates(folder, tmp_path):
    model, processor = make_student(folder)
    rows = Dataset.from_list(
        [{"query": f"q{i}", "positive": f"c{i % 5}", "negatives": ["never seen"]} for i in range(7)]
    )
    trainer = make_trainer("puma_stage2", model, processor, tmp_path, sentences(8), rows, per_device_eval_batch_size=3)
    metrics = trainer.evaluate()
    with torch.no_grad():
        scores = model.eval()(**processor([f"q{i}" for i in range(7)])).embeddings
        scores = scores @ model(**processor([f"c{i}" for i in range(5)])).embeddings.T
    own = scores[torch.arange(7), torch.arange(7) % 5]
    ranks = (scores >= own[:, None] - 1e-6).sum(1)
    for k in (1, 5, 10):
        hit_rate = (ranks <= k).float().mean().item()
        assert metrics[f"eval_query_to_candidate_hit_rate@{k}"] == pytest.approx(hit_rate)
    assert metrics["eval_query_to_candidate_hit_rate@5"] == 1
    drawn = [make_trainer("puma_stage2", model, processor, tmp_path, None, Instructed(6)).evaluate() for _ in range(2)]
    assert drawn[0] == drawn[1]


def test_arguments_and_rows_are_checked(folder, tmp_path):
    for arguments, message in (
        ({"decay": -1.0}, "decay=-1.0 must not be negative"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"temperature": 0.0001, "round_to": 2}, "rounded to 2 decimals"),
    ):
        with pytest.raises(ValueError, match=message):
            make_config(tmp_path, **arguments)
    model, processor = make_student(folder)
    rows = sentences(8).remove_columns("target_modality")
    with pytest.raises(ValueError, match="rows with 'target_modality'"):
        make_trainer("puma_stage2", model, processor, tmp_path, rows).train()
    with pytest.raises(ValueError, match="needs rows with a 'dataset' column"):
        make_trainer("puma_stage2", model, processor, tmp_path, sentences(8), one_dataset_per_batch=True).train()
