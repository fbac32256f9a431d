"""A saved MLLM retriever works without the package and without the model it was cut from, on every road."""

import argparse
import json
import shutil

import numpy as np
import pytest
import torch

from conjoin.cli import encode, search
from conjoin.hub import export, model_upload
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.processing import MllmRetrieverProcessor

READ = """
import numpy as np, torch
from PIL import Image
from transformers import AutoModel, AutoProcessor
from sentence_transformers import SentenceTransformer

for folder in {folders!r}:
    image = Image.open(folder + "/picture.png")
    pair = {{"image": image, "text": "a b"}}
    items = ["a b", image, pair]
    shown = {{"type": "image", "image": image}}
    message = [{{"role": "user", "content": [shown, {{"type": "text", "text": "a b"}}, shown]}}]
    model = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules"), type(model).__module__
    with torch.no_grad():
        vectors = model(**processor(items)).embeddings.numpy()
        interleaved = model(**processor([message])).embeddings.numpy()
        prompted = model(**processor(items, instruction="find")).embeddings.numpy()
    encoder = SentenceTransformer(folder, trust_remote_code=True, device="cpu")
    np.savez(
        folder + "/vectors.npz",
        auto=vectors,
        mixed=encoder.encode(items),
        alone=np.concatenate([encoder.encode([item]) for item in items]),
        interleaved=np.stack([interleaved[0], encoder.encode([message])[0]]),
        prompted=np.stack([prompted, encoder.encode(items, prompt_name="query")]),
        dimension=encoder.get_embedding_dimension(),
    )
    model.save_pretrained(folder + "/again")
"""


@pytest.fixture(scope="module")
def exported(mllm_checkpoints, pictures, tmp_path_factory):
    """Folders of exported models and what their vectors are; the checkpoints they come from are gone."""
    folders = {}
    for name in ("qwen2_vl", "llava"):
        source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp(name)
        shutil.copytree(mllm_checkpoints(name)[0], source, dirs_exist_ok=True)
        model = MllmRetrieverModel.from_mllm(str(source), 2)
        processor = MllmRetrieverProcessor.from_mllm(str(source))
        export(model, processor, folder, prompts={"query": "find"})
        shutil.rmtree(source)
        pictures[1].save(folder / "picture.png")
        with torch.no_grad():
            batch = processor(["a b", pictures[1], {"image": pictures[1], "text": "a b"}])
            folders[folder] = model(**batch).embeddings.numpy()
    return folders


@pytest.mark.slow
def test_the_same_vectors_without_the_package(exported, run_without_conjoin, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    run_without_conjoin(READ.format(folders=[str(folder) for folder in exported]))
    for folder, expected in exported.items():
        found = np.load(folder / "vectors.npz")
        assert np.array_equal(found["auto"], expected)
        for key in ("mixed", "alone"):
            assert np.abs(found[key] - expected).max() <= 1e-5, key
        for key in ("interleaved", "prompted"):
            assert np.abs(found[key][0] - found[key][1]).max() <= 1e-5, key
        assert np.abs(found["prompted"][0] - expected).max() > 1e-3
        assert found["dimension"] == 32 == expected.shape[1]
        assert (folder / "again/modeling_mllm_retriever.py").is_file()
        assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) < 160_000


def test_encode_index_and_search(exported, pictures, tmp_path, capsys):
    folder = next(iter(exported))
    data = tmp_path / "data"
    data.mkdir()
    for number, picture in enumerate(pictures):
        picture.save(data / f"p{number}.png")
        (data / f"p{number}.txt").write_text(f"picture {number}")

    def conjoin(*arguments):
        parser = argparse.ArgumentParser()
        subparsers = parser.add_subparsers(required=True)
        for command in (encode, search):
            command.add_parser(subparsers)
        args = parser.parse_args([str(argument) for argument in arguments])
        args.func(args)

    conjoin(
        "encode", folder, data, "--out", tmp_path / "pairs", "--batch-size", 3, "--quiet", "--no-bf16", "--workers", 1
    )
    capsys.readouterr()
    query = ("--image", data / "p2.png", "--text", "picture 2")
    conjoin("search", tmp_path / "pairs", *query, "--json", "-k", 4)
    hits = json.loads(capsys.readouterr().out)["results"]
    assert hits[0]["id"].startswith("p2") and hits[0]["score"] > 0.99999 and len(hits) == 4


def test_the_card_says_what_it_is(exported):
    for folder, kinds in zip(
        exported, (("qwen2_vl_vision", "qwen2_vl_text"), ("clip_vision_model", "llama")), strict=True
    ):
        card = model_upload(folder, "me/puma").card
        assert "vectors of 32 dimensions" in card and "MLLM retriever" in card
        assert all(f"`{kind}`" in card for kind in kinds), card
