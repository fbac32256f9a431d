"""The trainers: what is logged, evaluated, saved and trained, in numbers."""

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModel

from conjoin import ContrastiveConfig
from conjoin.data import PairCollator
from conjoin.evaluation import best_ranks
from conjoin.losses import gather_rows, gcl_views
from conjoin.trainers import add_adapters, merge_lora
from conjoin.trainers.gradient_cache import total_loss
from tiny_training import cached_step, hit_rates, make_encoder, make_rows, make_trainer, plain_step, without_dropout


@pytest.fixture
def trainer(tiny_checkpoints, tmp_path):
    def make(method, rows=8, eval_rows=None, groups=None, dropout=True, **arguments):
        model, processor = make_encoder(tiny_checkpoints)
        if not dropout:
            without_dropout(model)
        rows = make_rows(rows, groups) if isinstance(rows, int) else rows
        return make_trainer(method, model, processor, arguments.pop("folder", tmp_path), rows, eval_rows, **arguments)

    return make


def test_terms_are_logged_by_name_and_a_temperature_can_be_fixed(trainer):
    fixed = trainer("contrastive", learn_temperature=False, temperature=0.5)
    trainer = trainer("gcl", groups=4)
    trainer.train()
    fixed.train()
    assert [entry["temperature"] for entry in fixed.state.log_history[:2]] == [0.5, 0.5]
    first, second, _ = trainer.state.log_history
    assert first["gcl_loss"] == pytest.approx(first["loss"], abs=1e-4)
    assert first["temperature"] == pytest.approx(0.07) and second["temperature"] != first["temperature"]
    assert 0 <= first["masked_negatives"] <= 1


def test_evaluation_covers_every_row_and_equals_a_naive_one(trainer):
    rows = make_rows(7, groups=6)  # 7 rows in batches of 4: the last batch is not full
    trainer = trainer("contrastive", rows, rows, per_device_eval_batch_size=4)
    metrics = trainer.evaluate()
    batch = trainer.data_collator([rows[i] for i in range(7)])
    ids, model = batch["ids"], trainer.encoder.eval()
    with torch.no_grad():
        image, text = model(**batch["pairs"], views=("image", "text")).embeddings.chunk(2)
    for k in (1, 5):
        found = []
        for query, candidate, name in ((text, image, "text_to_image"), (image, text, "image_to_text")):
            found.append((best_ranks(query, candidate, ids, ids) <= k).float().mean().item())
            assert metrics[f"eval_{name}_hit_rate@{k}"] == pytest.approx(found[-1])
        assert metrics[f"eval_mean_hit_rate@{k}"] == pytest.approx(sum(found) / 2)


def test_rows_of_one_text_or_group_are_right_answers_for_each_other(trainer):
    distinct = make_rows(6)
    changes = ({"text": "a"}, {"group": "g", "text": "a"}, {})
    same, grouped, unlike = (distinct.map(lambda row, change=change: change) for change in changes)
    found = [hit_rates(trainer("contrastive", rows, rows)) for rows in (same, grouped, unlike)]
    assert found[0] == found[1]
    assert found[0]["eval_mean_hit_rate@1"] == 1 > found[2]["eval_mean_hit_rate@1"]


def test_rows_without_names_show_each_their_own(trainer):
    named = make_rows(7)
    nameless, ungrouped = named.remove_columns(["id", "group"]), named.map(lambda row: {"group": None})
    found = [
        hit_rates(trainer("gcl", rows, rows, per_device_eval_batch_size=3)) for rows in (named, nameless, ungrouped)
    ]
    assert found[1:] == found[:1] * 2
    with pytest.raises(ValueError, match=r"rows \[1\] have neither a group nor an id"):
        trainer("gcl", named).data_collator([named[0], nameless[1]])


def test_groups_can_be_made_negatives(trainer):
    first, settings = [], {"groups": 2, "per_device_train_batch_size": 8, "max_steps": 1}
    for masked, chunk_size in ((True, 0), (True, 4), (False, 0), (False, 4)):
        settings |= {"mask_false_negatives": masked, "gradient_cache_chunk_size": chunk_size}
        made = trainer("contrastive", **settings)
        made.train()
        first.append(made.state.log_history[0])
    assert [entry.get("masked_negatives") for entry in first] == [3, 3, None, None]
    assert first[1]["loss"] < first[3]["loss"] - 0.3


