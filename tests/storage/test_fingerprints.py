"""A cache is known again by what it was made from, wherever that lies."""

import copy
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from conjoin.hub.build import image_text_processor, mllm_processor
from conjoin.processing import ImageTextProcessor
from conjoin.storage import model_fingerprint, processor_digest, row_digest, rows_digest, weights_digest
from tiny_training import make_rows


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_a_processor_is_known_by_what_it_does(name, tiny_checkpoints, tmp_path):
    folder = tiny_checkpoints[name]
    shutil.copytree(folder, tmp_path / "elsewhere")
    processor = image_text_processor(folder, folder)
    digest = processor_digest(processor)
    processor(["a", "longer than that"])  # leaves its padding in the tokenizer
    assert processor_digest(processor) == digest
    processor.save_pretrained(tmp_path / "saved")
    elsewhere = str(tmp_path / "elsewhere")
    for same in (image_text_processor(elsewhere, elsewhere), ImageTextProcessor.from_pretrained(tmp_path / "saved")):
        assert processor_digest(same) == digest
    assert processor_digest(image_text_processor(folder, folder, max_text_length=5)) != digest
    processor.image_processor.image_mean = [0.1, 0.2, 0.3]
    assert processor_digest(processor) != digest


def test_the_vocabulary_counts(tiny_checkpoints):
    clip, siglip = tiny_checkpoints["clip"], tiny_checkpoints["siglip"]
    digests = {processor_digest(image_text_processor(clip, text)) for text in (clip, siglip)}
    assert len(digests) == 2


def test_an_mllm_processor(mllm_checkpoints):
    folder, _ = mllm_checkpoints("qwen2_vl")
    digests = [processor_digest(mllm_processor(folder, max_length=n)) for n in (64, 64, 32)]
    assert digests[0] == digests[1] != digests[2]


class Model(torch.nn.Module):
    def __init__(self, **config):
        super().__init__()
        self.tower, self.head = torch.nn.Linear(2, 3), torch.nn.Linear(3, 1, bias=False)
        self.config = SimpleNamespace(to_dict=lambda: {"width": 3, "transformers_version": "1", "_name": "x"} | config)


def test_a_model_is_known_by_its_weights_and_configuration():
    model = Model()
    same, other, half = (copy.deepcopy(model) for _ in range(3))
    with torch.no_grad():
        other.head.weight.add_(1)
    half.head.to(torch.bfloat16)
    assert weights_digest(model) == weights_digest(same)
    assert len({weights_digest(each) for each in (model, other, half)}) == 3
    assert weights_digest(model, ("tower.",)) == weights_digest(other, ("tower.",)) != weights_digest(model)
    same.config = Model(transformers_version="2", _name="y").config
    assert model_fingerprint(model) == model_fingerprint(same) != model_fingerprint(other)
    same.config = Model(width=4).config
    assert model_fingerprint(model) != model_fingerprint(same)


def test_a_transposed_weight_is_another_weight():
    """Its bytes are the same."""
    models = [torch.nn.Module() for _ in range(2)]
    for model, shape in zip(models, ((2, 3), (3, 2)), strict=True):
        model.weight = torch.nn.Parameter(torch.ones(shape))
    assert weights_digest(models[0]) != weights_digest(models[1])


def test_the_digest_of_a_row_sees_text_and_image(tmp_path):
    picture, path = Image.new("RGB", (4, 4), "red"), tmp_path / "a.png"
    picture.save(path)
    data = path.read_bytes()
    rows = [
        {"text": "a"},
        {"text": "b"},
        {"image": picture},
        {"image": Image.new("RGB", (4, 4), "blue")},
        {"image": picture, "text": "a"},
        {"image": str(path)},
        {"image": {"bytes": data, "path": None}},
        {"image": {"bytes": data[:-1], "path": None}},
        {"image": "https://example.org/a.png"},
        {"text": "\udc80"},
    ]
    assert len({row_digest(row) for row in rows}) == len(rows)
    assert row_digest({"image": data}) == row_digest(rows[6]) == row_digest({"image": {"bytes": data, "path": "x"}})
    assert row_digest({"image": {"bytes": None, "path": str(path)}}) == row_digest(rows[5])
    before = row_digest(rows[5])
    Image.new("RGB", (9, 9), "red").save(path)
    assert row_digest(rows[5]) != before


def test_a_row_is_known_by_the_values_of_an_array():
    blank = np.zeros((100, 100, 3), np.uint8)
    spot = blank.copy()
    spot[50, 50] = 9  # the arrays print alike
    assert str(blank) == str(spot) and row_digest({"image": blank}) != row_digest({"image": spot})
    picture = Image.fromarray(spot)
    assert row_digest({"image": spot}) == row_digest({"image": torch.tensor(spot)}) == row_digest({"image": picture})


def test_a_picture_is_known_by_its_palette_and_orientation():
    pictures = [Image.new("P", (2, 2)) for _ in range(4)]
    pictures[1].putpalette([9, 9, 9])
    pictures[2].info["transparency"] = 0
    pictures[3].getexif()[0x0112] = 6
    assert len({row_digest({"image": picture}) for picture in pictures}) == 4


def test_the_digest_of_rows_sees_what_a_teacher_sees(tmp_path):
    rows = make_rows(3)
    plain = [dict(row) for row in rows]
    changed = [[dict(row) for row in plain] for _ in range(3)]
    changed[0][1]["text"] = changed[2][1]["id"] = "other"
    changed[1][1]["image"] = Image.new("RGB", (16, 16), "white")
    assert len({rows_digest(each) for each in (plain, plain[::-1], *changed)}) == 5
    plain[0]["image"].save(tmp_path / "a.png")
    filed = [{"id": "a", "text": "t", "image": {"path": str(tmp_path / "a.png"), "bytes": None}}]
    before = rows_digest(filed)
    plain[1]["image"].resize((20, 20)).save(tmp_path / "a.png")
    assert rows_digest(filed) != before
    assert rows_digest(rows) == rows_digest(make_rows(3))
    with pytest.raises(ValueError, match="have a transform"):
        rows_digest(rows.with_transform(lambda batch: batch))


def test_another_prompt_is_another_processor(retriever):
    processor = retriever("qwen2_vl")[1]
    changed = copy.copy(processor)
    changed.chat_template = processor.chat_template.replace("sentence", "sentences")
    assert changed.chat_template != processor.chat_template
    assert processor_digest(changed) != processor_digest(processor)
