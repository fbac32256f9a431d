"""Exported models in sentence-transformers: the vectors and the gradients of this package."""

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)

from conjoin.hub import export
from conjoin.retrieval import load_encoder


def load(folder, **options):
    return SentenceTransformer(str(folder), trust_remote_code=True, device="cpu", **options)


@torch.no_grad()
def vectors(model, processor, items):
    return model(**processor(items)).embeddings.numpy()


@pytest.mark.parametrize("name", ["score_fusion, siglip", "token_fusion", "mllm_retriever"])
def test_cut_texts_keep_their_ends(name, exports):
    """The library writes the end of a short text's prompt over the end of each cut text."""
    folder, model, processor = exports(name)
    limit = processor.tokenizer.model_max_length
    beginning = "a red box with" + " many words" * 200
    texts = ["shared " + beginning, "shared " + beginning[::-1], "7 more words", "x"]
    encoder = load(folder)
    if name == "mllm_retriever":
        encoder.max_seq_length = limit = 120
    expected = model(**processor(texts, max_length=limit)).embeddings.detach().numpy()
    assert np.abs(expected[0] - expected[1]).max() > 1e-3
    assert np.abs(encoder.encode(texts) - expected).max() <= 1e-6
    assert np.abs(encoder.encode(texts[:1]) - expected[:1]).max() <= 1e-6


@pytest.mark.parametrize("name", ["token_fusion", "mllm_retriever"])
def test_a_missing_picture_is_a_missing_part(name, exports, pictures):
    folder, model, processor = exports(name)
    encoder = load(folder)
    rows = [{"image": pictures[0], "text": "red"}, {"image": None, "text": "a box"}]
    rows += [{"image": pictures[1], "text": None}]
    expected = vectors(model, processor, [rows[0], "a box", pictures[1]])
    assert np.abs(encoder.encode(rows) - expected).max() <= 1e-5
    assert np.abs(encoder.encode(rows[1:2]) - expected[1]).max() <= 1e-5
    with pytest.raises(ValueError, match=r"item 1: .* has neither text nor image"):
        encoder.encode([rows[0], {"image": None, "text": None}])


def test_the_gradient_cache_of_the_library(exports, pictures):
    """Chunks of a batch give the gradients of the whole batch, wherever pictures are."""
    encoder = load(exports("mllm_retriever")[0]).train()
    columns = [["a red box", {"image": pictures[:2]}, {"image": pictures[2], "text": "7"}]]
    columns += [[pictures[3], "more", pictures[1]]]
    losses = MultipleNegativesRankingLoss(encoder), CachedMultipleNegativesRankingLoss(encoder, mini_batch_size=1)
    gradients = []
    for loss in losses:
        encoder.zero_grad()
        loss([encoder.preprocess(column) for column in columns], None).backward()
        gradients.append({name: p.grad.clone() for name, p in encoder.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 20
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-5)


def interleaved(pictures):
    content = ["like", pictures[0], "in the colour of", pictures[1], "but new"]
    kinds = ({"type": "text" if isinstance(part, str) else "image"} for part in content)
    return [
        {"role": "user", "content": [kind | {kind["type"]: part} for kind, part in zip(kinds, content, strict=True)]}
    ]


def test_interleaved_items(exports, pictures):
    """An MLLM reads chat messages in their order; several per call, mixed with other items, and as one picture."""
    folder, model, processor = exports("mllm_retriever")
    items = [interleaved(pictures), interleaved(pictures[2:]), {"image": pictures[:3]}, "a box"]
    expected = vectors(model, processor, items)
    encoder = load(folder)
    assert np.abs(encoder.encode(items) - expected).max() <= 1e-5
    assert np.abs(encoder.encode(items[:2]) - expected[:2]).max() <= 1e-5
    assert np.abs(load_encoder(folder, device="cpu").encode(items) - expected).max() <= 1e-5
    joined = load(folder, processor_kwargs={"input_type": "cat"}).encode(items)
    assert np.abs(joined - load_encoder(folder, device="cpu", input_type="cat").encode(items)).max() <= 1e-5
    assert np.abs(joined - expected)[:3].min(axis=0).max() > 1e-3 and np.abs(joined - expected)[3].max() <= 1e-5


def test_interleaved_items_of_a_model_of_one_image(exports, pictures, tmp_path):
    """`seq` refuses them and says what to do; `cat` is an option, and is saved with a model that was trained so."""
    folder, model, processor = exports("token_fusion")
    items = [interleaved(pictures), {"image": pictures[2], "text": "a box"}]
    with pytest.raises(ValueError, match=r'2 images, but this model takes one .*input_type="cat" of the processor'):
        load(folder).encode(items)
    expected = load_encoder(folder, device="cpu", input_type="cat").encode(items)
    assert np.abs(load(folder, processor_kwargs={"input_type": "cat"}).encode(items) - expected).max() <= 1e-5
    trained = type(processor).from_pretrained(folder, input_type="cat")
    saved = load(export(model, trained, tmp_path))
    assert np.abs(saved.encode(items) - expected).max() <= 1e-5
    assert np.abs(saved.encode(items[:1]) - expected[:1]).max() <= 1e-5
    with pytest.raises(ValueError, match='a processor takes "seq" or "cat"'):
        load(folder, processor_kwargs={"input_type": "avg"})


@pytest.mark.slow
def test_several_processes(exports, pictures):
    """A pool pickles the model; the hook that gradient checkpointing leaves cannot be pickled."""
    encoder = load(exports("mllm_retriever")[0])
    items = ["a box", pictures[0], {"image": pictures[1], "text": "7"}, "x"]
    expected = encoder.encode(items)
    encoder[0].auto_model.gradient_checkpointing_enable()
    encoder[0].auto_model.disable_input_require_grads()
    pool = encoder.start_multi_process_pool(["cpu", "cpu"])
    try:
        assert np.abs(encoder.encode(items, pool=pool, chunk_size=2) - expected).max() <= 1e-6
    finally:
        encoder.stop_multi_process_pool(pool)
