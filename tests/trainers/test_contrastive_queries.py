"""Queries with candidates: by every method that takes them, their batches and epochs, the loss on them, evaluation."""

import json
import logging

import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import TrainerCallback
from transformers.utils import logging as library_logging

from conjoin.cli.main import main
from conjoin.data import QueryTable, RetrievalBatchSampler
from conjoin.losses import info_nce, soft_labels
from tiny_puma import Instructed, make_student, make_trainer as make_puma, sentences
from tiny_training import hit_rates, make_encoder, make_trainer, small_run, without_dropout, write_recipe


@pytest.fixture
def rows(tmp_path):
    """Two files of eight rows: texts that ask for images, and images that ask for texts."""
    for number in range(9):
        Image.new("RGB", (16, 16), (25 * number, 250 - 19 * number, 90 * number % 256)).save(
            tmp_path / f"{number}.png"
        )
    files = {"asked.jsonl": [], "shown.jsonl": []}
    for number in range(8):
        item = {"image": f"{number}.png"}
        files["asked.jsonl"].append({"query": f"box {number}", "positive": item, "negatives": [{"image": "8.png"}]})
        files["shown.jsonl"].append({"query": item | {"text": "name"}, "positive": [f"box {number}", f"b {number}"]})
    for name, lines in files.items():
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


@pytest.fixture
def train(rows, tiny_checkpoints):
    """Train on queries by `conjoin train`, and return the log."""

    def run(trainer, *words, model=None, **training):
        data = {"dataset_format": "queries", "hard_negatives": 1}
        data |= {} if model is None else {"model_type": None, "model_name_or_path": model, "model_init_kwargs": {}}
        path = write_recipe(rows, tiny_checkpoints, trainer, rows / "asked.jsonl", **data)
        assert main(["train", str(path), *small_run(rows / "out", **training), *words]) == 0
        return json.loads((rows / "out" / "recipe.json").read_text())["log"]

    return run


@pytest.mark.parametrize("trainer", ["contrastive", "puma_stage2"])
def test_several_sources_train_from_the_command_line(train, rows, trainer):
    sources = [
        {"path": str(rows / "asked.jsonl"), "weight": 2, "instruction": "find the picture"},
        {"path": str(rows / "shown.jsonl"), "name": "shown"},
    ]
    words = ["--dataset_mixture", json.dumps(sources), "--dataset_test_name", str(rows / "asked.jsonl")]
    log = train(trainer, *words, one_dataset_per_batch=True, eval_strategy="steps", eval_steps=2)
    assert sum("loss" in entry for entry in log) == 2
    assert any("eval_query_to_candidate_hit_rate@1" in entry for entry in log)


def test_coral_trains_on_rows_of_ones_own(train, mllm_checkpoints):
    log = train("coral", "--instruction", "find the picture", model=mllm_checkpoints("qwen2_vl")[0], max_steps=1)
    assert {"contrastive_loss", "reg_vision_loss"} <= log[0].keys()


def test_the_loss_is_info_nce_with_a_learned_temperature(rows, tiny_checkpoints):
    model, processor = make_encoder(tiny_checkpoints)
    without_dropout(model)
    table = QueryTable(rows / "asked.jsonl", hard_negatives=1)
    trainer = make_trainer("queries", model, processor, rows / "out", table, temperature=0.1)
    batch = trainer.data_collator([table[index] for index in range(4)])
    terms = trainer.model(**batch)
    parts = [model(**batch[part]).pooler_output for part in ("queries", "positives", "negatives")]
    candidates = torch.cat([parts[1], parts[2][:1]])  # the four negatives are one item, but never a positive
    torch.testing.assert_close(terms["contrastive_loss"], info_nce(parts[0], torch.cat(parts[1:]), 0.1))
    assert terms["contrastive_loss"] > info_nce(parts[0], candidates, 0.1)
    terms["contrastive_loss"].backward()
    assert all(parameter.grad.abs() > 0 for parameter in trainer.loss.parameters())


def test_every_positive_of_a_row_is_right_in_evaluation(tmp_path, tiny_checkpoints):
    pairs = [("a", ["z z", "a"]), ("a", "a"), ("q", "q")]
    lines = [{"query": query, "positive": positive} for query, positive in pairs]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = QueryTable(tmp_path / "rows.jsonl")
    model, processor = make_encoder(tiny_checkpoints)
    for seed in range(4):  # in some the first row draws the text that is not its query
        trainer = make_trainer("queries", model, processor, tmp_path, table, table, seed=seed)
        assert trainer.evaluate()["eval_query_to_candidate_hit_rate@1"] == 1


@pytest.fixture(scope="module")
def folder(mllm_checkpoints):
    return mllm_checkpoints("qwen2_vl")[0]


