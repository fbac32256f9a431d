"""Fine-tuning of published embedders: what is saved is what it was, and adapters load on the stock model."""

import json

import numpy as np
import pytest
import torch
from peft import AutoPeftModel, PeftModel
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoModelForImageTextToText

from conjoin.cli.main import main
from conjoin.hub import load_embedder, load_model
from conjoin.retrieval import load_encoder
from conjoin.trainers import recipe_folder
from tiny_embedders import INSTRUCTION, drop_video, save_embedder
from tiny_training import small_run

RECIPE = str(recipe_folder() / "finetune/qwen3_vl_embedding.yaml")


@pytest.fixture(autouse=True)
def without_video(monkeypatch):
    drop_video(monkeypatch)


@pytest.fixture
def rows(tmp_path, pictures):
    lines = []
    for number in range(8):
        pictures[number % 4].resize((16 + number, 16)).save(tmp_path / f"{number}.png")
        positives = [{"image": f"{number}.png"}, {"image": f"{number}.png", "text": f"box {number}"}]
        lines.append({"query": f"the box {number}", "positive": positives, "negatives": [{"text": f"no {number}"}]})
        lines[-1]["instruction"] = INSTRUCTION if number % 2 else None
    (tmp_path / "queries.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "queries.jsonl"


def train(rows, model, *words, recipe=RECIPE):
    small = ["--min_pixels=64", "--max_pixels=576", f"--model_name_or_path={model}", f"--dataset_name={rows}"]
    small += small_run(rows.parent / "out", gradient_cache_chunk_size=2)
    assert main(["train", recipe, *small, *words]) == 0
    return rows.parent / "out"


def test_a_fine_tuned_embedder_is_an_embedder(rows, pictures, tmp_path, capsys):
    source = tmp_path / "source"
    save_embedder(source, prompts={"query": INSTRUCTION})
    out = train(rows, source)
    assert f'SentenceTransformer("{out}")' in capsys.readouterr().out
    assert not list(out.glob("*.py")) and (out / "chat_template.jinja").is_file()
    items = ["a box", "another box"]
    stock = SentenceTransformer(str(out), device="cpu")
    model, processor = load_model(out)
    with torch.no_grad():
        expected = model(**processor(items)).embeddings.numpy()
        before = load_embedder(source)[0](**processor(items)).embeddings.numpy()
    assert np.abs(stock.encode(items) - expected).max() <= 1e-5
    assert np.abs(stock.encode(pictures[:1]) - load_encoder(out, device="cpu").encode(pictures[:1])).max() <= 1e-5
    assert np.abs(before - expected).max() > 1e-3
    assert stock.prompts["query"] == INSTRUCTION
    old, new = (AutoModel.from_pretrained(folder).state_dict() for folder in (source, out))
    changed = {name.rsplit(".", 2)[-2] for name in old if not torch.equal(old[name], new[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "up_proj", "down_proj", "gate_proj"}


def test_adapters_load_on_the_stock_model(rows, tmp_path):
    source = tmp_path / "source"
    save_embedder(source)
    out = train(rows, source)
    trained = dict(AutoModel.from_pretrained(out).state_dict())
    given = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(source), out / "adapter")
    for adapted in (given, AutoPeftModel.from_pretrained(out / "adapter")):
        merged = adapted.merge_and_unload().model.state_dict()
        torch.testing.assert_close(dict(merged), trained, atol=1e-6, rtol=1e-6)
    with pytest.warns(UserWarning, match="Found missing adapter keys"):
        PeftModel.from_pretrained(AutoModel.from_pretrained(source), out / "adapter")
    encoder = SentenceTransformer(str(source), device="cpu")
    encoder[0].model.load_adapter(str(out / "adapter"))
    assert (
        np.abs(encoder.encode(["a box"]) - SentenceTransformer(str(out), device="cpu").encode(["a box"])).max() <= 1e-5
    )


METHODS = ["gcl/qwen2_vl_2b", "puma/stage2_qwen2_vl_7b", "coral/qwen2_5_vl_3b", "finetune/compress_qwen3_vl_embedding"]


@pytest.mark.parametrize("recipe", METHODS)
def test_every_method_takes_an_embedder(recipe, rows, tmp_path):
    source = tmp_path / "source"
    save_embedder(source, "qwen2_5_vl" if "2_5" in recipe else "qwen2_vl")
    words = ["--dataset_format", "queries"]
    if recipe.startswith("gcl"):
        table = tmp_path / "pairs.jsonl"
        table.write_text("".join(json.dumps({"image": f"{n}.png", "text": f"box {n}"}) + "\n" for n in range(8)))
        words = ["--dataset_name", str(table)]
    if recipe.startswith("coral"):  # which cannot tell an item's tokens from the chat template's
        words += ["--reconstruct", "null"]
    words += ['--model_init_kwargs={"keep_layers": 2}', "--lora_r", "4"]
    out = train(rows, source, *words, recipe=str(recipe_folder() / f"{recipe}.yaml"))
    assert np.isfinite(SentenceTransformer(str(out), device="cpu").encode(["a box"])).all()