def test_the_last_partial_batch_is_dropped(trainer):
    trainer = trainer("gcl", 11, max_steps=-1, num_train_epochs=2)
    trainer.train()
    assert trainer.state.global_step == 2 * (11 // 4)


@pytest.mark.parametrize("chunk_size", [0, 1])
def test_accumulation_is_the_mean_over_micro_batches(trainer, chunk_size):
    """Each micro-batch is a contrastive batch of its own, with and without the gradient cache."""
    rows = make_rows(8)
    trainer = trainer("contrastive", rows, dropout=False, max_steps=1, per_device_train_batch_size=2, optim="sgd",
                      gradient_accumulation_steps=4, learning_rate=1.0, max_grad_norm=0.0,
                      temperature_learning_rate=None, train_sampling_strategy="sequential",
                      gradient_cache_chunk_size=chunk_size)  # fmt: skip
    step = trainer.model.train()
    losses = [step(**trainer.data_collator([rows[i], rows[i + 1]]))["contrastive_loss"] for i in range(0, 8, 2)]
    (sum(losses) / 4).backward()
    expected = {name: p.detach() - p.grad for name, p in step.named_parameters() if p.grad is not None}
    step.zero_grad()
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(sum(losses).item() / 4, abs=1e-5)
    parameters = dict(step.named_parameters())
    assert "loss.temperature.log_value" in expected
    for name, value in expected.items():
        assert torch.allclose(parameters[name], value, atol=1e-5), name


def test_activation_checkpointing_changes_nothing(trainer):
    weights = []
    for arguments in ({}, {"activation_checkpointing": True, "gradient_cache_chunk_size": 4}):
        made = trainer("gcl", **arguments)
        made.train()
        weights.append(dict(made.model.named_parameters()))
    assert any(vars(module).get("gradient_checkpointing") for module in made.encoder.modules())
    for name, weight in weights[0].items():
        assert torch.allclose(weight, weights[1][name], atol=1e-6), name


def test_only_matrices_decay(trainer):
    trainer = trainer("gcl")
    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    assert "encoder.vl_encoder.layers.0.q_proj.weight" in decayed
    assert all(dict(trainer.model.named_parameters())[name].ndim > 1 for name in decayed)
    assert "encoder.vl_encoder.cls_token" not in decayed


def test_what_is_pushed_is_the_model(trainer, tmp_path, monkeypatch):
    made, pushed = trainer("gcl"), []
    made.hub_model_id = "me/model"
    (tmp_path / "notes.txt").write_text("private")
    monkeypatch.setattr("conjoin.trainers.base.push", lambda upload, **options: pushed.append((upload, options)))
    made.push_to_hub(license="mit", token="secret")
    ((upload, options),) = pushed
    assert upload.repo_id == "me/model" and "license: mit" in upload.card and options["api"].token == "secret"
    assert {"model.safetensors", "modules.json", "README.md"} <= set(upload.files)
    assert "notes.txt" not in upload.files and "training_args.bin" not in upload.files
    loaded = AutoModel.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in made.encoder.state_dict().items())
    with pytest.raises(ValueError, match="hub_strategy='every_save': a checkpoint holds the state of training"):
        trainer("gcl", push_to_hub=True, hub_strategy="every_save")


@pytest.mark.parametrize("best", [max, min])  # one of which is not the last checkpoint
def test_the_best_checkpoint_is_loaded(best, trainer):
    rows = make_rows(8)
    metric = {"metric_for_best_model": "eval_mean_hit_rate@1", "greater_is_better": False} if best is min else {}
    trainer = trainer("contrastive", rows, rows, max_steps=6, learning_rate=0.05, eval_strategy="steps", eval_steps=1,
                      save_strategy="steps", save_steps=1, save_total_limit=8, load_best_model_at_end=True,
                      **metric)  # fmt: skip
    trainer.train()
    history = [entry["eval_mean_hit_rate@1"] for entry in trainer.state.log_history if "eval_mean_hit_rate@1" in entry]
    assert len(set(history)) > 1
    assert trainer.evaluate()["eval_mean_hit_rate@1"] == trainer.state.best_metric == best(history)
    for name, saved in load_file(f"{trainer.state.best_model_checkpoint}/model.safetensors").items():
        assert torch.equal(saved, trainer.model.state_dict()[name]), name