def test_batches_are_of_one_dataset_without_common_positives(folder, tmp_path):
    model, processor = make_student(folder)
    rows = [Instructed(24, negatives=0)[i] for i in range(24)]
    for row in rows[::3]:
        row["positive_id"] = "the same"
    trainer = make_puma("puma_stage2", model, processor, tmp_path, rows, one_dataset_per_batch=True)
    loader = trainer.get_train_dataloader()
    assert isinstance(loader.batch_sampler, RetrievalBatchSampler)
    batches = list(loader.batch_sampler)
    assert batches
    for batch in batches:
        assert len({rows[i]["dataset"] for i in batch}) == 1
        assert sum(rows[i]["positive_id"] == "the same" for i in batch) <= 1
    plain = make_puma("puma_stage2", model, processor, tmp_path, rows, mask_false_negatives=False)
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
        trainer = make_puma("puma_stage2", model, processor, tmp_path, Instructed(12), max_steps=6)
        trainer.add_callback(Seen())
        trainer.train()
    library_logging.disable_propagation()
    assert [seen[:2] for seen in found] == [(epoch, epoch) for epoch in (0, 0, 0, 1, 1, 1)]
    assert found[0][2] != found[3][2]
    assert "callbacks" not in caplog.text  # the library warns of two of one kind


def test_evaluation_ranks_queries_among_all_different_candidates(folder, tmp_path):
    model, processor = make_student(folder)
    rows = Dataset.from_list(
        [{"query": f"q{i}", "positive": f"c{i % 5}", "negatives": ["never seen"]} for i in range(7)]
    )
    trainer = make_puma("puma_stage2", model, processor, tmp_path, sentences(8), rows, per_device_eval_batch_size=3)
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
    drawn = [hit_rates(make_puma("puma_stage2", model, processor, tmp_path, None, Instructed(6))) for _ in range(2)]
    assert drawn[0] == drawn[1]


def test_false_negatives_are_left_out_and_a_judge_is_followed(tmp_path, tiny_checkpoints):
    rows = [
        {"query": f"q {i}", "positive": f"p {i}", "negatives": [f"n {i}", f"m {i}"], "scores": [3.0, i / 4, -1.0],
         "brand": "a" if i < 2 else None, "colour": i % 3}
        for i in range(6)
    ]  # fmt: skip

    def terms(chosen=rows, **arguments):
        model, processor = make_encoder(tiny_checkpoints)
        without_dropout(model)
        trainer = make_trainer("queries", model, processor, tmp_path, Dataset.from_list(chosen), **arguments)
        batch, embeddings = trainer.data_collator(chosen), {}
        with torch.no_grad():
            embeddings |= {name: value.double() for name, value in trainer.embed(model.eval(), batch).items()}
        return embeddings, trainer.loss_terms(embeddings, batch), trainer

    arguments = {"shared_columns": ["brand", "colour"], "negative_margin": -0.001, "soft_label_weight": 0.5}
    embeddings, found, trainer = terms(**arguments, score_temperature=2.0)
    candidates = torch.cat([embeddings["positives"], embeddings["negatives"]])
    unlike = list(range(100, 112))
    labels = [[*range(6), *unlike], [0, 0, 2, 3, 4, 5, *unlike], [0, 1, 2, 0, 1, 2, *unlike]]
    ids = torch.tensor(labels).T
    contrast = info_nce(embeddings["queries"], candidates, 0.07, candidate_ids=ids, margin=-0.001)
    plain = info_nce(embeddings["queries"], candidates, 0.07)
    assert found["contrastive_loss"].item() == pytest.approx(contrast.item(), abs=1e-6) != plain.item()
    own = torch.cat([embeddings["positives"][:, None], embeddings["negatives"].unflatten(0, (6, 2))], dim=1)
    judged = soft_labels(embeddings["queries"], own, torch.tensor([row["scores"] for row in rows]), 0.07, 2.0)
    assert found["soft_label_loss"].item() == pytest.approx(0.5 * judged.item(), abs=1e-6)
    trainer.train()
    assert "soft_label_loss" in trainer.state.log_history[0]
    _, off, _ = terms()
    assert off["contrastive_loss"].item() == pytest.approx(plain.item(), abs=1e-6) and len(off) == 2
    bare = [{name: row[name] for name in ("query", "positive")} for row in rows]
    with pytest.raises(ValueError, match="soft labels need rows with negatives and their `scores`"):
        terms(bare, soft_label_weight=1.0)
    with pytest.raises(ValueError, match="no column 'brand'; the columns are 'query', 'positive'"):
        terms(bare, shared_columns=["brand"])
