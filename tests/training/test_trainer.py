"""The trainers: what moves, what is logged, what is saved, and that a resumed run is the uninterrupted one."""

import pytest
import torch
from tiny_training import make_encoder, make_rows, make_trainer
from transformers import AutoModel

from conjoin.evaluation import best_ranks
from conjoin.training import LoraArguments, PairCollator, add_lora


def _snapshot(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def _moved(before, module):
    return {name for name, parameter in module.named_parameters() if not torch.equal(before[name], parameter)}


@pytest.mark.parametrize("method", ["contrastive", "gcl"])
@pytest.mark.parametrize("towers", ["frozen", "lora", "trained"])
def test_two_steps_move_every_trainable_parameter_and_no_frozen_one(tiny_checkpoints, tmp_path, method, towers):
    model, processor = make_encoder(tiny_checkpoints)
    if towers == "frozen":
        model.vision_model.requires_grad_(False)
        model.text_model.requires_grad_(False)
    if towers == "lora":
        add_lora(model, LoraArguments(r=2, alpha=4))
    trainer = make_trainer(method, model, processor, tmp_path, make_rows(8))
    before = _snapshot(trainer.model)
    trainer.train()
    trainable = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    moved = _moved(before, trainer.model)
    assert "loss.temperature.log_value" in moved
    assert moved <= trainable
    # A constant added to every key changes no attention weight.
    assert [name for name in trainable - moved if not name.endswith(("k_proj.bias", "key.bias"))] == []
    assert any("lora_B" in name for name in moved) == (towers == "lora")


def test_terms_are_logged_by_name(tiny_checkpoints, tmp_path):
    trainer = make_trainer("gcl", *make_encoder(tiny_checkpoints), tmp_path, make_rows(8, groups=4))
    trainer.train()
    first = trainer.state.log_history[0]
    assert first["gcl_loss"] == pytest.approx(first["loss"], abs=1e-4)
    assert first["temperature"] == pytest.approx(0.07)
    assert 0 <= first["masked_negatives"] <= 1


def test_evaluation_covers_every_row_and_equals_a_naive_one(tiny_checkpoints, tmp_path):
    model, processor = make_encoder(tiny_checkpoints)
    rows = make_rows(7, groups=6)  # 7 rows in batches of 4: the last batch is not full
    trainer = make_trainer("contrastive", model, processor, tmp_path, rows, rows, per_device_eval_batch_size=4)
    metrics = trainer.evaluate()
    batch = PairCollator(processor)([rows[i] for i in range(7)])
    ids = batch.pop("ids")
    model.eval()
    with torch.no_grad():
        image, text = model(**batch, views=("image", "text")).embeddings.chunk(2)
    for query, candidate, name in ((text, image, "text_to_image"), (image, text, "image_to_text")):
        ranks = best_ranks(query, candidate, ids, ids)
        for k in (1, 5):
            assert metrics[f"eval_{name}_hit_rate@{k}"] == pytest.approx((ranks <= k).float().mean().item())
    assert metrics["eval_mean_hit_rate@5"] == pytest.approx(
        (metrics["eval_text_to_image_hit_rate@5"] + metrics["eval_image_to_text_hit_rate@5"]) / 2
    )


def test_the_saved_model_loads_with_equal_vectors(tiny_checkpoints, tmp_path):
    model, processor = make_encoder(tiny_checkpoints)
    trainer = make_trainer("gcl", model, processor, tmp_path, make_rows(8))
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    batch = processor(["a b", {"image": make_rows(1)[0]["image"], "text": "c"}])
    reloaded = AutoModel.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        assert torch.equal(reloaded(**batch).embeddings, model.eval()(**batch).embeddings)


def test_lora_is_merged_into_what_is_saved(tiny_checkpoints, tmp_path):
    model, processor = make_encoder(tiny_checkpoints)
    add_lora(model, LoraArguments(r=2, alpha=4))
    trainer = make_trainer("gcl", model, processor, tmp_path, make_rows(8))
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    reloaded = AutoModel.from_pretrained(tmp_path / "model").eval()
    assert not any("lora" in name or "base_layer" in name for name in reloaded.state_dict())
    batch = processor([{"image": make_rows(1)[0]["image"], "text": "c"}, "a"])
    with torch.no_grad():
        difference = reloaded(**batch).embeddings - model.eval()(**batch).embeddings
    assert difference.abs().max() < 1e-5


@pytest.mark.parametrize("lora", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one(tiny_checkpoints, tmp_path, lora):
    def trainer(folder, **arguments):
        model, processor = make_encoder(tiny_checkpoints, token_dropout=0.5)
        if lora:
            add_lora(model, LoraArguments(r=2, alpha=4, dropout=0.1))
        settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine"}
        return make_trainer("gcl", model, processor, folder, make_rows(20), **settings | arguments)

    whole = trainer(tmp_path / "whole")
    whole.train()
    resumed = trainer(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    assert resumed.state.global_step == 4
    for (name, a), (_, b) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (whole, resumed)]
    assert losses[0][-2:] == losses[1][-2:]


def test_the_best_checkpoint_is_loaded(tiny_checkpoints, tmp_path):
    model, processor = make_encoder(tiny_checkpoints)
    rows = make_rows(8)
    trainer = make_trainer(
        "contrastive", model, processor, tmp_path, rows, rows, max_steps=6, learning_rate=0.05,
        eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, save_total_limit=8,
        load_best_model_at_end=True, metric_for_best_model="eval_mean_hit_rate@1", greater_is_better=True,
    )  # fmt: skip
    trainer.train()
    history = [entry["eval_mean_hit_rate@1"] for entry in trainer.state.log_history if "eval_mean_hit_rate@1" in entry]
    assert trainer.state.best_metric == max(history)
    assert trainer.evaluate()["eval_mean_hit_rate@1"] == max(history)


def test_a_stream_of_rows_trains(tiny_checkpoints, tmp_path):
    trainer = make_trainer("gcl", *make_encoder(tiny_checkpoints), tmp_path, make_rows(8).to_iterable_dataset())
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_bad_row_is_named(tiny_checkpoints, tmp_path):
    rows = [dict(row) for row in make_rows(4)]
    rows[2]["text"] = "   "
    trainer = make_trainer("gcl", *make_encoder(tiny_checkpoints), tmp_path, rows)
    with pytest.raises(ValueError, match=r"id 'row2'.*only white space"):
        trainer.train()


def test_rows_of_one_group_share_an_id(tiny_checkpoints):
    _, processor = make_encoder(tiny_checkpoints)
    ids = PairCollator(processor)([make_rows(5, groups=3)[i] for i in range(5)])["ids"]
    assert ids[0] == ids[3]
    assert len(ids.unique()) == 3


def test_a_missing_modality_is_left_out_of_gcl_and_refused_by_info_nce(tiny_checkpoints, tmp_path):
    rows = [dict(row) for row in make_rows(8)]
    for row in rows[:2]:
        row["image"] = None
    for method in ("gcl", "contrastive"):
        model, processor = make_encoder(tiny_checkpoints)
        trainer = make_trainer(method, model, processor, tmp_path, rows, per_device_train_batch_size=8, max_steps=1)
        if method == "contrastive":
            with pytest.raises(ValueError, match="needs image and text in every row"):
                trainer.train()
        else:
            assert 0 < trainer.train().training_loss < 10
