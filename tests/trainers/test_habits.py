"""What a user of `transformers.Trainer`, peft and sentence-transformers does works, or is refused by name."""

import inspect
import re
from dataclasses import fields

import numpy as np
import pandas
import pytest
import torch
from datasets import Dataset, DatasetDict, load_dataset
from peft import LoraConfig
from PIL import Image
from transformers import AutoModel, CLIPModel, CLIPProcessor, Trainer, TrainingArguments

from conjoin import (
    ContrastiveConfig,
    ContrastiveTrainer,
    GclConfig,
    GclTrainer,
    QueryContrastiveTrainer,
    RetrievalConfig,
    RetrievalTrainer,
)
from conjoin.data import EpochRows
from conjoin.losses import info_nce
from tiny_training import SETTINGS, make_encoder, make_rows, without_dropout


@pytest.fixture
def trainer(tiny_checkpoints, tmp_path):
    def make(kind, rows=8, eval_dataset=None, **arguments):
        model, processor = make_encoder(tiny_checkpoints)
        without_dropout(model)
        own = {name: arguments.pop(name) for name in ("compute_metrics", "columns", "loss") if name in arguments}
        args = kind.config_class(str(tmp_path / "out"), **SETTINGS | arguments)
        rows = make_rows(rows) if isinstance(rows, int) else rows
        return kind(model, args, rows, eval_dataset, processor, **own)

    return make


def losses(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_example_of_the_guide_trains_on_a_table(tiny_checkpoints, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for row in make_rows(8):
        row["image"].save(f"{row['id']}.png")
    (tmp_path / "photos.csv").write_text("photo,title\n" + "".join(f"row{n}.png,a {n // 2}\n" for n in range(8)))
    trainer = GclTrainer(
        model=tiny_checkpoints["clip"],
        args=GclConfig("out", learning_rate=1e-2, max_steps=2, per_device_train_batch_size=8, logging_steps=1),
        train_dataset=load_dataset("csv", data_files="photos.csv", split="train", cache_dir="cache"),
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]),
    )
    before = {name: value.clone() for name, value in trainer.encoder.state_dict().items()}
    assert len(losses(trainer)) == 2
    assert trainer.state.log_history[0]["masked_negatives"] > 0  # rows of one title
    moved = {name for name, value in trainer.encoder.state_dict().items() if not value.equal(before[name])}
    assert moved and all(".lora_" in name for name in moved)
    trainer.save_model()
    saved = AutoModel.from_pretrained("out", trust_remote_code=True).state_dict()
    assert not any("lora" in name for name in saved)


