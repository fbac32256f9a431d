"""Our losses in sentence-transformers: equal to the plain functions, to its own loss, and trained by its trainer."""

import shutil

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, Value
from PIL import Image as PilImage
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import Qwen3Config, Qwen3Model

from conjoin.hub import cut_checkpoint, export
from conjoin.losses import gcl, info_nce, mac, mac_hard_temperature, multi_positive, self_distillation
from conjoin.st import losses
from tiny_embedders import save_embedder
from tiny_mllms import CHAT, tokenizer
from tiny_training import make_encoder

TEXTS = [[f"{word} {number}" for number in range(12)] for word in ("query", "right one", "wrong", "other", "more")]
PICTURES = [PilImage.new("RGB", (16, 16), (40 * i % 256, 90 * i % 256, 255 - 20 * i)) for i in range(12)]
GCL, MAC, SEVERAL = losses.CachedGclLoss, losses.CachedMacLoss, losses.CachedMultiPositiveLoss
PAIR = {"image": Image(), "text": Value("string")}


@pytest.fixture
def model(tiny_checkpoints):
    modules = [Transformer(tiny_checkpoints["bert"]), Pooling(24, "mean"), Normalize()]
    return SentenceTransformer(modules=modules, device="cpu").eval()


@pytest.fixture
def decoder(tmp_path):
    """A tiny Qwen3-Embedding: a decoder of texts, the last token, unit length."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    network = Qwen3Model(Qwen3Config(**sizes, num_key_value_heads=2, head_dim=8, vocab_size=300))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    network.save_pretrained(tmp_path / "decoder")
    tokenizer(CHAT).save_pretrained(tmp_path / "decoder")
    modules = [Transformer(str(tmp_path / "decoder")), Pooling(32, "lasttoken"), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(tmp_path / "embedder"))
    return SentenceTransformer(str(tmp_path / "embedder"), device="cpu")


def cut(folder):
    with cut_checkpoint(folder, 2) as small:
        return SentenceTransformer(str(small), device="cpu")


def features(model, count):
    return [model.preprocess(texts[:5]) for texts in TEXTS[:count]]


def embeddings(model, count):
    return [model(dict(column))["sentence_embedding"] for column in features(model, count)]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(model, one, other):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    first, second = gradients(model, one), gradients(model, other)
    assert sum(gradient.abs().sum() for gradient in first.values()) > 1e-3
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("columns", [2, 4])
def test_mac_without_decay_is_the_ranking_loss_of_the_library(model, columns):
    ours = MAC(model, temperature=0.05, decay=0, mini_batch_size=2)
    theirs = CachedMultipleNegativesRankingLoss(model, scale=20.0, mini_batch_size=3)
    assert_equal(model, ours(features(model, columns)), theirs(features(model, columns), None))


def test_mac_is_the_plain_function(model):
    loss = MAC(model, temperature=0.1, decay=0.5, mini_batch_size=2)
    loss.progress = 0.6
    labels = torch.tensor([[0, 1], [1, 1], [2, 0], [0, 0], [1, 2]])
    queries, *candidates = embeddings(model, 3)
    hard = mac_hard_temperature(0.1, 0.5, 0.6)
    plain = mac(queries, torch.cat(candidates), torch.cat([labels[:, 0], labels[:, 1]]), 0.1, hard)
    assert_equal(model, loss(features(model, 3), labels), plain)
    shared = labels[:, :1].expand(5, 2)
    torch.testing.assert_close(loss(features(model, 3), labels[:, 0]), loss(features(model, 3), shared))


def test_gcl_is_the_plain_function(model):
    loss = GCL(model, 0.1, mini_batch_size=2, exclude_other_positive=True)
    assert_equal(model, loss(features(model, 3)), gcl(*embeddings(model, 3), 0.1, exclude_other_positive=True))


def test_multi_positive_is_the_plain_function_with_a_mask(model):
    loss = SEVERAL(model, 0.1, positives=2, mini_batch_size=2)
    labels = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 1, 1]])
    anchors, *others = embeddings(model, 5)
    stacked, exists = torch.stack(others, dim=1), labels.bool()
    plain = multi_positive(anchors, stacked[:, :2], stacked[:, 2:], 0.1, exists[:, :2], exists[:, 2:])
    assert_equal(model, loss(features(model, 5), labels), plain)
    assert loss(features(model, 5)) != loss(features(model, 5), labels)


def test_self_distillation_is_the_plain_functions(decoder, tmp_path):
    student = cut(tmp_path / "embedder").eval()
    loss = losses.CachedSelfDistillationLoss(student, decoder, distill_weight=0.3, mini_batch_size=2)
    (q, p, n), (tq, tp, tn) = (embeddings(each, 3) for each in (student, decoder))
    distance = (self_distillation(q, tq, p, tp, "cosine") + self_distillation(q, tq, n, tn, "cosine")) / 2
    expected = 0.7 * info_nce(q, torch.cat([p, n]), 0.05) + 0.3 * distance
    assert_equal(student, loss(features(student, 3)), expected)


def train(model, loss, columns, folder, steps=2, callbacks=None, **kinds):
    """Train, and return the names of the parameters that moved."""
    settings = SentenceTransformerTrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=12, learning_rate=2e-3, use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = Dataset.from_dict(columns, features=Features(kinds) if kinds else None)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = SentenceTransformerTrainer(
        model=model, args=settings, train_dataset=rows, loss=loss, callbacks=callbacks
    )
    trainer.train()
    return {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}


def test_the_library_trains_our_export_by_gcl_and_stock_clip_by_mac(tiny_checkpoints, tmp_path):
    export(*make_encoder(tiny_checkpoints), tmp_path / "model")
    ours = SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=True)
    both = [{"image": image, "text": text} for image, text in zip(PICTURES, TEXTS[0], strict=True)]
    columns = {"image": PICTURES, "text": TEXTS[0], "both": both}
    loss = GCL(ours, mini_batch_size=2)
    moved = train(ours, loss, columns, tmp_path / "out", image=Image(), text=Value("string"), both=PAIR)
    stock = SentenceTransformer(tiny_checkpoints["clip"], device="cpu")
    loss = MAC(stock, decay=0.5, mini_batch_size=2)
    columns = {"query": TEXTS[0], "positive": PICTURES, "label": [1] * 12}
    for names in (moved, train(stock, loss, columns, tmp_path / "out", callbacks=[losses.MacSchedule(loss)])):
        assert any("vision" in name for name in names) and any("text" in name for name in names)
    assert loss.progress == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decoder", "embedder of pictures"])
def test_a_pruned_model_learns_to_embed_as_the_whole(kind, decoder, tmp_path, without_video):
    teacher, items, positives = decoder, ["query 3", "right one 5"], TEXTS[1]
    if kind != "decoder":
        shutil.rmtree(tmp_path / "embedder")
        save_embedder(tmp_path / "embedder")
        teacher = SentenceTransformer(str(tmp_path / "embedder"), device="cpu")
        items, positives = [*items, PICTURES[1]], PICTURES
    student = cut(tmp_path / "embedder")
    whole, before = teacher.encode(items, batch_size=1), student.encode(items, batch_size=1)
    loss = losses.CachedSelfDistillationLoss(student, teacher, mini_batch_size=4)
    train(student, loss, {"query": TEXTS[0], "positive": positives}, tmp_path / "run", steps=25)
    after = student.encode(items, batch_size=1)
    assert (after * whole).sum(1).mean() > (before * whole).sum(1).mean() + 0.05
    assert np.array_equal(teacher.encode(items, batch_size=1), whole)
    student.save_pretrained(str(tmp_path / "saved"))
    saved = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert saved[0].model.config.get_text_config().num_hidden_layers == 2
    assert np.abs(saved.encode(items, batch_size=1) - after).max() <= 1e-5


def test_what_is_wrong_is_named(model):
    for build, options, columns, labels, message in (
        (GCL, {}, 2, None, "got 2 columns"),
        (MAC, {}, 2, None, "unless decay is 0"),
        (MAC, {}, 2, torch.ones(5, 3), r"labels have shape \(5, 3\), expected \(5,\) or \(5, 1\)"),
        (MAC, {}, 1, None, "got one column"),
        (SEVERAL, {"positives": 2}, 2, None, "expected 2 positive columns after the anchor, got 1"),
        (SEVERAL, {}, 2, torch.ones(5), r"labels have shape \(5,\), expected \(5, 1\)"),
        (MAC, {"mini_batch_size": 0, "decay": 1}, 2, None, "mini_batch_size=0"),
        (MAC, {"decay": -1}, 2, None, "decay=-1"),
        (SEVERAL, {"positives": 0}, 2, None, "positives=0"),
    ):
        with pytest.raises(ValueError, match=message):
            build(model, **options)(features(model, columns), labels)
