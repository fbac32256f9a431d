"""Any image-text model of transformers trains through sentence-transformers, and is saved as its folder."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from peft import LoraConfig
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

from conjoin import CompressOptions, compress, load_recipe
from conjoin.hub import load_any, load_trainable, save_model
from conjoin.hub.sentence_model import SentenceModel, load_tower
from conjoin.retrieval import load_encoder
from conjoin.trainers import (
    CoralConfig,
    CoralTrainer,
    GclConfig,
    GclTrainer,
    PumaStage1Config,
    PumaStage1Trainer,
    PumaStage2Config,
    PumaStage2Trainer,
    QueryContrastiveTrainer,
    SolarStage1Config,
    SolarStage1Trainer,
    build_trainer,
)
from tiny_any import drop_videos, save_any
from tiny_training import SETTINGS, make_rows, small_run

FAMILIES = ["gemma3"]
SLOW = ["embedding_gemma2", "qwen3_5", "idefics2", "llava_next", "paddleocr_vl", "qwen2_vl", "qwen3_vl"]
"""The last two have a class of their own here, which cuts them otherwise."""
LORA = LoraConfig(r=2, lora_alpha=4, target_modules=r".*(q_proj|v_proj)")


@pytest.fixture(scope="module", autouse=True)
def without_videos():
    with pytest.MonkeyPatch.context() as patch:
        drop_videos(patch)
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            save_any(name, made[name])
        return made[name]

    return folder


def rows(count=4):
    """Pairs with texts of many lengths; one of them has no text, one no picture."""
    pairs = [row | {"text": "word " * (1 + 3 * n)} for n, row in enumerate(make_rows(count))]
    pairs[1] |= {"text": None}
    pairs[2] |= {"image": None}
    return pairs


def queries(count=4):
    pairs = make_rows(count)
    return [
        {"query": f"find {n}", "positive": {"image": pair["image"]}, "positive_id": str(n), "target_modality": "image"}
        for n, pair in enumerate(pairs)
    ]


def step(model, folder, trainer=GclTrainer, config=GclConfig, data=None, arguments=None, **settings):
    """A trainer after one step without dropout, and by how much its parameters moved."""
    plain = {"max_steps": 1, "per_device_train_batch_size": 4, "optim": "sgd", "learning_rate": 1.0}
    args = config(str(folder), **SETTINGS | plain | settings)
    torch.manual_seed(0)
    made = trainer(model, args, data or rows(), **arguments or {})
    for module in made.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    before = {name: each.detach().clone() for name, each in made.model.named_parameters() if each.requires_grad}
    made.train()
    now = dict(made.model.named_parameters())
    return made, {name: now[name].detach() - each for name, each in before.items() if not now[name].equal(each)}


def check_vectors(model, processor, items, library):
    """Compare the vectors of a model with those of sentence-transformers, and return them."""
    with torch.no_grad():
        found = model(**processor(items)).embeddings.numpy()
    for item, vector in zip(items, found, strict=True):
        np.testing.assert_allclose(library.encode([item], device="cpu")[0], vector, atol=1e-6)
    return found


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_step_in_chunks_is_the_plain_step_and_the_model_is_saved_whole(name, folders, tmp_path, pictures):
    """Before and after it, the vectors are those of sentence-transformers."""
    gradients, items = {}, ["a text", pictures[0], {"text": "a longer text", "image": pictures[1]}]
    body = Transformer(str(folders(name)))
    pooling = Pooling(body.get_embedding_dimension(), "lasttoken")
    check_vectors(*load_tower(folders(name), "last"), items, SentenceTransformer(modules=[body, pooling, Normalize()]))
    for way in ({}, {"gradient_cache_chunk_size": 1}, {"gradient_cache_chunk_tokens": 64}):
        model = load_tower(folders(name), "last")[0].model  # of families with a class of their own, too
        trainer, gradients[str(way)] = step(model, tmp_path / "out", arguments={"peft_config": LORA}, **way)
    plain, *others = gradients.values()
    assert plain and all("lora" in each or each.startswith("loss.") for each in plain)
    for other in others:
        for each, gradient in plain.items():
            torch.testing.assert_close(other[each], gradient, rtol=1e-4, atol=1e-6)
    trainer.save_model(str(tmp_path / "saved"))
    assert not list((tmp_path / "saved").glob("*.py"))
    stock = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    expected = check_vectors(trainer.model.eval(), trainer.processing_class, items, stock)
    np.testing.assert_allclose(load_encoder(tmp_path / "saved", device="cpu").encode(items), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("trainer", "config", "settings"),
    [
        (QueryContrastiveTrainer, QueryContrastiveTrainer.config_class, {"matryoshka_dims": [8, 32]}),
        (PumaStage1Trainer, PumaStage1Config, {"kind": "cosine", "distill_weight": 0.5, "contrastive_weight": 0.5}),
        (PumaStage2Trainer, PumaStage2Config, {}),
    ],
)
def test_queries_train_by_every_method_in_chunks_as_at_once(trainer, config, settings, folders, tmp_path):
    found = []
    for chunk in (0, 2):
        model, _ = load_trainable(folders("gemma3"))
        teacher, _ = load_trainable(folders("gemma3"))
        assert isinstance(model, SentenceModel)
        arguments = {}
        if trainer is PumaStage1Trainer:
            model.model[0].model.language_model.layers = model.model[0].model.language_model.layers[:2]
            model.config.get_text_config().num_hidden_layers = 2
            arguments["teacher"] = teacher
        made, gradients = step(
            model.model, tmp_path, trainer, config, queries(), arguments, gradient_cache_chunk_size=chunk, **settings
        )
        found.append(gradients)
        logs = made.state.log_history[0]
        assert all(np.isfinite(value) for value in logs.values())
    for each, gradient in found[0].items():
        torch.testing.assert_close(found[1][each], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("trainer", "config"), [(CoralTrainer, CoralConfig), (SolarStage1Trainer, SolarStage1Config)])
def test_methods_that_read_states_of_tokens_refuse_it_by_name(trainer, config, folders, tmp_path):
    with pytest.raises(ValueError, match=f"{trainer.__name__} reads states of tokens or prompts"):
        trainer(str(folders("gemma3")), config(str(tmp_path), use_cpu=True), queries())


def test_the_sample_trains(tmp_path):
    trainer, gradients = step("sample", tmp_path)
    assert gradients
    trainer.save_model()
    with torch.no_grad():
        expected = trainer.model.eval()(**trainer.processing_class(["a lamp"])).embeddings.numpy()
    np.testing.assert_allclose(load_encoder(tmp_path, device="cpu").encode(["a lamp"]), expected, atol=1e-6)
    stock = SentenceTransformer(str(tmp_path), device="cpu")
    np.testing.assert_allclose(stock.encode(["a lamp"]), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "keep_last"),
    [("gemma3", False), ("gemma3", True), *(pytest.param(name, False, marks=pytest.mark.slow) for name in SLOW[:-2])],
)
def test_a_cut_model_is_its_layers_with_the_final_norm(name, keep_last, folders, tmp_path, pictures):
    whole, processor = load_tower(folders(name), "last")
    decoder = getattr(whole.body, "language_model", None) or whole.body.text_model
    kept = [0, 3] if keep_last else [0, 1]
    items = ["a text", pictures[0], {"text": "a longer text", "image": pictures[1]}]
    with torch.no_grad():
        uncut = whole(**processor(items)).embeddings
        decoder.layers = torch.nn.ModuleList(decoder.layers[number] for number in kept)
        decoder.config.num_hidden_layers = 2
        if types := getattr(decoder.config, "layer_types", None):
            decoder.config.layer_types = [types[number] for number in kept]
        expected = whole(**processor(items)).embeddings
        copied = shutil.copytree(folders(name), tmp_path / "copy")
        if not keep_last:
            index = json.loads((copied / "model.safetensors.index.json").read_text())["weight_map"]
            needed = {
                shard for key, shard in index.items() if not re.match(r"(language|text)_model.*\.layers\.3\.", key)
            }
            deep = {*index.values()} - needed
            assert deep
            for shard in deep:  # of the last layer alone
                (copied / shard).unlink()
        model, reader = load_trainable(copied, pooling="last", keep_layers=2, keep_last=keep_last)
        found = model(**reader(items)).embeddings
    assert (found - expected).abs().max() <= 1e-6 < (found - uncut).abs().max()
    assert model.config.get_text_config().num_hidden_layers == 2
    save_model(model, reader, tmp_path / "saved")
    np.testing.assert_allclose(load_encoder(tmp_path / "saved", device="cpu").encode(items), expected, atol=1e-6)
    with pytest.raises(ValueError, match=r"keep_layers=9 .* expected 1 to 4"):
        load_trainable(folders(name), pooling="last", keep_layers=9)


@pytest.mark.slow
def test_any_model_is_compressed(folders, tmp_path):
    model, processor = load_trainable(folders("gemma3"))
    options = CompressOptions(layers=[2], keep_last=True, steps=2, batch_size=4, held_out=4, lora_rank=2)
    results = compress(model, processor, make_rows(12), tmp_path, options)
    student, _ = load_any(tmp_path / "layers-2")
    assert student.config.get_text_config().num_hidden_layers == 2
    assert [row[0] for row in results.tables[0].rows] == ["4, whole", "2, untrained", "2, trained"]


@pytest.mark.parametrize("name", ["gemma3", "qwen2_vl"])
def test_adapters_train_on_weights_in_4_bits(name, folders, mllm_checkpoints, tmp_path):
    """QLoRA: what is saved is whole, with the adapters merged."""
    pytest.importorskip("bitsandbytes", reason="QLoRA needs bitsandbytes")
    table = tmp_path / "pairs.jsonl"
    for number, row in enumerate(make_rows(4)):
        row["image"].save(tmp_path / f"{number}.png")
        table.open("a").write(json.dumps({"image": str(tmp_path / f"{number}.png"), "text": row["text"]}) + "\n")
    folder = folders(name) if name == "gemma3" else mllm_checkpoints(name)[0]
    words = ["--trainer=gcl", f"--model_name_or_path={folder}", f"--dataset_name={table}", "--use_peft"]
    words += ["--lora_target_modules=.*language_model.*(q_proj|v_proj)", "--load_in_4bit"]
    trainer = build_trainer(load_recipe(None, [*words, *small_run(tmp_path / "out", gradient_cache_chunk_size=2)]))
    before = {name: each.detach().clone() for name, each in trainer.model.named_parameters() if each.requires_grad}
    trainer.train()
    moved = dict(trainer.model.named_parameters())
    assert any("lora" in each and not moved[each].equal(value) for each, value in before.items())
    trainer.save_model(str(tmp_path / "saved"))
    with torch.no_grad():
        expected = trainer.model.eval()(**trainer.processing_class(["a lamp"])).embeddings.numpy()
    found = load_encoder(tmp_path / "saved", device="cpu")
    assert all(each.is_floating_point() for each in found.model.parameters())
    np.testing.assert_allclose(found.encode(["a lamp"]), expected, atol=0.02)
