"""Models of sentence-transformers give the vectors that the library's `encode_query` and `encode_document` give."""

import json
import shutil

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding

from conjoin.hub import export
from conjoin.hub.build import mllm_model, mllm_processor
from conjoin.hub.sentence_model import load_sentence_model
from conjoin.retrieval import ItemEncoder, encode_collection, load_encoder, rank_items
from tiny_checkpoints import bert_tokenizer

TEXTS = ["a red apple", "two green chairs by the sea", "no", "photo.png 12"]
ROLES = ("encode", "encode_query", "encode_document")
PROMPTS = {
    "none": ({}, None),
    "empty": ({"query": "", "document": ""}, None),
    "both": ({"query": "find: ", "document": "passage: "}, None),
    "passage": ({"passage": "passage: "}, None),
    "corpus": ({"query": "ask ", "corpus": "corpus "}, None),
    "a default": ({"query": "", "other": "other: "}, "other"),
}


def changed(source, folder, **settings):
    """A copy of a model with other settings of sentence-transformers."""
    shutil.copytree(source, folder)
    path = folder / "config_sentence_transformers.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


def saved(folder, *modules, **options):
    SentenceTransformer(modules=list(modules), device="cpu", **options).save_pretrained(str(folder))
    return folder


def library(folder):
    return SentenceTransformer(str(folder), device="cpu")


@pytest.mark.parametrize("given", PROMPTS)
@pytest.mark.parametrize("role", ROLES)
def test_each_role_gets_the_prompt_that_the_library_gives(given, role, sentence_folders, tmp_path):
    prompts, default = PROMPTS[given]
    folder = changed(sentence_folders["bert"], tmp_path / "m", prompts=prompts, default_prompt_name=default)
    encoder, other = load_encoder(folder, batch_size=2, device="cpu"), library(folder)
    np.testing.assert_allclose(getattr(encoder, role)(TEXTS), getattr(other, role)(TEXTS), atol=1e-6)
    for how in [{"prompt": "tell: "}, {"prompt": ""}, *({"prompt_name": name} for name in prompts)]:
        found = getattr(encoder, role)(TEXTS, **how)
        np.testing.assert_allclose(found, getattr(other, role)(TEXTS, **how), atol=1e-6)
    assert encoder.is_symmetric == np.allclose(other.encode_query(TEXTS), other.encode_document(TEXTS))


