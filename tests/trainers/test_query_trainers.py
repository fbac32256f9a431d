"""Queries and candidates: batches, epochs, names of candidates, evaluation."""

import logging

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from transformers.utils import logging as library_logging

from conjoin.data import RetrievalBatchSampler, RetrievalCollator
from tiny_puma import Instructed, make_student, make_trainer, sentences


@pytest.fixture(scope="module")
def folder(mllm_checkpoints):
    return mllm_checkpoints("qwen2_vl")[0]


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
    plain = make_trainer("puma_stage2", model, processor, tmp_path, rows, mask_false_negatives=False)
    sizes = [len(batch) for batch in plain.get_train_dataloader().batch_sampler]
    assert sum(sizes) == 24  # nothing moves or is skipped, whatever the positives are


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
    collator = RetrievalCollator(processor)
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
