"""Training on rows with several images: `cat` for models of one image, both for an MLLM."""

import json

import numpy as np
import pytest
from PIL import Image

from conjoin.cli.main import main
from conjoin.data import load_pairs
from conjoin.hub import load_processor
from conjoin.retrieval import load_encoder
from tiny_training import small_run, write_recipe


@pytest.fixture
def source(tmp_path):
    rows = []
    for number in range(8):
        names = [f"{number}-{place}.png" for place in range(2)]
        for place, name in enumerate(names):
            Image.new("RGB", (16, 16 + 4 * place), (30 * number, 250 - 29 * number, 120 * place)).save(tmp_path / name)
        rows.append({"id": str(number), "images": names, "text": f"number {number} <image> and <image> boxes"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "rows.jsonl"


@pytest.fixture
def train(tmp_path, source, tiny_checkpoints):
    def run(*words, **model):
        path = write_recipe(tmp_path, tiny_checkpoints, "gcl", source, **model)
        return main(["train", str(path), *small_run(tmp_path / "out"), *words])

    return run


def test_a_model_of_one_image_trains_on_concatenations(train, source, tmp_path, capsys):
    assert train() == 2
    assert "this model takes one image per item; choose input type cat" in capsys.readouterr().err
    assert train("--input_type", "cat", "--overwrite") == 0
    assert load_processor(tmp_path / "out").input_type == "cat"
    encoder = load_encoder(tmp_path / "out", device="cpu")
    row = load_pairs(source)[0]
    item = {"image": row["image"], "text": "number 0"}
    assert encoder.input_type == "cat" and np.isfinite(encoder.encode([item])).all()


@pytest.mark.parametrize("input_type", ["seq", "cat"])
def test_an_mllm_trains_on_both(mllm_checkpoints, train, tmp_path, input_type):
    model = {"model_name_or_path": mllm_checkpoints("qwen2_vl")[0], "model_init_kwargs": {}, "max_pixels": 576}
    assert train("--input_type", input_type, min_pixels=64, **model) == 0
    assert load_encoder(tmp_path / "out", device="cpu").input_type == input_type
