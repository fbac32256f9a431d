"""Our losses in sentence-transformers: equal to the plain functions, to its own loss, and trained by its trainer."""

import pytest
import torch
from datasets import Dataset, Features, Image, Value
from PIL import Image as PilImage
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

from conjoin.hub import export
from conjoin.losses import gcl, mac, mac_hard_temperature, multi_positive
from conjoin.st.losses import CachedGclLoss, CachedMacLoss, CachedMultiPositiveLoss, MacSchedule
from tiny_training import make_encoder

TEXTS = [[f"{word} {number}" for number in range(5)] for word in ("query", "right one", "wrong", "other", "more")]


@pytest.fixture
def model(tiny_checkpoints):
    modules = [Transformer(tiny_checkpoints["bert"]), Pooling(24, "mean"), Normalize()]
    return SentenceTransformer(modules=modules, device="cpu").eval()


def features(model, count):
    return [model.preprocess(texts) for texts in TEXTS[:count]]


def embeddings(model, count):
    return [model(dict(column))["sentence_embedding"] for column in features(model, count)]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    found = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    assert sum(gradient.abs().sum() for gradient in found.values()) > 1e-3
    return found


def assert_equal(model, one, other):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    first, second = gradients(model, one), gradients(model, other)
    assert first.keys() == second.keys()
    for name, gradient in first.items():
        torch.testing.assert_close(gradient, second[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("columns", [2, 4])
def test_mac_without_decay_is_the_ranking_loss_of_the_library(model, columns):
    ours = CachedMacLoss(model, temperature=0.05, decay=0, mini_batch_size=2)
    theirs = CachedMultipleNegativesRankingLoss(model, scale=20.0, mini_batch_size=3)
    assert_equal(model, ours(features(model, columns)), theirs(features(model, columns), None))


def test_mac_is_the_plain_function(model):
    loss = CachedMacLoss(model, temperature=0.1, decay=0.5, mini_batch_size=2)
    loss.progress = 0.6
    labels = torch.tensor([[0, 1], [1, 1], [2, 0], [0, 0], [1, 2]])
    queries, *candidates = embeddings(model, 3)
    hard = mac_hard_temperature(0.1, 0.5, 0.6)
    plain = mac(queries, torch.cat(candidates), torch.cat([labels[:, 0], labels[:, 1]]), 0.1, hard)
    assert_equal(model, loss(features(model, 3), labels), plain)
    shared = labels[:, :1].expand(5, 2)
    torch.testing.assert_close(loss(features(model, 3), labels[:, 0]), loss(features(model, 3), shared))


def test_gcl_is_the_plain_function(model):
    loss = CachedGclLoss(model, 0.1, mini_batch_size=2, exclude_other_positive=True)
    plain = gcl(*embeddings(model, 3), 0.1, exclude_other_positive=True)
    assert_equal(model, loss(features(model, 3)), plain)


def test_multi_positive_is_the_plain_function_with_a_mask(model):
    loss = CachedMultiPositiveLoss(model, 0.1, positives=2, mini_batch_size=2)
    labels = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 1, 1]])
    anchors, *others = embeddings(model, 5)
    stacked, exists = torch.stack(others, dim=1), labels.bool()
    plain = multi_positive(anchors, stacked[:, :2], stacked[:, 2:], 0.1, exists[:, :2], exists[:, 2:])
    assert_equal(model, loss(features(model, 5), labels), plain)
    assert loss(features(model, 5)) != loss(features(model, 5), labels)


def pictures(count):
    return [PilImage.new("RGB", (16, 16), (40 * i % 256, 90 * i % 256, 255 - 30 * i)) for i in range(count)]


def train(model, loss, columns, features, folder, callbacks=(), **arguments):
    settings = SentenceTransformerTrainingArguments(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True, **arguments,
    )  # fmt: skip
    rows = Dataset.from_dict(columns, features=Features(features))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = SentenceTransformerTrainer(
        model=model, args=settings, train_dataset=rows, loss=loss, callbacks=list(callbacks)
    )
    trainer.train()
    return {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}


def test_the_library_trains_our_export_by_gcl(tiny_checkpoints, tmp_path):
    export(*make_encoder(tiny_checkpoints), tmp_path / "model")
    model = SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=True)
    images, texts = pictures(8), [f"box {i}" for i in range(8)]
    both = [{"image": image, "text": text} for image, text in zip(images, texts, strict=True)]
    columns = {"image": images, "text": texts, "both": both}
    kinds = {"image": Image(), "text": Value("string"), "both": {"image": Image(), "text": Value("string")}}
    moved = train(model, CachedGclLoss(model, mini_batch_size=2), columns, kinds, tmp_path / "out")
    assert any("vision" in name for name in moved) and any("text" in name for name in moved)


def test_the_library_trains_stock_clip_by_mac(tiny_checkpoints, tmp_path):
    model = SentenceTransformer(tiny_checkpoints["clip"], device="cpu")
    loss = CachedMacLoss(model, decay=0.5, mini_batch_size=2)
    columns = {"query": [f"box {i}" for i in range(8)], "positive": pictures(8), "label": [1] * 8}
    kinds = {"query": Value("string"), "positive": Image(), "label": Value("int64")}
    moved = train(model, loss, columns, kinds, tmp_path, [MacSchedule(loss)])
    assert any("vision" in name for name in moved) and any("text" in name for name in moved)
    assert loss.progress == 0.5


def test_what_is_wrong_is_named(model):
    with pytest.raises(ValueError, match="got 2 columns"):
        CachedGclLoss(model)(features(model, 2))
    with pytest.raises(ValueError, match="unless decay is 0"):
        CachedMacLoss(model)(features(model, 2))
    with pytest.raises(ValueError, match=r"labels have shape \(5, 3\), expected \(5,\) or \(5, 1\)"):
        CachedMacLoss(model)(features(model, 2), torch.ones(5, 3))
    with pytest.raises(ValueError, match="got one column"):
        CachedMacLoss(model)(features(model, 1))
    with pytest.raises(ValueError, match="expected 2 positive columns after the anchor, got 1"):
        CachedMultiPositiveLoss(model, positives=2)(features(model, 2))
    with pytest.raises(ValueError, match=r"labels have shape \(5,\), expected \(5, 1\)"):
        CachedMultiPositiveLoss(model)(features(model, 2), torch.ones(5))
    with pytest.raises(ValueError, match="mini_batch_size=0"):
        CachedGclLoss(model, mini_batch_size=0)
    with pytest.raises(ValueError, match="decay=-1"):
        CachedMacLoss(model, decay=-1)
    with pytest.raises(ValueError, match="positives=0"):
        CachedMultiPositiveLoss(model, positives=0)
