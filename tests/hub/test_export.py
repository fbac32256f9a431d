"""A saved model works where the package is not installed, through transformers and sentence-transformers."""

import json

import numpy as np
import pytest
import torch

from conjoin.hub import export
from conjoin.models.joint_encoder import JointEncoderModel
from conjoin.models.score_fusion import ScoreFusionModel
from conjoin.models.token_fusion import TokenFusionModel
from conjoin.processing import ImageTextProcessor

READ = """
import json, sys
import numpy as np, torch
from PIL import Image
from transformers import AutoModel, AutoProcessor
from sentence_transformers import SentenceTransformer

folder = {folder!r}
image = Image.open(folder + "/picture.png")
items = ["a b", image, {{"image": image, "text": "a b"}}]
message = [{{"role": "user", "content": [{{"type": "image", "image": image}}, {{"type": "text", "text": "a b"}}]}}]
model = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
with torch.no_grad():
    vectors = model(**processor(items)).embeddings.numpy()
encoder = SentenceTransformer(folder, trust_remote_code=True, device="cpu")
np.savez(
    folder + "/vectors.npz",
    auto=vectors,
    mixed=encoder.encode(items),
    alone=np.concatenate([encoder.encode([item]) for item in items]),
    message=encoder.encode([message]),
    text=encoder.encode("a b"),
)
print(json.dumps({{"conjoin": "conjoin" in sys.modules, "dimension": encoder.get_embedding_dimension()}}))
"""
MODELS = {
    "joint_encoder": lambda c: JointEncoderModel.from_backbones(
        c["dinov2"], c["bert"], hidden_size=16, num_attention_heads=2
    ),
    "score_fusion": lambda c: ScoreFusionModel.from_clip(c["clip"]),
    "token_fusion": lambda c: TokenFusionModel.from_backbones(c["dinov2"], c["bert"]),
}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_same_vectors_without_the_package(tiny_checkpoints, tmp_path, pictures, run_without_conjoin, name):
    model = MODELS[name](tiny_checkpoints).eval()
    towers = ("clip", "clip") if name == "score_fusion" else ("dinov2", "bert")
    processor = ImageTextProcessor.from_backbones(*(tiny_checkpoints[tower] for tower in towers))
    export(model, processor, tmp_path)
    picture = pictures[1].convert("RGBA")
    picture.putalpha(90)  # transparency must come out the same on every road
    picture.save(tmp_path / "picture.png")
    with torch.no_grad():
        expected = model(**processor(["a b", picture, {"image": picture, "text": "a b"}])).embeddings.numpy()
    printed = run_without_conjoin(READ.format(folder=str(tmp_path)))
    assert json.loads(printed.splitlines()[-1]) == {"conjoin": False, "dimension": expected.shape[1]}
    found = np.load(tmp_path / "vectors.npz")
    assert np.array_equal(found["auto"], expected)
    for key in ("mixed", "alone"):
        assert np.abs(found[key] - expected).max() <= 1e-6, key
    assert np.abs(found["message"][0] - expected[2]).max() <= 1e-6
    assert np.abs(found["text"] - expected[0]).max() <= 1e-6
    assert np.abs(expected[0] - expected[1]).max() > 1e-3


def test_a_class_that_is_not_registered_is_refused(tiny_checkpoints, tmp_path):
    class Unregistered(JointEncoderModel):
        _auto_class = None

    model = MODELS["joint_encoder"](tiny_checkpoints)
    processor = ImageTextProcessor.from_backbones(tiny_checkpoints["dinov2"], tiny_checkpoints["bert"])
    with pytest.raises(ValueError, match="Unregistered is not registered"):
        export(Unregistered(model.config), processor, tmp_path)