def test_a_process_uses_one_of_several_gpus(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = ContrastiveConfig(output_dir=str(tmp_path), report_to="none", per_device_train_batch_size=4)
    assert (config.n_gpu, config.train_batch_size) == (1, 4)
    assert "one of 2 GPUs is used; start with `accelerate launch`" in caplog.text


def test_a_missing_modality_is_left_out_of_gcl_and_refused_by_info_nce(trainer):
    rows = [dict(row) for row in make_rows(8)]
    for row in rows[:2]:
        row["image"] = None
    settings = {"per_device_train_batch_size": 8, "max_steps": 1}
    assert 0 < trainer("gcl", rows, **settings).train().training_loss < 10
    with pytest.raises(ValueError, match="needs image and text in every row"):
        trainer("contrastive", rows, **settings).train()


def test_adapters_name_what_they_do_not_find_and_leave_nothing_behind(tiny_checkpoints):
    model, _ = make_encoder(tiny_checkpoints)
    names = list(model.state_dict())
    with pytest.raises(ValueError, match="target_modules='w_proj' names no linear layer; the model has"):
        add_adapters(model, LoraConfig(target_modules="w_proj"))
    with pytest.raises(ValueError, match="modules_to_save: JointEncoderModel has no part 'head'; its parts are"):
        add_adapters(model, LoraConfig(target_modules="all-linear", modules_to_save=["head"]))
    assert merge_lora(model) is model
    for _ in range(2):  # a merged model may get adapters again
        add_adapters(model, LoraConfig(r=2, target_modules="text_model.*", modules_to_save=["vl_encoder"]))
        trained = {name.partition(".")[0] for name, p in model.named_parameters() if p.requires_grad}
        assert trained == {"text_model", "vl_encoder"} and hasattr(model, "peft_config")
        model = merge_lora(model)
        assert list(model.state_dict()) == names and not hasattr(model, "peft_config")


@pytest.mark.parametrize("method", ["contrastive", "gcl"])
def test_matryoshka_is_the_mean_over_truncated_and_normalised_widths(trainer, method):
    trainer = trainer(method)
    step, rows = trainer.model.double().eval(), make_rows(6)
    batch = PairCollator(trainer.processing_class)([rows[i] for i in range(6)])
    embeddings, plain = trainer.embed(trainer.encoder, batch), total_loss(step(**batch))
    cuts = [{view: value[:, :width] for view, value in embeddings.items()} for width in (4, 7, 16)]
    expected = sum(total_loss(trainer.loss(**cut, ids=batch["ids"])).item() / 3 for cut in cuts)
    trainer.args.matryoshka_dims = [4, 7, 16]
    assert total_loss(step(**batch)).item() == pytest.approx(expected, abs=1e-12) != plain.item()
    trainer.args.matryoshka_dims = [16]
    assert torch.equal(total_loss(step(**batch)), plain)
    trainer.args.matryoshka_dims = [17]
    with pytest.raises(ValueError, match="matryoshka_dims has 17, the embeddings have 16 numbers"):
        step(**batch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradient_cache_chunk_size": -1}, "gradient_cache_chunk_size=-1"),
        ({"gradient_cache_chunk_tokens": -1}, "gradient_cache_chunk_tokens=-1"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"bf16": "maybe"}, "bf16='maybe'; expected true, false or auto"),
        ({"matryoshka_dims": [8, 8]}, r"matryoshka_dims=\[8, 8\]; expected positive numbers, each once"),
        ({"rows": [{"id": "row2", "image": None, "text": "  "}] * 4}, "item 'row2'.*only white space"),
    ],
)
def test_arguments_and_rows_are_checked(trainer, arguments, message):
    with pytest.raises(ValueError, match=message):
        trainer("contrastive", **arguments).train()


def test_gcl_contrasts_the_named_views_of_a_row(trainer):
    rows = [dict(row) | {"title": row.pop("text"), "note": f"n {i}" if i % 3 else None} for i, row in
            enumerate(map(dict, make_rows(6)))]  # fmt: skip
    weights = {"image": 1.0, "title": 1.0, "note": 0.5, "image+title": 2.0}
    made = trainer("gcl", rows, rows, views=weights, dropout=False, per_device_train_batch_size=6)
    step, batch = made.model.double(), made.data_collator(rows)
    whole, gradients = plain_step(step, batch)
    items = {
        "image": [{"image": row["image"]} for row in rows],
        "title": [{"text": row["title"]} for row in rows],
        "note": [{"text": row["note"] or "none"} for row in rows],
        "image+title": [{"image": row["image"], "text": row["title"]} for row in rows],
    }
    with torch.no_grad():
        views = {name: step.encoder(**made.processing_class(some)).pooler_output for name, some in items.items()}
    present = torch.tensor([[True, True, row["note"] is not None, True] for row in rows])
    gathered = gather_rows(*views.values(), present=present)
    expected = gcl_views(views, 0.07, weights=list(weights.values()), gathered=gathered)
    assert whole["gcl_loss"].item() == pytest.approx(expected.item(), abs=1e-6)
    for tokens in (0, 20):
        terms, found = cached_step(step, batch, 4, chunk_tokens=tokens)
        torch.testing.assert_close((terms, found), (whole, gradients), rtol=0, atol=1e-9)
    losses = []
    for views in (None, {"image": 1, "text": 1, "image+text": 1}):
        paper = trainer("gcl", make_rows(6), dropout=False, views=views)
        losses.append(paper.model.double()(**paper.data_collator(list(make_rows(6))))["gcl_loss"].item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)
    made.model.float()
    made.train()
    assert {"eval_note_to_image_hit_rate@1", "eval_title_to_note_hit_rate@1"} <= made.evaluate().keys()
    with pytest.raises(ValueError, match="found no column of the brand among"):
        trainer("gcl", rows, views={"image": 1, "brand": 1})
    with pytest.raises(ValueError, match="expected two or more, each with a positive weight"):
        trainer("gcl", rows, views={"image": 1, "title": 0})
