"""What sentence-transformers reads is written with every processor, so every saved model loads there."""

import json

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from conjoin.hub import export, load_model
from conjoin.hub.build import image_text_processor, mllm_model, mllm_processor, score_fusion_model
from conjoin.processing.sentence_files import SENTENCE_FILES
from conjoin.storage import processor_digest

PROMPTS = {"query": "find ", "document": "read "}


@pytest.fixture(scope="module")
def parts(tiny_checkpoints, mllm_checkpoints):
    """A model of two towers and one of an MLLM, with their processors."""
    clip, mllm = tiny_checkpoints["clip"], mllm_checkpoints("qwen2_vl")[0]
    return {
        "score_fusion": (score_fusion_model(clip).eval(), image_text_processor(clip, clip, prompts=PROMPTS)),
        "mllm_retriever": (mllm_model(mllm, 2), mllm_processor(mllm, prompts=PROMPTS)),
    }


def read(folder, name="config_sentence_transformers.json"):
    return json.loads((folder / name).read_text())


@torch.no_grad()
def embed(model, processor, items, **options):
    return model(**processor(items, **options)).embeddings.numpy()


@pytest.mark.parametrize("name", ["score_fusion", "mllm_retriever"])
def test_a_model_saved_by_the_python_api_loads(name, parts, pictures, tmp_path):
    model, processor = parts[name]
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    encoder = SentenceTransformer(str(tmp_path), trust_remote_code=True, device="cpu")
    texts = ["a b", "c"]
    for encode, told in (
        (encoder.encode, None),
        (encoder.encode_query, PROMPTS["query"]),
        (encoder.encode_document, PROMPTS["document"]),
    ):
        expected = embed(model, processor, texts, **({} if told is None else {"instruction": told}))
        assert np.abs(encode(texts) - expected).max() <= 1e-5, told
    assert np.abs(encoder.encode(pictures[:2]) - embed(model, processor, pictures[:2])).max() <= 1e-5
    assert load_model(tmp_path)[1].prompts == PROMPTS


def test_export_writes_the_same_files(parts, tmp_path):
    model, processor = parts["score_fusion"]
    processor.save_pretrained(tmp_path / "saved")
    export(model, processor, tmp_path / "exported")
    for name in SENTENCE_FILES:
        assert read(tmp_path / "saved", name) == read(tmp_path / "exported", name), name
    settings = read(export(model, processor, tmp_path / "exported", {"query": "search "}))
    assert settings["prompts"] == {"query": "search ", "document": ""}
    assert settings["model_type"] == "SentenceTransformer"
    assert settings["requirements"].keys() == {"sentence-transformers", "transformers"}


def test_prompts_changed_in_sentence_transformers_are_saved(parts, tmp_path):
    folder = export(*parts["score_fusion"], tmp_path / "model")
    encoder = SentenceTransformer(str(folder), trust_remote_code=True, device="cpu", prompts={"query": "seek "})
    encoder.save(str(tmp_path / "again"), create_model_card=False)
    assert read(tmp_path / "again")["prompts"] == {"query": "seek ", "document": "read "}


def test_pushing_a_processor_pushes_them(parts, tmp_path, monkeypatch):
    pushed = []
    _, processor = parts["score_fusion"]
    monkeypatch.setattr(type(processor), "push_to_hub", lambda self, *args, **kwargs: pushed.append((args, kwargs)))
    processor.save_pretrained(tmp_path / "model", push_to_hub=True, repo_id="me/model", private=True)
    assert pushed == [(("me/model",), {"private": True})]


def test_prompts_do_not_change_what_a_processor_is(parts):
    _, processor = parts["mllm_retriever"]
    before = processor_digest(processor)
    processor.prompts = None
    assert processor_digest(processor) == before
    processor.prompts = PROMPTS
