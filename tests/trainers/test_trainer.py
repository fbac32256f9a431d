"""The trainers: what moves, what is logged, what is saved, and that a resumed run is the uninterrupted one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from conjoin.data import PairCollator
from conjoin.evaluation import best_ranks
from conjoin.methods.contrastive import ContrastiveConfig
from conjoin.training import LoraArguments, RetrievalTrainer, add_lora
from conjoin.training.lora import merge_lora
from tiny_training import SETTINGS, make_encoder, make_rows, make_trainer, without_dropout


def _snapshot(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def test_terms_are_logged_by_name(tiny_checkpoints, tmp_path):
    trainer = make_trainer("gcl", *make_encoder(tiny_checkpoints), tmp_path, make_rows(8, groups=4))
    trainer.train()
    first, second, _ = trainer.state.log_history
    assert first["gcl_loss"] == pytest.approx(first["loss"], abs=1e-4)
    assert first["temperature"] == pytest.approx(0.07) and second["temperature"] != first["temperature"]
    assert 0 <= first["masked_negatives"] <= 1


class CosineLoss(torch.nn.Module):
    def forward(self, image, text, ids):
        return 1 - torch.nn.functional.cosine_similarity(image, text).mean()


@pytest.mark.parametrize("chunk_size", [0, 2])
def test_a_loss_may_return_a_tensor(tiny_checkpoints, tmp_path, chunk_size):
    model, processor = make_encoder(tiny_checkpoints)
    args = ContrastiveConfig(str(tmp_path), **SETTINGS, gradient_cache_chunk_size=chunk_size)
    trainer = RetrievalTrainer(model, args, CosineLoss(), train_dataset=make_rows(8), processing_class=processor)
    trainer.train()
    entries = trainer.state.log_history[:2]
    assert all(entry["cosine_loss"] == pytest.approx(entry["loss"], abs=1e-4) for entry in entries)
    assert entries[1]["loss"] < entries[0]["loss"]


def test_evaluation_covers_every_row_and_equals_a_naive_one(tiny_checkpoints, tmp_path):
    model, processor = make_encoder(tiny_checkpoints)
    rows = make_rows(7, groups=6)  # 7 rows in batches of 4: the last batch is not full
    trainer = make_trainer("contrastive", model, processor, tmp_path, rows, rows, per_device_eval_batch_size=4)
    metrics = trainer.evaluate()
    batch = PairCollator(processor)([rows[i] for i in range(7)])
    ids = batch["ids"]
    model.eval()
    with torch.no_grad():
        image, text = model(**batch["pairs"], views=("image", "text")).embeddings.chunk(2)
    for query, candidate, name in ((text, image, "text_to_image"), (image, text, "image_to_text")):
        ranks = best_ranks(query, candidate, ids, ids)
        for k in (1, 5):
            assert metrics[f"eval_{name}_hit_rate@{k}"] == pytest.approx((ranks <= k).float().mean().item())
    assert metrics["eval_mean_hit_rate@5"] == pytest.approx(
        (metrics["eval_text_to_image_hit_rate@5"] + metrics["eval_image_to_text_hit_rate@5"]) / 2
    )


def test_rows_of_one_text_are_right_answers_in_evaluation(tiny_checkpoints, tmp_path):
    model, processor = make_encoder(tiny_checkpoints)
    distinct = make_rows(6)
    same = distinct.map(lambda row: {"text": "a"})
    groups = distinct.map(lambda row: {"group": "g", "text": "a"})
    found = [make_trainer("contrastive", model, processor, tmp_path, rows, rows).evaluate() for rows in (same, groups)]
    assert found[0] == found[1]
    assert found[0]["eval_mean_hit_rate@1"] == 1
    unlike = make_trainer("contrastive", model, processor, tmp_path, distinct, distinct).evaluate()
    assert unlike["eval_mean_hit_rate@1"] < 1


def test_rows_without_names_show_each_their_own(tiny_checkpoints, tmp_path):
    model, processor = make_encoder(tiny_checkpoints)
    named = make_rows(7)
    nameless = named.remove_columns(["id", "group"])
    found = [
        make_trainer("gcl", model, processor, tmp_path, rows, rows, per_device_eval_batch_size=3).evaluate()
        for rows in (named, nameless, named.remove_columns("group"), named.map(lambda row: {"group": None}))
    ]
    assert found[1:] == found[:1] * 3
    assert "ids" not in PairCollator(processor)([nameless[i] for i in range(3)])
    with pytest.raises(ValueError, match=r"rows \[1\] have neither a group nor an id"):
        PairCollator(processor)([named[0], nameless[1]])


def test_groups_can_be_made_negatives(tiny_checkpoints, tmp_path):
    first = []
    for masked in (True, False):
        for chunk_size in (0, 4):
            model, processor = make_encoder(tiny_checkpoints)
            trainer = make_trainer(
                "contrastive", model, processor, tmp_path, make_rows(8, groups=2), per_device_train_batch_size=8,
                max_steps=1, mask_false_negatives=masked, gradient_cache_chunk_size=chunk_size,
            )  # fmt: skip
            trainer.train()
            first.append(trainer.state.log_history[0])
    assert [entry.get("masked_negatives") for entry in first] == [3, 3, None, None]
    assert first[1]["loss"] < first[3]["loss"] - 0.3


def test_the_last_partial_batch_is_dropped(tiny_checkpoints, tmp_path):
    model, processor = make_encoder(tiny_checkpoints)
    trainer = make_trainer("gcl", model, processor, tmp_path, make_rows(11), max_steps=-1, num_train_epochs=2)
    trainer.train()
    assert trainer.state.global_step == 2 * (11 // 4)


@pytest.mark.parametrize("chunk_size", [0, 1])
def test_accumulation_is_the_mean_over_micro_batches(tiny_checkpoints, tmp_path, chunk_size):
    """Each micro-batch is a contrastive batch of its own, with and without the gradient cache."""
    model, processor = make_encoder(tiny_checkpoints)
    without_dropout(model)
    rows = make_rows(8)
    trainer = make_trainer(
        "contrastive", model, processor, tmp_path, rows, max_steps=1, per_device_train_batch_size=2, optim="sgd",
        gradient_accumulation_steps=4, learning_rate=1.0, max_grad_norm=0.0, train_sampling_strategy="sequential",
        gradient_cache_chunk_size=chunk_size,
    )  # fmt: skip
    objective = trainer.model.train()
    losses = [objective(**PairCollator(processor)([rows[i], rows[i + 1]]))["contrastive_loss"] for i in range(0, 8, 2)]
    (sum(losses) / 4).backward()
    expected = {name: p.detach() - p.grad for name, p in objective.named_parameters() if p.grad is not None}
    objective.zero_grad()
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(sum(losses).item() / 4, abs=1e-5)
    parameters = dict(objective.named_parameters())
    assert "loss.temperature.log_value" in expected
    for name, value in expected.items():
        assert torch.allclose(parameters[name], value, atol=1e-5), name


def test_activation_checkpointing_changes_nothing(tiny_checkpoints, tmp_path):
    weights = []
    for arguments in ({}, {"activation_checkpointing": True, "gradient_cache_chunk_size": 4}):
        trainer = make_trainer("gcl", *make_encoder(tiny_checkpoints), tmp_path, make_rows(8), **arguments)
        trainer.train()
        weights.append(_snapshot(trainer.model))
    assert any(vars(module).get("gradient_checkpointing") for module in trainer.encoder.modules())
    for name, weight in weights[0].items():
        assert torch.allclose(weight, weights[1][name], atol=1e-6), name


def test_only_matrices_decay(tiny_checkpoints, tmp_path):
    trainer = make_trainer("gcl", *make_encoder(tiny_checkpoints), tmp_path, make_rows(4))
    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    assert {name for name, p in trainer.model.named_parameters() if p.ndim > 1} >= decayed
    assert "encoder.vl_encoder.layers.0.q_proj.weight" in decayed
    assert not decayed & {
        "loss.temperature.log_value",
        "encoder.vl_encoder.cls_token",
        "encoder.vl_encoder.norm.weight",
    }


def test_a_temperature_can_be_fixed(tiny_checkpoints, tmp_path):
    model, processor = make_encoder(tiny_checkpoints)
    trainer = make_trainer(
        "contrastive", model, processor, tmp_path, make_rows(8), learn_temperature=False, temperature=0.5
    )
    trainer.train()
    assert [entry["temperature"] for entry in trainer.state.log_history[:2]] == [0.5, 0.5]


def test_what_is_pushed_is_the_model(tiny_checkpoints, tmp_path, monkeypatch):
    model, processor = make_encoder(tiny_checkpoints)
    trainer = make_trainer("gcl", model, processor, tmp_path, make_rows(8))
    trainer.hub_model_id, pushed = "me/model", []
    (tmp_path / "notes.txt").write_text("private")
    monkeypatch.setattr("conjoin.training.trainer.push", lambda upload, **options: pushed.append((upload, options)))
    trainer.push_to_hub(license="mit", token="secret")
    ((upload, options),) = pushed
    assert upload.repo_id == "me/model" and "license: mit" in upload.card and options["api"].token == "secret"
    assert {"model.safetensors", "modules.json", "README.md"} <= set(upload.files)
    assert "notes.txt" not in upload.files and "training_args.bin" not in upload.files
    loaded = AutoModel.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="hub_strategy='every_save': a checkpoint holds the state of training"):
        make_trainer("gcl", model, processor, tmp_path, make_rows(8), push_to_hub=True, hub_strategy="every_save")


@pytest.mark.parametrize("best", [max, min])  # one of which is not the last checkpoint
def test_the_best_checkpoint_is_loaded(best, tiny_checkpoints, tmp_path):
    model, processor = make_encoder(tiny_checkpoints)
    rows = make_rows(8)
    trainer = make_trainer(
        "contrastive", model, processor, tmp_path, rows, rows, max_steps=6, learning_rate=0.05,
        eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, save_total_limit=8,
        load_best_model_at_end=True, metric_for_best_model="eval_mean_hit_rate@1", greater_is_better=best is max,
    )  # fmt: skip
    trainer.train()
    history = [entry["eval_mean_hit_rate@1"] for entry in trainer.state.log_history if "eval_mean_hit_rate@1" in entry]
    assert len(set(history)) > 1
    assert trainer.state.best_metric == best(history)
    assert trainer.evaluate()["eval_mean_hit_rate@1"] == best(history)
    for name, saved in load_file(f"{trainer.state.best_model_checkpoint}/model.safetensors").items():
        assert torch.equal(saved, trainer.model.state_dict()[name]), name


def test_the_best_checkpoint_stays_when_a_moved_folder_is_resumed(tiny_checkpoints, tmp_path):
    def trainer(folder, steps):
        return make_trainer(
            "contrastive", *make_encoder(tiny_checkpoints), folder, make_rows(8), make_rows(4), max_steps=steps,
            learning_rate=0.0, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
            load_best_model_at_end=True, metric_for_best_model="mean_hit_rate@1", greater_is_better=True,
        )  # fmt: skip

    trainer(tmp_path / "a", 2).train()
    (tmp_path / "a").rename(tmp_path / "b")
    resumed = trainer(tmp_path / "a/../b", 4)  # another spelling of the folder
    resumed.train(resume_from_checkpoint=str(tmp_path / "b/checkpoint-2"))
    assert Path(resumed.state.best_model_checkpoint).samefile(tmp_path / "b/checkpoint-1")
    assert {path.name for path in (tmp_path / "b").iterdir()} == {"checkpoint-1", "checkpoint-4"}


def test_a_bad_row_is_named(tiny_checkpoints, tmp_path):
    rows = [dict(row) for row in make_rows(4)]
    rows[2]["text"] = "   "
    trainer = make_trainer("gcl", *make_encoder(tiny_checkpoints), tmp_path, rows)
    with pytest.raises(ValueError, match=r"item 'row2'.*only white space"):
        trainer.train()


def test_arguments_are_checked(tiny_checkpoints, tmp_path):
    model, processor = make_encoder(tiny_checkpoints)
    for arguments, message in (
        ({"gradient_cache_chunk_size": -1}, "gradient_cache_chunk_size=-1"),
        ({"gradient_cache_chunk_tokens": -1}, "gradient_cache_chunk_tokens=-1"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            make_trainer("contrastive", model, processor, tmp_path, None, **arguments)
    with pytest.raises(ValueError, match="pass processing_class"):
        make_trainer("contrastive", model, None, tmp_path, None)
    with pytest.raises(ValueError, match="expected an eval_dataset with a length to evaluate on, got NoneType"):
        make_trainer("contrastive", model, processor, tmp_path, None).evaluate()


def test_a_process_uses_one_of_several_gpus(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = ContrastiveConfig(output_dir=str(tmp_path), report_to="none", per_device_train_batch_size=4)
    assert (config.n_gpu, config.train_batch_size) == (1, 4)
    assert "one of 2 GPUs is used; start with `accelerate launch`" in caplog.text


def test_lora_names_what_it_does_not_find(tiny_checkpoints):
    model, _ = make_encoder(tiny_checkpoints)
    with pytest.raises(ValueError, match="has no tower 'audio_model'"):
        add_lora(model, LoraArguments(towers=("audio_model",)))
    with pytest.raises(ValueError, match=r"vision_model: no linear layer ends in \('w_proj',\)"):
        add_lora(model, LoraArguments(target_modules=("w_proj",)))


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


@pytest.mark.filterwarnings("error:Already found a `peft_config`")
def test_merged_adapters_leave_nothing_behind(retriever):
    model, _ = retriever("qwen2_vl", 2)
    assert merge_lora(model) is model
    arguments = LoraArguments(r=2, towers=("text_model",))
    merged = merge_lora(add_lora(model, arguments))
    assert [name for name, module in merged.named_modules() if hasattr(module, "peft_config")] == []
    assert hasattr(model.text_model, "peft_config")  # the one that still has them
    add_lora(merged, arguments)
    assert merged.state_dict().keys() == model.state_dict().keys()
