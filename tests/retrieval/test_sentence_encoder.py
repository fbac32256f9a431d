"""Models of sentence-transformers give the vectors that the library itself gives."""

import json
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from conjoin.retrieval import load_encoder
from conjoin.retrieval.sentence_encoder import SentenceTransformerProcessor, load_sentence_transformer

TEXTS = ["a red apple", "two green chairs by the sea", "no", "photo.png 12"]


def sentence_transformer(folder):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)


@pytest.mark.parametrize("instruction", [None, "query: ", "query:"])
def test_sentence_transformers_text(sentence_folders, instruction):
    found = load_encoder(sentence_folders["bert"], batch_size=2, device="cpu").encode(TEXTS, instruction=instruction)
    prompt = None if instruction is None else "query: "
    np.testing.assert_allclose(
        found, sentence_transformer(sentence_folders["bert"]).encode(TEXTS, prompt=prompt), atol=1e-5
    )


def test_sentence_transformers_images(sentence_folders, pictures):
    found = load_encoder(sentence_folders["clip"], device="cpu").encode([*TEXTS, *pictures])
    library = sentence_transformer(sentence_folders["clip"])
    for wanted, rows in ((library.encode(TEXTS, normalize_embeddings=True), found[:4]),
                         (library.encode(pictures, normalize_embeddings=True), found[4:])):  # fmt: skip
        np.testing.assert_allclose(rows, wanted, atol=1e-5)


def test_a_text_is_never_a_path(sentence_folders, pictures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pictures[0].save("photo.png")
    encoder = load_encoder(sentence_folders["clip"], device="cpu")
    as_text, as_image, picture = encoder.encode([{"text": "photo.png"}, "photo.png", pictures[0]])
    np.testing.assert_allclose(as_image, picture, atol=1e-5)
    assert np.linalg.norm(as_text - as_image) > 0.1


def test_images_of_messages_reach_the_library_decoded(pictures, tmp_path, monkeypatch):
    """The library would fetch a URL by itself, without limits."""
    pictures[0].save(tmp_path / "a.png")
    monkeypatch.setenv("CONJOIN_ALLOW_URLS", "")
    seen = []
    model = SimpleNamespace(
        supports=lambda modality: True, default_prompt_name=None, preprocess=lambda inputs, prompt: seen.extend(inputs)
    )
    content = [
        "plain",
        {"type": "image", "path": str(tmp_path / "a.png")},
        {"type": "text", "text": "b"},
        {"type": "image_url", "image_url": {"url": str(tmp_path / "a.png")}},
        {"type": "image", "image": None},
    ]
    messages = [{"role": "system", "content": "find"}, {"role": "user", "content": content}]
    SentenceTransformerProcessor(model)([messages, messages[1]])
    for found in (seen[0][1], seen[1]):
        assert found["content"][0] == "plain" and found["content"][2::2] == content[2::2]
        for place in (1, 3):
            assert found["content"][place]["type"] == "image"
            assert np.array_equal(found["content"][place]["image"], pictures[0])
    assert seen[0][0] == messages[0]
    content[1] = {"type": "image", "url": "https://example.org/a.png"}
    with pytest.raises(ValueError, match="URLs are not fetched"):
        SentenceTransformerProcessor(model)([messages])


def test_the_default_prompt_is_part_of_the_model(sentence_folders, tmp_path):
    folder = shutil.copytree(sentence_folders["bert"], tmp_path / "prompted")
    path = folder / "config_sentence_transformers.json"
    settings = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    plain, prompted = load_encoder(sentence_folders["bert"], device="cpu"), load_encoder(folder, device="cpu")
    np.testing.assert_allclose(prompted.encode(TEXTS), plain.encode(TEXTS, instruction="query:"), atol=1e-6)
    assert prompted.fingerprint != plain.fingerprint


def test_without_the_library_the_extra_is_named(sentence_folders, own_export, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ImportError, match=r'pip install "conjoin\[st\]"'):
        load_encoder(sentence_folders["bert"], device="cpu")
    assert load_encoder(own_export[0], device="cpu").encode(["a"]).shape == (1, 16)


def test_chat_messages_beside_other_items(mllm_checkpoints, pictures, tmp_path):
    """The library cannot mix them in a batch with items of the same modality."""
    from conjoin.hub import export
    from conjoin.models.mllm_retriever import MllmRetrieverModel
    from conjoin.processing import MllmRetrieverProcessor
    from conjoin.retrieval import ItemEncoder

    source, _ = mllm_checkpoints("qwen2_vl")
    model, processor = MllmRetrieverModel.from_mllm(source), MllmRetrieverProcessor.from_mllm(source)
    other = ItemEncoder(*load_sentence_transformer(export(model, processor, tmp_path), trust_remote_code=True))
    shown = [{"type": "image", "image": picture} for picture in pictures[:2]]
    chat = [{"role": "user", "content": [shown[0], {"type": "text", "text": "but like"}, shown[1]]}]
    items = [chat, {"image": pictures[2], "text": "a box"}, "a box", {"image": pictures[:2], "text": "both"}]
    for input_type in ("seq", "cat", "avg"):
        wanted = ItemEncoder(model, processor, input_type=input_type).encode(items)
        other.input_type = input_type
        np.testing.assert_allclose(other.encode(items), wanted, atol=1e-5)