FORMS = {
    "a text alone": ("a red apple", {}),
    "a conversation alone": ([{"role": "user", "content": "a red apple"}], {}),
    "positions of the arguments": (TEXTS, ("query", None, 2, False)),
    "a tensor": (TEXTS, {"convert_to_tensor": True}),
    "tensors": (TEXTS, {"convert_to_numpy": False}),
    "not normalised": (TEXTS, {"normalize_embeddings": False}),
    "cut": (TEXTS, {"truncate_dim": 8, "prompt_name": "query"}),
    "cut, not normalised": (TEXTS, {"truncate_dim": 8, "normalize_embeddings": False}),
    "a device": (TEXTS, {"device": "cpu", "precision": "float32"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_encode_has_the_signature_of_the_library(form, tiny_checkpoints, tmp_path):
    folder = saved(tmp_path / "m", *body(tiny_checkpoints), prompts={"query": "find: "})
    items, how = FORMS[form]
    given, options = (how, {}) if isinstance(how, tuple) else ((), how)
    theirs = "a red apple" if "conversation" in form else items  # of a model without a chat template
    found = load_encoder(folder, device="cpu").encode(items, *given, **options)
    wanted = library(folder).encode(theirs, *given, **{"normalize_embeddings": True} | options)
    assert type(found) is type(wanted) and len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_what_encode_cannot_do_is_refused_by_name(sentence_folders):
    encoder = load_encoder(sentence_folders["bert"], device="cpu", dtype="bfloat16")
    for how in ({"precision": "int8"}, {"batch_size": 0}, {"truncate_dim": 99}, {"device": "tpu9"}):
        with pytest.raises(ValueError, match=str(*how.values())):
            encoder.encode(TEXTS, **how)
    with pytest.raises(ValueError, match="dtype='bf16'; expected 'float32', 'bfloat16'"):
        load_encoder(sentence_folders["bert"], device="cpu", dtype="bf16")
    vectors = encoder.encode(TEXTS)
    np.testing.assert_allclose(encoder.similarity(vectors, vectors[0])[:, 0], vectors @ vectors[0], atol=1e-5)


def test_wrong_prompts(sentence_folders, tmp_path):
    folder = changed(sentence_folders["bert"], tmp_path / "m", prompts={"query": "find: "})
    encoder = load_encoder(folder, device="cpu")
    with pytest.raises(ValueError, match=r"has no prompt 'passage'; its prompts are \['query'"):
        encoder.encode_document(TEXTS, prompt_name="passage")
    with pytest.raises(ValueError, match="pass one of them"):
        encoder.encode_query(TEXTS, prompt="a", prompt_name="query")


def body(tiny_checkpoints):
    return [Transformer(tiny_checkpoints["bert"]), Pooling(24, "mean")]


def test_a_router_sends_queries_and_documents_through_their_sides(tiny_checkpoints, tmp_path):
    static = StaticEmbedding(bert_tokenizer(), embedding_dim=24)
    router = Router.for_query_document([static], body(tiny_checkpoints), default_route="document")
    folder = saved(tmp_path / "m", router, Normalize())
    encoder, other = load_encoder(folder, device="cpu"), library(folder)
    for role in ROLES:
        np.testing.assert_allclose(getattr(encoder, role)(TEXTS), getattr(other, role)(TEXTS), atol=1e-6)
    assert not encoder.is_symmetric
    assert np.abs(encoder.encode_query(TEXTS) - encoder.encode_document(TEXTS)).max() > 0.01
    rows = [{"id": str(row), "text": text} for row, text in enumerate(TEXTS)]
    result = rank_items(encode_collection(rows, encoder, tmp_path / "c"), encoder, TEXTS[:2], k=4, ranking="vectors")
    scores = other.encode_query(TEXTS[:2]) @ other.encode_document(TEXTS).T
    assert result.ids == [[str(row) for row in order] for order in (-scores).argsort(1, kind="stable")]
    np.testing.assert_allclose(result.scores, -np.sort(-scores, 1), atol=1e-5)


def test_static_embeddings(tmp_path):
    folder = saved(tmp_path / "m", StaticEmbedding(bert_tokenizer(), embedding_dim=16))
    encoder = load_encoder(folder, device="cpu")
    np.testing.assert_allclose(
        encoder.encode(TEXTS), library(folder).encode(TEXTS, normalize_embeddings=True), atol=1e-6
    )
    again = load_encoder(folder, device="cpu")
    assert (encoder.fingerprint, encoder.processing) == (again.fingerprint, again.processing)


def test_vectors_are_cut_as_the_model_says(sentence_folders, tmp_path):
    folder = changed(sentence_folders["bert"], tmp_path / "m", truncate_dim=8)
    encoder = load_encoder(folder, device="cpu")
    wanted = library(folder).encode(TEXTS, normalize_embeddings=True)
    assert wanted.shape == (4, 8) and encoder.dimension == 8
    np.testing.assert_allclose(encoder.encode(TEXTS), wanted, atol=1e-6)


def test_a_rank_that_cosines_do_not_give_is_refused(tiny_checkpoints, sentence_folders, tmp_path):
    parts = body(tiny_checkpoints)
    for similarity in ("dot", "euclidean", "manhattan"):
        folder = saved(tmp_path / similarity, *parts, similarity_fn_name=similarity)
        with pytest.raises(ValueError, match=rf"ranks by {similarity} .*collections rank by cosine"):
            load_encoder(folder, device="cpu")
    for similarity in ("dot", "euclidean"):  # of unit vectors: the order is the same
        folder = changed(sentence_folders["bert"], tmp_path / f"unit-{similarity}", similarity_fn_name=similarity)
        found = load_encoder(folder, device="cpu").encode(TEXTS)
        np.testing.assert_allclose(found, library(folder).encode(TEXTS), atol=1e-6)


def test_settings_are_part_of_the_fingerprint(sentence_folders, tmp_path):
    plain = load_encoder(sentence_folders["bert"], device="cpu").fingerprint
    for number, settings in enumerate([{"prompts": {"query": "q: "}}, {"truncate_dim": 8}]):
        folder = changed(sentence_folders["bert"], tmp_path / str(number), **settings)
        assert load_encoder(folder, device="cpu").fingerprint != plain


def test_images(sentence_folders, pictures):
    found = load_encoder(sentence_folders["clip"], device="cpu").encode([*TEXTS, *pictures])
    for items, rows in ((TEXTS, found[:4]), (pictures, found[4:])):
        wanted = library(sentence_folders["clip"]).encode(items, normalize_embeddings=True)
        np.testing.assert_allclose(rows, wanted, atol=1e-5)


def test_a_trial_picture_is_read_once_a_picture_comes(sentence_folders, pictures, monkeypatch):
    encoder, seen = load_encoder(sentence_folders["clip"], device="cpu"), []
    preprocess = encoder.model.model.preprocess
    spied = lambda inputs, **how: seen.extend(inputs) or preprocess(inputs, **how)  # noqa: E731
    monkeypatch.setattr(encoder.model.model, "preprocess", spied)
    encoder.encode(TEXTS)
    assert seen and not any("image" in each for each in seen)
    encoder.encode(pictures)
    assert sum("image" in each for each in seen) == len(pictures) + 2  # the library's own pixels, and ours


def test_a_text_is_never_a_path(sentence_folders, pictures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pictures[0].save("photo.png")
    encoder = load_encoder(sentence_folders["clip"], device="cpu")
    as_text, as_image, picture = encoder.encode([{"text": "photo.png"}, "photo.png", pictures[0]])
    np.testing.assert_allclose(as_image, picture, atol=1e-5)
    assert np.linalg.norm(as_text - as_image) > 0.1


def test_images_of_messages_reach_the_library_decoded(mllm_checkpoints, pictures, tmp_path, monkeypatch):
    """The library would fetch a URL by itself, without limits."""
    source, _ = mllm_checkpoints("qwen2_vl")
    folder = export(mllm_model(source), mllm_processor(source), tmp_path / "model")
    encoder, seen = ItemEncoder(*load_sentence_model(folder, trust_remote_code=True)), []
    preprocess = encoder.model.model.preprocess
    spied = lambda inputs, **how: seen.extend(inputs) or preprocess(inputs, **how)  # noqa: E731
    monkeypatch.setattr(encoder.model.model, "preprocess", spied)
    pictures[0].save(tmp_path / "a.png")
    monkeypatch.setenv("CONJOIN_ALLOW_URLS", "")
    content = [
        "plain",
        {"type": "image", "path": str(tmp_path / "a.png")},
        {"type": "text", "text": "b"},
        {"type": "image_url", "image_url": {"url": str(tmp_path / "a.png")}},
        {"type": "image", "image": None},
    ]
    messages = [{"role": "system", "content": "find"}, {"role": "user", "content": content}]
    encoder.encode([messages, [messages[1]]])
    seen = sorted((each for each in seen if isinstance(each, list)), key=len, reverse=True)  # and a trial picture
    for found in (seen[0][1], seen[1][0]):
        assert found["content"][0] == "plain" and found["content"][2::2] == content[2::2]
        for place in (1, 3):
            assert found["content"][place]["type"] == "image"
            assert np.array_equal(found["content"][place]["image"], pictures[0])
    assert seen[0][0] == messages[0]
    content[1] = {"type": "image", "url": "https://example.org/a.png"}
    with pytest.raises(ValueError, match="URLs are not fetched"):
        encoder.encode([messages])


def test_chat_messages_beside_other_items(mllm_checkpoints, pictures, tmp_path):
    """The library cannot mix them in a batch with items of the same modality."""
    source, _ = mllm_checkpoints("qwen2_vl")
    model, processor = mllm_model(source), mllm_processor(source)
    other = ItemEncoder(*load_sentence_model(export(model, processor, tmp_path), trust_remote_code=True))
    shown = [{"type": "image", "image": picture} for picture in pictures[:2]]
    chat = [{"role": "user", "content": [shown[0], {"type": "text", "text": "but like"}, shown[1]]}]
    items = [chat, {"image": pictures[2], "text": "a box"}, "a box", {"image": pictures[:2], "text": "both"}]
    for input_type in ("seq", "cat", "avg"):
        wanted = ItemEncoder(model, processor, input_type=input_type).encode(items)
        other.input_type = input_type
        np.testing.assert_allclose(other.encode(items), wanted, atol=1e-5)
