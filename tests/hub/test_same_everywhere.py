"""Vectors and fingerprints of a folder are the same on each machine; vectors have unit length in any precision."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import AutoImageProcessor

from conjoin.hub import export, export_onnx, export_stock
from conjoin.retrieval import load_encoder
from tiny_kinds import KINDS

pytestmark = pytest.mark.usefixtures("without_video")


def own(kind, write=export):
    """What saves a model of this package, of weights of a type."""

    def save(dtype, folder, tiny, mllms):
        model, processor = KINDS[kind](tiny, mllms)
        return write(model.to(dtype).eval(), processor, folder)

    return save


def bare(name):
    """What saves a checkpoint of transformers; one of texts with the files of sentence-transformers."""

    def save(dtype, folder, tiny, mllms):
        shutil.copytree(tiny[name], folder)
        weights = load_file(folder / "model.safetensors")
        half = {key: value.to(dtype) if value.is_floating_point() else value for key, value in weights.items()}
        save_file(half, folder / "model.safetensors", {"format": "pt"})
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": str(dtype).removeprefix("torch.")}))
        if name == "bert":
            modules = [Transformer(str(folder)), Pooling(24, "mean"), Normalize()]
            SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(folder))
        return folder

    return save


SAVED = {
    "joint encoder": own("joint_encoder"),
    "token fusion": own("token_fusion"),
    "score fusion": own("score_fusion"),
    "MLLM retriever": own("mllm_retriever"),
    "stock CLIP": own("score_fusion", export_stock),
    "stock Qwen2-VL": own("mllm_retriever", export_stock),
    "stock LLaVA": own("mllm_retriever, llava", export_stock),
    "ONNX": own("joint_encoder", export_onnx),
    "CLIP": bare("clip"),
    "BERT of sentence-transformers": bare("bert"),
}


HALF = [(kind, torch.bfloat16) for kind in SAVED if kind != "ONNX"]
HALF += [("MLLM retriever", torch.float16), ("CLIP", torch.float16)]
HALF.append(pytest.param("ONNX", torch.bfloat16, marks=pytest.mark.slow))


@pytest.mark.parametrize(("kind", "dtype"), HALF)
def test_vectors_of_half_precision_have_unit_length(
    kind, dtype, tiny_checkpoints, mllm_checkpoints, pictures, tmp_path
):
    encoder = load_encoder(SAVED[kind](dtype, tmp_path / "m", tiny_checkpoints, mllm_checkpoints), device="cpu")
    if kind != "ONNX":
        assert next(encoder.model.parameters()).dtype == dtype
    pictures = [] if kind.startswith("BERT") else pictures
    vectors = encoder.encode(
        ["a red apple", "no", *pictures, *({"image": each, "text": "a box"} for each in pictures)]
    )
    np.testing.assert_allclose(np.linalg.norm(vectors.astype(np.float64), axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("kind", ["joint encoder", "token fusion", "score fusion", "MLLM retriever"])
def test_pixels_are_those_of_pillow_where_torchvision_is_installed(
    kind, tiny_checkpoints, mllm_checkpoints, pictures, tmp_path, monkeypatch
):
    """transformers then takes a class of torchvision, whatever class the folder names.

    What runs through sentence-transformers is read as that library reads it.
    """
    folder, taken = SAVED[kind](torch.float32, tmp_path / "m", tiny_checkpoints, mllm_checkpoints), []
    expected, read = load_encoder(folder, device="cpu").encode(pictures), AutoImageProcessor.from_pretrained

    class Brighter:
        """Adds to the pixels, as those of another library differ."""

        def __call__(self, *given, **options):
            batch = super().__call__(*given, **options)
            return batch | {"pixel_values": batch["pixel_values"] + 1}

    def of_torchvision(*given, **options):
        eye = read(*given, **options)
        name = type(eye).__name__.removesuffix("Pil")
        eye.__class__ = type(name, (Brighter, type(eye)), {})
        taken.append(name)
        return eye

    monkeypatch.setattr(AutoImageProcessor, "from_pretrained", of_torchvision)
    found = load_encoder(folder, device="cpu").encode(pictures)
    assert taken
    np.testing.assert_allclose(found, expected, atol=1e-6)


CODE = """
import sys
import torch
from conjoin.retrieval import load_encoder

torch.manual_seed(int(sys.argv[2]))
print(load_encoder(sys.argv[1], device="cpu").fingerprint)
"""


@pytest.mark.slow
def test_a_folder_without_a_pooler_has_one_fingerprint_in_each_process(tiny_checkpoints, tmp_path):
    """Else a collection is never its model's again: poolers of BERT are often left out."""
    folder = bare("bert")(torch.float32, tmp_path / "m", tiny_checkpoints, {})
    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if "pooler" not in name}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    command = [sys.executable, "-c", CODE, str(folder)]
    found = {load_encoder(folder, device="cpu").fingerprint}
    for seed in ("1", "2"):
        ran = subprocess.run(
            [*command, seed], capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}
        )
        assert ran.returncode == 0, ran.stderr
        found.add(ran.stdout.split()[-1])
    assert len(found) == 1
