"""`from_mllm`, `from_clip` and `from_backbones` give a model and its processor, which fit each other."""

import pytest
import torch
from PIL import Image

from conjoin import ItemEncoder, from_backbones, from_clip, from_mllm

ITEM = {"image": Image.new("RGB", (32, 24), "red"), "text": "a red box"}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("score_fusion", {"text_weight": 2}),
        ("joint_encoder", {"hidden_size": 24, "num_attention_heads": 2}),
        ("token_fusion", {"pooling": "mean"}),
        ("mllm_retriever", {"keep_layers": 2, "processor": {"max_pixels": 1024}}),
        ("mllm_retriever", {"readout": "last"}),
    ],
)
def test_a_model_and_its_processor(kind, options, tiny_checkpoints, mllm_checkpoints):
    if kind == "mllm_retriever":
        model, processor = from_mllm(mllm_checkpoints("qwen2_vl")[0], **options)
        assert (processor.ret_token is None) == ("readout" in options)
    elif kind == "score_fusion":
        model, processor = from_clip(tiny_checkpoints["clip"], processor={"max_text_length": 6}, **options)
        assert processor.max_text_length == 6
    else:
        model, processor = from_backbones(tiny_checkpoints["dinov2"], tiny_checkpoints["bert"], kind, **options)
    assert model.config.model_type == kind
    vectors = ItemEncoder(model, processor).encode([ITEM, "a red box", ITEM["image"]])
    assert torch.as_tensor(vectors).isfinite().all()


def test_what_cannot_be_built(tiny_checkpoints):
    bert, clip = tiny_checkpoints["bert"], tiny_checkpoints["clip"]
    with pytest.raises(ValueError, match="model_type='joint'; expected one of"):
        from_backbones(bert, bert, "joint")
    with pytest.raises(ValueError, match="unknown field 'text_wait' of the score_fusion; did you mean 'text_weight'"):
        from_clip(clip, text_wait=2)
    with pytest.raises(ValueError, match="score_fusion: Validation error for field 'normalize_inputs': TypeError"):
        from_clip(clip, normalize_inputs="false")
    with pytest.raises(ValueError, match="field 'keep_layer' of the mllm_retriever; did you mean 'keep_layers'"):
        from_mllm(bert, keep_layer=2)
