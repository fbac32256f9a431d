"""PUMA's self-distillation in the trainer of sentence-transformers, for embedders of images and of texts alone."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import Qwen3Config, Qwen3Model

from conjoin.losses import info_nce, self_distillation
from conjoin.st.losses import CachedSelfDistillationLoss
from conjoin.st.pruning import prune
from tiny_embedders import drop_video, save_embedder
from tiny_mllms import CHAT, tokenizer

TEXTS = [[f"{word} {number}" for number in range(12)] for word in ("query", "right one", "wrong")]


@pytest.fixture(autouse=True)
def without_video(monkeypatch):
    drop_video(monkeypatch)


@pytest.fixture
def texts_only(tmp_path):
    """A tiny Qwen3-Embedding: a decoder, the last token, unit length."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = Qwen3Model(Qwen3Config(**sizes, num_key_value_heads=2, head_dim=8, vocab_size=300))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(tmp_path / "decoder")
    tokenizer(CHAT).save_pretrained(tmp_path / "decoder")
    modules = [Transformer(str(tmp_path / "decoder")), Pooling(32, "lasttoken"), Normalize()]
    return SentenceTransformer(modules=modules, device="cpu")


@pytest.fixture
def embedder(tmp_path):
    save_embedder(tmp_path / "embedder")
    return SentenceTransformer(str(tmp_path / "embedder"), device="cpu")


def test_the_loss_is_the_plain_functions(texts_only):
    student = prune(texts_only, 2).eval()
    loss = CachedSelfDistillationLoss(student, texts_only, distill_weight=0.3, mini_batch_size=5)
    found = loss([student.preprocess(column) for column in TEXTS])
    found.backward()
    gradients = [parameter.grad.clone() for parameter in student.parameters() if parameter.grad is not None]
    student.zero_grad()
    (q, p, n), (tq, tp, tn) = (
        [each(each.preprocess(column))["sentence_embedding"] for column in TEXTS] for each in (student, texts_only)
    )
    distance = (self_distillation(q, tq, p, tp, "cosine") + self_distillation(q, tq, n, tn, "cosine")) / 2
    expected = 0.7 * info_nce(q, torch.cat([p, n]), 0.05) + 0.3 * distance
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    expected.backward()
    plain = [parameter.grad for parameter in student.parameters() if parameter.grad is not None]
    assert sum(gradient.abs().sum() for gradient in plain) > 1e-3
    torch.testing.assert_close(gradients, plain, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["texts_only", "embedder"])
def test_a_pruned_model_learns_to_embed_as_the_whole(name, request, tmp_path, pictures):
    teacher = request.getfixturevalue(name)
    student = prune(teacher, 2)
    items = ["query 3", "right one 5", *([] if name == "texts_only" else [pictures[1]])]
    whole = np.concatenate([teacher.encode([item]) for item in items])
    before = np.concatenate([student.encode([item]) for item in items])
    loss = CachedSelfDistillationLoss(student, teacher, mini_batch_size=4)
    rows = {"query": TEXTS[0], "positive": TEXTS[1] if name == "texts_only" else [*pictures] * 3}
    args = SentenceTransformerTrainingArguments(str(tmp_path / "run"), max_steps=25, per_device_train_batch_size=12,
        learning_rate=2e-3, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True)  # fmt: skip
    rows = Dataset.from_dict(rows)
    SentenceTransformerTrainer(model=student, args=args, train_dataset=rows, loss=loss).train()
    after = np.concatenate([student.encode([item]) for item in items])
    assert (after * whole).sum(1).mean() > (before * whole).sum(1).mean() + 0.05
    assert np.array_equal(np.concatenate([teacher.encode([item]) for item in items]), whole)
    student.save_pretrained(str(tmp_path / "saved"))
    saved = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert saved[0].model.config.get_text_config().num_hidden_layers == 2
    assert np.abs(saved.encode(items[:2]) - after[:2]).max() <= 1e-5
