"""Training on rows with several images: `cat` for models of one image, both for an MLLM."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from conjoin.cli.main import main
from conjoin.data import ImageAugmentation, load_pairs
from conjoin.hub import load_processor
from conjoin.retrieval import load_encoder
from conjoin.training import CachedFeatures, ModelArguments, build_model, cache_features, collate_features

TEXT = "number {} <image> and <image> boxes"


@pytest.fixture
def source(tmp_path):
    rows = []
    for number in range(8):
        names = [f"{number}-{place}.png" for place in range(2)]
        for place, name in enumerate(names):
            colour = (30 * number, 250 - 29 * number, 120 * place)
            Image.new("RGB", (16, 16 + 4 * place), colour).save(tmp_path / name)
        rows.append({"id": str(number), "images": names, "text": TEXT.format(number)})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "rows.jsonl"


def towers(checkpoints, **changes):
    config = {"hidden_size": 16, "num_attention_heads": 2}
    parts = {"vision": checkpoints["dinov2"], "text": checkpoints["bert"], "config": config}
    return ModelArguments(**parts, **changes)


def train(tmp_path, source, model, *words):
    options = {"output_dir": str(tmp_path / "out"), "per_device_train_batch_size": 4, "max_steps": 2, "use_cpu": True}
    recipe = {"method": "gcl", "model": model, "data": {"source": str(source)}, "training": options}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    return main(["train", str(tmp_path / "recipe.yaml"), *words])


def test_a_model_of_one_image_trains_on_concatenations(tiny_checkpoints, source, tmp_path, capsys):
    model = {"vision": tiny_checkpoints["dinov2"], "text": tiny_checkpoints["bert"]}
    model |= {"config": {"hidden_size": 16, "num_attention_heads": 2}}
    assert train(tmp_path, source, model) == 2
    error = capsys.readouterr().err
    assert "2 images, but this model takes one image per item; choose input type cat" in error
    assert train(tmp_path, source, model, "--model.input_type", "avg") == 2
    assert 'a processor takes "seq" or "cat"' in capsys.readouterr().err
    assert train(tmp_path, source, model, "--model.input_type", "cat", "--overwrite") == 0
    assert load_processor(tmp_path / "out").input_type == "cat"
    encoder = load_encoder(tmp_path / "out", device="cpu")
    row = load_pairs(source)[0]
    item = {"image": row["image"], "text": "number 0"}
    assert encoder.input_type == "cat" and np.isfinite(encoder.encode([item])).all()


def test_cached_features_are_those_of_concatenations(tiny_checkpoints, source, tmp_path):
    torch.manual_seed(0)
    model, processor = build_model(towers(tiny_checkpoints, input_type="cat"))
    rows = load_pairs(source)
    folder = cache_features(model, processor, rows, tmp_path / "cache", copies=(None, ImageAugmentation(0)))
    cached = CachedFeatures(folder, first_only=True)
    batch = collate_features([cached[place] for place in range(len(rows))])["pairs"]
    items = [{"image": row["image"], "text": f"number {row['id']} and boxes"} for row in rows]
    views = ("image", "text", "fused")
    model.eval()
    with torch.no_grad():
        live, found = (model(**inputs, views=views).embeddings for inputs in (processor(items), batch))
    assert (live - found).abs().max() < 1e-6
    images = cached.images.column("image_features")
    assert images.shape[1] == 2 and not torch.equal(images[:, 0], images[:, 1])


@pytest.mark.parametrize("input_type", ["seq", "cat"])
def test_an_mllm_trains_on_both(mllm_checkpoints, source, tmp_path, input_type):
    model = {"architecture": "mllm_retriever", "mllm": mllm_checkpoints("qwen2_vl")[0]}
    assert train(tmp_path, source, model, "--model.input_type", input_type) == 0
    assert load_encoder(tmp_path / "out", device="cpu").input_type == input_type
