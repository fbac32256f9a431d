"""Stock checkpoints of score fusion over CLIP: the same vectors from transformers' own CLIP."""

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch.nn.functional import normalize
from transformers import AutoModel, AutoProcessor, CLIPModel, CLIPProcessor

from conjoin.hub import export_stock
from conjoin.models.score_fusion import ScoreFusionModel
from conjoin.processing import ImageTextProcessor
from conjoin.retrieval import ItemEncoder, load_encoder

TEXTS = ["a red box", "x"]
WEIGHTS = {"equal": {}, "fixed": {"image_weight": 0.5, "text_weight": 2.0}}


def build(folder, processor=None, **config):
    model = ScoreFusionModel.from_clip(folder, **config).eval()
    return model, ImageTextProcessor.from_backbones(folder, folder, **(processor or {}))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_vectors_in_other_programs(weights, tiny_checkpoints, pictures, tmp_path):
    model, processor = build(tiny_checkpoints["clip"], **WEIGHTS[weights])
    before = model.backbone.text_projection.weight.clone()
    folder = export_stock(model, processor, tmp_path / "stock")
    both = [{"text": text, "image": picture} for text, picture in zip(TEXTS, pictures, strict=False)]
    expected = {name: ItemEncoder(model, processor).encode(items) for name, items in
                (("text", TEXTS), ("image", pictures[:2]), ("both", both))}  # fmt: skip
    stock, report = AutoModel.from_pretrained(folder, output_loading_info=True)
    reader = AutoProcessor.from_pretrained(folder)
    assert type(stock) is CLIPModel and type(reader) is CLIPProcessor and not any(report.values())
    with torch.no_grad():
        text = stock.get_text_features(**reader(text=TEXTS, return_tensors="pt", padding=True)).pooler_output
        image = stock.get_image_features(**reader(images=pictures[:2], return_tensors="pt")).pooler_output
    for name, vectors in (("text", text), ("image", image), ("both", image + text)):
        assert np.abs(normalize(vectors, dim=-1).numpy() - expected[name]).max() <= 1e-5, name
    encoder = SentenceTransformer(str(folder), device="cpu")
    for name, items in (("text", TEXTS), ("image", pictures[:2])):
        assert np.abs(encoder.encode(items, normalize_embeddings=True) - expected[name]).max() <= 1e-5
    assert np.abs(load_encoder(folder).encode(both) - expected["both"]).max() <= 1e-5
    assert not list(folder.glob("*.py")) and torch.equal(model.backbone.text_projection.weight, before)


def test_the_limit_of_texts(tiny_checkpoints, tmp_path):
    folder = export_stock(*build(tiny_checkpoints["clip"], {"max_text_length": 7}), tmp_path / "stock")
    assert AutoProcessor.from_pretrained(folder).tokenizer.model_max_length == 7


def test_prompts_are_named_that_are_not_written(tiny_checkpoints, tmp_path, caplog):
    export_stock(*build(tiny_checkpoints["clip"]), tmp_path / "stock", {"query": "Find it:", "document": ""})
    assert "a CLIP checkpoint has no prompts; put them before the texts: {'query': 'Find it:'}" in caplog.text


def test_what_a_clip_checkpoint_cannot_have(tiny_checkpoints, tmp_path):
    out = tmp_path / "stock"
    with pytest.raises(ValueError, match="normalize_inputs=True cannot be exported"):
        export_stock(*build(tiny_checkpoints["clip"], normalize_inputs=True), out)
    with pytest.raises(ValueError, match="over 'siglip' cannot be a stock checkpoint"):
        export_stock(*build(tiny_checkpoints["siglip"]), out)
    assert not out.exists()
