"""Exported models in sentence-transformers: the vectors and the gradients of this package."""

from functools import partial

import numpy as np
import pytest
import torch
from checks import embed, far, load, message
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)

from conjoin.hub import export
from conjoin.retrieval import load_encoder

load_code = partial(load, trust_remote_code=True)


@pytest.mark.parametrize("name", ["score_fusion, siglip", "token_fusion", "mllm_retriever"])
def test_cut_texts_keep_their_ends(name, exports):
    """The library writes the end of a short text's prompt over the end of each cut text."""
    folder, model, processor = exports(name)
    limit = processor.tokenizer.model_max_length
    beginning = "a red box with" + " many words" * 200
    texts = ["shared " + beginning, "shared " + beginning[::-1], "7 more words", "x"]
    encoder = load_code(folder)
    if name == "mllm_retriever":
        encoder.max_seq_length = limit = 120
    expected = model(**processor(texts, max_length=limit)).embeddings.detach().numpy()
    assert far(expected[0], expected[1]) > 1e-3
    assert far(encoder.encode(texts), expected) <= 1e-6
    assert far(encoder.encode(texts[:1]), expected[:1]) <= 1e-6


@pytest.mark.parametrize("name", ["token_fusion", "mllm_retriever"])
def test_a_missing_picture_is_a_missing_part(name, exports, pictures):
    folder, model, processor = exports(name)
    encoder = load_code(folder)
    rows = [{"image": pictures[0], "text": "red"}, {"image": None, "text": "a box"}]
    rows += [{"image": pictures[1], "text": None}]
    expected = embed(model, processor, [rows[0], "a box", pictures[1]])
    assert far(encoder.encode(rows), expected) <= 1e-5
    assert far(encoder.encode(rows[1:2]), expected[1]) <= 1e-5
    with pytest.raises(ValueError, match=r"item 1: .* has neither text nor image"):
        encoder.encode([rows[0], {"image": None, "text": None}])


def test_the_gradient_cache_of_the_library(exports, pictures):
    """Chunks of a batch give the gradients of the whole batch, wherever pictures are."""
    encoder = load_code(exports("mllm_retriever")[0]).train()
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
    return message("like", pictures[0], "in the colour of", pictures[1], "but new")


def test_interleaved_items(exports, pictures):
    """An MLLM reads chat messages in their order; several per call, mixed with other items, and as one picture."""
    folder, model, processor = exports("mllm_retriever")
    items = [interleaved(pictures), interleaved(pictures[2:]), {"image": pictures[:3]}, "a box"]
    expected = embed(model, processor, items)
    encoder = load_code(folder)
    assert far(encoder.encode(items), expected) <= 1e-5
    assert far(encoder.encode(items[:2]), expected[:2]) <= 1e-5
    assert far(load_encoder(folder, device="cpu").encode(items), expected) <= 1e-5
    joined = load_code(folder, processor_kwargs={"input_type": "cat"}).encode(items)
    assert far(joined, load_encoder(folder, device="cpu", input_type="cat").encode(items)) <= 1e-5
    assert np.abs(joined - expected)[:3].min(axis=0).max() > 1e-3 and np.abs(joined - expected)[3].max() <= 1e-5


def test_interleaved_items_of_a_model_of_one_image(exports, pictures, tmp_path):
    """`seq` refuses them and says what to do; `cat` is an option, and is saved with a model that was trained so."""
    folder, model, processor = exports("token_fusion")
    items = [interleaved(pictures), {"image": pictures[2], "text": "a box"}]
    with pytest.raises(ValueError, match=r'2 images, but this model takes one .*input_type="cat" of the processor'):
        load_code(folder).encode(items)
    expected = load_encoder(folder, device="cpu", input_type="cat").encode(items)
    assert far(load_code(folder, processor_kwargs={"input_type": "cat"}).encode(items), expected) <= 1e-5
    trained = type(processor).from_pretrained(folder, input_type="cat")
    saved = load_code(export(model, trained, tmp_path))
    assert far(saved.encode(items), expected) <= 1e-5
    assert far(saved.encode(items[:1]), expected[:1]) <= 1e-5
    with pytest.raises(ValueError, match='a processor takes "seq" or "cat"'):
        load_code(folder, processor_kwargs={"input_type": "avg"})


@pytest.mark.slow
def test_several_processes(exports, pictures):
    """A pool pickles the model; the hook that gradient checkpointing leaves cannot be pickled."""
    encoder = load_code(exports("mllm_retriever")[0])
    items = ["a box", pictures[0], {"image": pictures[1], "text": "7"}, "x"]
    expected = encoder.encode(items)
    encoder[0].auto_model.gradient_checkpointing_enable()
    encoder[0].auto_model.disable_input_require_grads()
    pool = encoder.start_multi_process_pool(["cpu", "cpu"])
    try:
        assert far(encoder.encode(items, pool=pool, chunk_size=2), expected) <= 1e-6
    finally:
        encoder.stop_multi_process_pool(pool)