@pytest.mark.parametrize("case", ["name", "CLIPModel", "its processor", "no args", "TrainingArguments"])
def test_clip_becomes_score_fusion(tiny_checkpoints, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    folder, rows = tiny_checkpoints["clip"], make_rows(8)
    args = None if case == "no args" else ContrastiveConfig("out", **SETTINGS)
    if case == "TrainingArguments":
        args = TrainingArguments("out", **SETTINGS)
    model = folder if case in ("name", "no args") else CLIPModel.from_pretrained(folder)
    processor = CLIPProcessor.from_pretrained(folder) if case == "its processor" else None
    trainer = ContrastiveTrainer(model, args, rows, processing_class=processor)
    assert type(trainer.encoder).__name__ == "ScoreFusionModel" and type(trainer.args) is ContrastiveConfig
    if args is None:
        assert trainer.args.output_dir == f"{tmp_path.joinpath(folder).name}-Contrastive"
    else:
        assert len(losses(trainer)) == 2 and trainer.args.learning_rate == 1e-2


class Doubled(ContrastiveTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return 2 * super().compute_loss(model, inputs)


def test_an_own_compute_loss_is_used_or_refused(trainer):
    plain, doubled = (losses(trainer(kind, max_steps=1, optim="sgd")) for kind in (ContrastiveTrainer, Doubled))
    assert doubled[0] == pytest.approx(2 * plain[0], rel=1e-4)
    with pytest.raises(ValueError, match=r"Doubled.compute_loss would be skipped under the gradient cache; override"):
        trainer(Doubled, gradient_cache_chunk_size=2)


class CosineLoss(torch.nn.Module):
    def forward(self, image, text, ids):
        return 1 - torch.nn.functional.cosine_similarity(image, text).mean()


@pytest.mark.parametrize("chunk_size", [0, 2])
def test_a_loss_may_return_a_tensor(trainer, chunk_size):
    made = trainer(RetrievalTrainer, loss=CosineLoss(), gradient_cache_chunk_size=chunk_size)
    first, second = losses(made)
    assert second < first
    assert [entry["cosine_loss"] for entry in made.state.log_history[:2]] == pytest.approx([first, second], abs=1e-4)


class Ours(RetrievalTrainer):
    """A method of a user: texts against images, half of the loss from each direction weighted."""

    def embed(self, model, inputs):
        image, text = model(**inputs["pairs"], views=("image", "text")).pooler_output.chunk(2)
        return {"image": image, "text": text}

    def loss_terms(self, embeddings, inputs):
        loss = info_nce(embeddings["text"], embeddings["image"], 0.1)
        return {"text_loss": 0.7 * loss, "share": loss.detach() / 10}


def test_two_hooks_make_a_trainer_with_and_without_the_gradient_cache(trainer):
    made = [trainer(Ours, gradient_cache_chunk_size=size, optim="sgd") for size in (0, 3)]
    plain, cached = map(losses, made)
    assert plain == pytest.approx(cached, abs=1e-6) and len(plain) == 2
    assert made[0].state.log_history[0]["share"] == pytest.approx(plain[0] / 7, abs=1e-4)
    for one, other in zip(*(each.model.parameters() for each in made), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def count(prediction):
    assert prediction.predictions["text"].shape == (len(prediction.label_ids), 16)
    return {"rows": len(prediction.label_ids), "eval_groups": len(set(prediction.label_ids))}


def test_metrics_of_ones_own_are_logged(trainer):
    rows = make_rows(7, groups=5)
    made = trainer(ContrastiveTrainer, rows, rows, compute_metrics=count, eval_strategy="steps", eval_steps=1)
    made.train()
    logged = [entry for entry in made.state.log_history if "eval_rows" in entry]
    assert [(entry["eval_rows"], entry["eval_groups"]) for entry in logged] == [(7, 5)] * 2


def test_several_evaluation_sets_by_name(trainer):
    columns = {"text": "caption", "image": "photo"}
    rows, more = (make_rows(count).rename_columns(columns) for count in (4, 6))
    sets = {"a": rows, "b": more}
    made = trainer(ContrastiveTrainer, rows, sets, columns=columns, eval_strategy="steps", eval_steps=1)
    made.train()
    keys = {key for entry in made.state.log_history for key in entry}
    assert {"eval_a_mean_hit_rate@1", "eval_b_mean_hit_rate@1"} <= keys
    same = ("a", rows, made.train_dataset, made.eval_dataset["a"])
    found = [made.evaluate(given)["eval_mean_hit_rate@1"] for given in same]
    assert {*found} == {made.evaluate()["eval_a_mean_hit_rate@1"]} != {made.evaluate("b")["eval_mean_hit_rate@1"]}


def test_predict_returns_embeddings_labels_and_metrics(trainer):
    rows = make_rows(5, groups=3)
    made = trainer(ContrastiveTrainer, 4, rows)
    found = made.predict(rows)
    with torch.no_grad():
        expected = made.embed(made.encoder.eval(), made.data_collator([rows[n] for n in range(5)]))
    assert {name: value.shape for name, value in found.predictions.items()} == {"image": (5, 16), "text": (5, 16)}
    np.testing.assert_allclose(found.predictions["text"], expected["text"].numpy(), atol=1e-5)
    groups, texts = found.label_ids.T
    assert groups[0] == groups[3] and len({*groups}) == 3 and len({*texts}) == 5
    rates = {name: value for name, value in found.metrics.items() if "hit_rate" in name}
    evaluated = {name.replace("eval", "test", 1): value for name, value in made.evaluate().items()}
    assert rates.items() <= evaluated.items() and len(rates) == 9


def sentence_rows(*names, picture=False):
    rows = [{name: f"{name[-1]} {row['text']}" for name in names} | {"picture": row["image"]} for row in make_rows(8)]
    rows = Dataset.from_list(rows)
    return rows.remove_columns("positive").rename_columns({"picture": "positive"}) if picture else rows


@pytest.mark.parametrize(
    ("rows", "negatives"),
    [
        (sentence_rows("anchor", "positive"), 0),
        (sentence_rows("sentence1", "sentence2"), 0),
        (sentence_rows("query", "positive", "negative"), 4),
        (sentence_rows("anchor", "positive", "negative_1", "negative_2"), 8),
        (sentence_rows("anchor", "positive", "negative_1", picture=True), 4),
        (EpochRows([{"query": "a", "positive": row["image"]} for row in make_rows(4)]), 0),
    ],
)
def test_the_columns_of_sentence_transformers_and_pictures_as_candidates(trainer, rows, negatives):
    made = trainer(QueryContrastiveTrainer, rows, rows)
    batch = next(iter(made.get_train_dataloader()))
    assert len(batch["queries"]["input_ids"]) == 4
    shown = "pixel_values" if isinstance(rows[0].get("positive"), Image.Image) else "input_ids"
    assert batch["positives"][shown].any()
    counted = [len(next(iter(batch[part].values()))) for part in ("positives", "negatives") if part in batch]
    assert counted == [4, negatives][: 1 + (negatives > 0)]
    assert len(losses(made)) == 2 and "eval_query_to_candidate_hit_rate@1" in made.evaluate()


WORKERS = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}


@pytest.mark.parametrize(
    ("kind", "rows", "arguments", "message"),
    [
        (ContrastiveTrainer, 16, {"per_device_train_batch_size": 64}, "16 rows do not fill a batch of 64"),
        (QueryContrastiveTrainer, sentence_rows("query", "positive"), {"per_device_train_batch_size": 64},
         "8 rows do not fill a step of 64 with different positives"),
        (GclTrainer, Dataset.from_dict({"image": ["a.png"], "price": [1.5]}), {},
         r"found no column of the text among image, price; name it, GclTrainer\(columns={'text': ...}\)"),
        (GclTrainer, 8, {"columns": {"text": "title"}}, "no column 'title'; the columns are 'id', 'group', 'image'"),
        (QueryContrastiveTrainer, 8, {}, "found no (query column|column of the query) among"),
        (ContrastiveTrainer, EpochRows(make_rows(8)), WORKERS, "of these rows; remove dataloader_persistent_workers"),
        (QueryContrastiveTrainer, sentence_rows("query", "positive"), WORKERS, "of these rows; remove dataloader_per"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(trainer, kind, rows, arguments, message):
    with pytest.raises(ValueError, match=message):
        trainer(kind, rows, **arguments).train()


def same_metrics(made):
    return {name for name in made.evaluate() if "hit_rate" in name} >= {"eval_mean_hit_rate@1"}


def first_loss(made):
    return made.state.log_history[0]["loss"]


PLAIN: dict[str, float] = {}
"""The first loss of a run without further arguments."""
WORKING = {
    "activation_checkpointing": (
        True,
        lambda made: any(vars(module).get("gradient_checkpointing") for module in made.encoder.modules()),
    ),
    "average_tokens_across_devices": (False, lambda made: first_loss(made) == PLAIN["loss"]),
    "bf16": ("true", lambda made: made.accelerator.mixed_precision == "bf16"),
    "data_seed": (7, lambda made: first_loss(made) != PLAIN["loss"]),
    "dataloader_drop_last": (False, lambda made: made.state.epoch == pytest.approx(2 / 3)),
    "dataloader_in_order": (False, lambda made: made.get_eval_dataloader().in_order is False),
    "dataloader_multiprocessing_context": (None, same_metrics),
    "dataloader_num_workers": (1, lambda made: made.get_eval_dataloader().num_workers == 1),
    "dataloader_persistent_workers": (False, same_metrics),
    "dataloader_pin_memory": (False, same_metrics),
    "dataloader_prefetch_factor": (None, same_metrics),
    "disable_tqdm": (False, same_metrics),
    "eval_accumulation_steps": (1, same_metrics),
    "gradient_accumulation_steps": (2, lambda made: made.state.epoch == 2),
    "include_for_metrics": (["loss"], same_metrics),
    "max_grad_norm": (0.0, lambda made: made.state.log_history[1]["loss"] != PLAIN["second"]),
    "neftune_noise_alpha": (5.0, lambda made: first_loss(made) != PLAIN["loss"]),
    "optim": ("sgd", lambda made: type(made.optimizer.optimizer).__name__ == "SGD"),
    "per_device_eval_batch_size": (5, lambda made: len(made.get_eval_dataloader()) == 2),
    "per_device_train_batch_size": (2, lambda made: made.state.epoch == 0.5),
    "prediction_loss_only": (True, lambda made: "eval_loss" in made.evaluate() and not same_metrics(made)),
    "seed": (7, lambda made: first_loss(made) != PLAIN["loss"]),
    "torch_empty_cache_steps": (1, same_metrics),
    "train_sampling_strategy": ("sequential", lambda made: first_loss(made) != PLAIN["loss"]),
    "weight_decay": (0.5, lambda made: {group["weight_decay"] for group in made.optimizer.param_groups} == {0.0, 0.5}),
}
"""The fields of `TrainingArguments` that this package reads or whose reader it replaces: a value and what it does."""
SHOWN_ELSEWHERE = {
    "hub_model_id", "hub_private_repo", "hub_revision", "hub_token", "output_dir", "push_to_hub",  # what is pushed
    "gradient_checkpointing", "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "use_cpu",
    "accelerator_config", "torch_compile", "ddp_find_unused_parameters", "fp16",
}  # fmt: skip
REFUSED = [
    ({"auto_find_batch_size": True}, "auto_find_batch_size=True: a smaller batch has fewer negatives"),
    ({"batch_eval_metrics": True}, "batch_eval_metrics=True: R@k needs all embeddings"),
    ({"eval_do_concat_batches": False}, "eval_do_concat_batches=False: R@k needs all embeddings"),
    ({"label_names": ["labels"]}, "rows are named by the columns group and id"),
    ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1: a contrastive loss has no classes to smooth"),
    ({"include_for_metrics": ["inputs"]}, "compute_metrics gets embeddings and ids, no inputs"),
    ({"include_num_input_tokens_seen": "all"}, "items are images and texts, not tokens"),
    ({"remove_unused_columns": True}, "the collator reads whole rows"),
    ({"train_sampling_strategy": "group_by_length"}, "rows have no length before they are processed"),
    ({"use_liger_kernel": True}, "use_liger_kernel=True: its kernels are those of heads of language models"),
    ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "use_reentrant gives no gradient below adapters"),
    ({"hub_strategy": "every_save"}, "hub_strategy='every_save': a checkpoint holds the state"),
    ({"neftune_noise_alpha": 1.0, "feature_copies": 2}, "neftune_noise_alpha has no effect on stored features"),
    ({"torch_empty_cache_steps": 1, "gradient_cache_chunk_size": 2}, "torch_empty_cache_steps has no effect"),
    (
        {"ddp_find_unused_parameters": False, "gradient_cache_chunk_size": 2},
        "ddp_find_unused_parameters=False: DDP sees",
    ),
]
"""The fields that have no meaning here."""


@pytest.mark.parametrize("name", WORKING)
def test_a_field_of_the_arguments_works(trainer, name):
    value, works = WORKING[name]
    if name not in {each.name for each in fields(TrainingArguments)}:
        pytest.skip("of a later transformers")
    settings = {"per_device_eval_batch_size": 4}
    if not PLAIN:
        plain = losses(trainer(ContrastiveTrainer, 9, make_rows(9), **settings))
        PLAIN.update(loss=plain[0], second=plain[1])
    made = trainer(ContrastiveTrainer, 9, make_rows(9), **settings | {name: value})
    made.train()
    assert works(made)


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=lambda case: next(iter(case), ""))
def test_a_field_of_the_arguments_that_cannot_work_is_refused_by_name(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        RetrievalConfig(str(tmp_path), use_cpu=True, **arguments)


def test_every_other_field_of_the_arguments_is_read_by_transformers_alone():
    """No method replaces one of transformers that reads such a field, and ours do not read it."""
    names, theirs = {each.name for each in fields(TrainingArguments)}, set()
    for name, ours in vars(RetrievalTrainer).items():
        replaced = getattr(Trainer, name, None)
        if inspect.isfunction(replaced) and f"super().{name}(" not in inspect.getsource(ours):
            theirs |= set(re.findall(r"args\.(\w+)", inspect.getsource(replaced))) & names
    assert len(theirs) > 5
    assert theirs <= {*WORKING, *SHOWN_ELSEWHERE} | {name for refused, _ in REFUSED for name in refused}


ARGUMENTS = {
    "model": None, "args": None, "data_collator": None, "train_dataset": None, "eval_dataset": None,
    "processing_class": None, "compute_metrics": None, "callbacks": None,  # used by other tests
    "optimizers": lambda made: type(made.optimizer.optimizer).__name__ == "SGD",
    "optimizer_cls_and_kwargs": lambda made: type(made.optimizer.optimizer).__name__ == "SGD",
    "preprocess_logits_for_metrics": lambda made: "more" in made.predict(make_rows(4)).predictions,
    "model_init": "model_init has no effect here; expected the model itself",
    "compute_loss_func": "compute_loss_func has no effect here; expected a subclass with its own `loss_terms`",
}  # fmt: skip
"""Each argument of `Trainer`: what it does, or the message that refuses it."""


def test_every_argument_of_the_trainer_works_or_is_refused_by_name(tiny_checkpoints, tmp_path):
    assert {*inspect.signature(Trainer.__init__).parameters} - {"self"} == {*ARGUMENTS}
    for name, effect in ARGUMENTS.items():
        model, processor = make_encoder(tiny_checkpoints)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        values = {
            "optimizers": (sgd, None),
            "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1}),
            "preprocess_logits_for_metrics": lambda logits, labels: logits | {"more": logits["text"]},
        }
        known = {"train_dataset": make_rows(8), "processing_class": processor, name: values.get(name, print)}
        args = RetrievalConfig(str(tmp_path), **SETTINGS)
        if isinstance(effect, str):
            with pytest.raises(ValueError, match=effect):
                ContrastiveTrainer(model, args, **known)
        elif effect is not None:
            made = ContrastiveTrainer(model, args, **known)
            if name != "preprocess_logits_for_metrics":
                made.train()
            assert effect(made)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_dataset": "photos.csv"}, "train_dataset='photos.csv' is a path; expected a dataset: load_dataset"),
        (
            {"train_dataset": DatasetDict(train=make_rows(4))},
            r"train_dataset is a DatasetDict; choose a split: dataset\['tr",
        ),
        ({"train_dataset": {"a": make_rows(4)}}, r"train_dataset is a dict; choose a split: dataset\['a'"),
        ({"train_dataset": [("a.png", "a")]}, "train_dataset: row 0 is a tuple; expected a dictionary of its columns"),
        ({"train_dataset": iter(make_rows(4))}, "train_dataset is a .*, which is read once; expected a dataset"),
        ({"eval_dataset": "photos.csv"}, "eval_dataset='photos.csv' is a path"),
        ({"processing_class": None}, "pass processing_class"),
    ],
)
def test_what_is_no_table_is_refused_by_name(tiny_checkpoints, tmp_path, given, message):
    model, processor = make_encoder(tiny_checkpoints)
    known = {"train_dataset": make_rows(4), "processing_class": processor}
    with pytest.raises(ValueError, match=message):
        ContrastiveTrainer(model, RetrievalConfig(str(tmp_path), **SETTINGS), **known | given)


def test_evaluation_has_a_loss_which_may_choose_the_best_model(trainer):
    rows = make_rows(8)
    saved = {
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "per_device_eval_batch_size": 8,
    }
    best = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "eval_loss"}
    made = trainer(GclTrainer, rows, rows, **saved, **best)
    first = made.evaluate()["eval_loss"]
    batch = made.data_collator([rows[index] for index in range(8)])
    with torch.no_grad():
        assert first == pytest.approx(made.model.eval()(**batch)["gcl_loss"].item(), abs=1e-5)
    made.train()
    found = [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]
    assert made.state.best_metric == min(found[1:]) != found[0] and made.evaluate()["eval_loss"] == min(found[1:])


class ImagesAndPairs(GclTrainer):
    """Searches pairs by images."""

    def embed_for_evaluation(self, model, inputs):
        return {name: value for name, value in self.embed(model, inputs).items() if name != "text"}


def test_any_two_views_are_evaluated(trainer):
    found = trainer(ImagesAndPairs, 8, make_rows(8)).evaluate()
    assert {"eval_image_to_fused_hit_rate@1", "eval_fused_to_image_hit_rate@1", "eval_loss"} <= found.keys()


def transformed():
    rows = make_rows(8)
    numbers = Dataset.from_dict({"number": list(range(8))})
    return numbers.with_transform(
        lambda batch: {
            "image": [rows[number]["image"] for number in batch["number"]],
            "caption": [f"a {number // 2}" for number in batch["number"]],
        }
    )


CONTAINERS = {
    "list": list,
    "columns": lambda rows: {name: [row[name] for row in rows] for name in ("image", "caption")},
    "pandas": lambda rows: pandas.DataFrame([{name: row[name] for name in ("image", "caption")} for row in rows]),
    "Dataset": lambda rows: Dataset.from_list(list(rows)),
    "arrow": lambda rows: Dataset.from_list(list(rows)).data.table,
    "format": lambda rows: Dataset.from_list(list(rows)).with_format("polars"),
    "transform": lambda rows: transformed(),
    "torch": lambda rows: EpochRows(list(rows)),
}


def test_rows_in_any_container_train_and_are_measured_alike(trainer):
    rows = [transformed()[number] for number in range(8)]
    found = {}
    for name, contain in CONTAINERS.items():
        columns = {"text": "caption"} if name == "torch" else None  # the others are guessed
        made = trainer(GclTrainer, contain(rows), contain(rows), columns=columns, max_steps=1)
        found[name] = made.evaluate() | {"trained": losses(made)}
        found[name] = {key: value for key, value in found[name].items() if "hit_rate" in key or key == "trained"}
    for name, metrics in found.items():
        assert metrics == found["Dataset"], name


def test_several_columns_are_one_text(trainer):
    rows = make_rows(8).rename_columns({"text": "name"}).add_column("brand", ["x", None] * 4)
    for given in (rows, list(rows), rows.to_iterable_dataset()):
        made = trainer(ContrastiveTrainer, given, columns={"text": ["name", "brand"]})
        assert [row["text"] for row in made.train_dataset][:2] == ["a 0 x", "b 1"]


def test_rows_of_one_text_are_of_one_group_or_told(trainer, caplog):
    rows = make_rows(8).map(lambda row, index: {"text": f"a {index // 2}"}, with_indices=True)
    nameless = rows.remove_columns(["id", "group"])
    settings = {"max_steps": 1, "per_device_train_batch_size": 8}
    masked = []
    for given, columns in (
        (nameless, None),
        (rows, {"group": "text"}),
        (nameless.add_column("sku", [f"A-{n}" for n in range(8)]), None),
    ):
        caplog.clear()
        made = trainer(ContrastiveTrainer, given, columns=columns, **settings)
        made.train()
        masked.append(made.state.log_history[0]["masked_negatives"])
        told = (
            "4 of 8 rows repeat the text of another row, and are negatives of it: name what they share" in caplog.text
        )
        assert told is (len(masked) == 3)
    assert masked == [1, 1, 0]


def test_a_grade_of_pairs_is_told(trainer, caplog):
    rows = make_rows(8).add_column("score", [0.5] * 8)
    trainer(GclTrainer, rows)
    assert "the column 'score' is no grade here: every image and its text are taken as a match" in caplog.text


@pytest.mark.parametrize("column", ["score", "label", "similarity"])
def test_a_grade_is_refused_and_not_taken_for_a_match(trainer, column):
    rows = Dataset.from_dict({"sentence1": ["a"] * 8, "sentence2": ["b"] * 8, column: [0.0] * 8})
    with pytest.raises(ValueError, match=f"the column '{column}' grades pairs, and InfoNCE takes every pair"):
        trainer(QueryContrastiveTrainer, rows)


def test_a_model_whose_parameters_are_all_frozen_is_refused(trainer):
    made = trainer(ContrastiveTrainer)
    made.encoder.requires_grad_(False)
    assert "eval_loss" in made.evaluate(make_rows(4))
    with pytest.raises(ValueError, match=r"all parameters of the model are frozen: requires_grad_\(True\)"):
        made.train()


@pytest.mark.parametrize("chunk_size", [0, 1])
@pytest.mark.parametrize(
    ("kind", "rows", "size"),
    [(ContrastiveTrainer, make_rows(8), 1), (QueryContrastiveTrainer, sentence_rows("query", "positive"), 1),
     (ContrastiveTrainer, make_rows(8, groups=1), 4)],
)  # fmt: skip
def test_batches_without_a_negative_are_an_error(trainer, kind, rows, size, chunk_size):
    made = trainer(kind, rows, per_device_train_batch_size=size, gradient_cache_chunk_size=chunk_size)
    with pytest.raises(
        ValueError, match=f"100% of the batches have no negative, so their loss is 0: their {size} rows"
    ):
        made.train()
