import json
import shutil

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModel, AutoTokenizer

from conjoin.retrieval import MiningMetric, load_encoder, load_stock_encoder, mine_hard_negatives, plan_mining

TEXTS = ["a red apple", "two green chairs by the sea", "no"]


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_two_towers(tiny_checkpoints, pictures, name):
    encoder = load_stock_encoder(tiny_checkpoints[name], batch_size=2, device="cpu")
    items = [*TEXTS, *pictures[:3], *({"image": p, "text": t} for p, t in zip(pictures, TEXTS, strict=False))]
    vectors = encoder.encode(items)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    alone = np.concatenate([encoder.encode([item]) for item in items])
    assert np.allclose(vectors, alone, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoints[name])
    padding = "max_length" if name == "siglip" else "longest"
    inputs = tokenizer(TEXTS, padding=padding, truncation=True, return_tensors="pt")
    with torch.no_grad():
        features = AutoModel.from_pretrained(tiny_checkpoints[name]).get_text_features(**inputs).pooler_output
    assert np.allclose(vectors[:3], torch.nn.functional.normalize(features), atol=1e-5)


def test_a_vision_transformer_is_read_at_cls(tiny_checkpoints, pictures):
    encoder = load_stock_encoder(tiny_checkpoints["dinov2"], device="cpu")
    assert encoder.encode(pictures).shape == (4, 24) and encoder.dimension == 24
    with pytest.raises(ValueError, match=r"item 'x': .*this model cannot take 'text'"):
        encoder.encode(["a text"], ["x"])


@pytest.mark.parametrize("mean", [None, False, True])
def test_a_text_encoder_is_pooled_as_its_repository_says(tiny_checkpoints, tmp_path, mean):
    folder = shutil.copytree(tiny_checkpoints["xlm_roberta"], tmp_path / "model")
    if mean is not None:
        (folder / "1_Pooling").mkdir()
        described = {"pooling_mode_cls_token": not mean, "pooling_mode_mean_tokens": mean}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(described))
    inputs = AutoTokenizer.from_pretrained(folder)(TEXTS[:1], return_tensors="pt")
    with torch.no_grad():
        states = AutoModel.from_pretrained(folder)(**inputs).last_hidden_state[0]
    expected = torch.nn.functional.normalize(states.mean(dim=0) if mean else states[0], dim=0)
    assert np.allclose(load_encoder(folder, device="cpu").encode(TEXTS)[0], expected, atol=1e-5)


def test_the_seven_metrics_of_the_paper(tiny_checkpoints, pictures, tmp_path):
    """With a two-tower checkpoint in the place of the stage-1 model."""
    pairs = [("text", "text"), ("image", "image"), ("text", "image"), ("image", "text")]
    bert, dino, clip, siglip = (tiny_checkpoints[name] for name in ("bert", "dinov2", "clip", "siglip"))
    metrics = [MiningMetric("text", bert, "text", "text", 1.1), MiningMetric("image", dino, "image", "image", 1.1)]
    metrics += [MiningMetric(f"clip-{query}-{other}", clip, query, other, 1.1) for query, other in pairs]
    metrics.append(MiningMetric("stage1", siglip, "fused", "fused", 1.1))
    texts = ["red apple", "green apple", "blue chair", "a sea"]
    rows = [{"id": str(n), "image": p, "text": t} for n, (p, t) in enumerate(zip(pictures, texts, strict=True))]
    options = {"load_encoder": lambda model: load_encoder(model, device="cpu")}
    plan = plan_mining(Dataset.from_list(rows), metrics, tmp_path, **options)
    assert [step.name for step in plan.steps[-7:]] == [f"search {metric.name}" for metric in metrics]
    mined = mine_hard_negatives(Dataset.from_list(rows), metrics, tmp_path, k=2, **options)
    found = {finding.metric for anchor in mined for some in mined.findings(anchor).values() for finding in some}
    assert found == {metric.name for metric in metrics}


def test_a_model_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"cannot load the model 'absent/model': \S+"):
        load_encoder("absent/model", device="cpu")
