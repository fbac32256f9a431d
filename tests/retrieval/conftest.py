"""Folders that several tests of retrieval load."""

import pytest
import torch

from conjoin.hub import export
from conjoin.models.joint_encoder import JointEncoderModel
from conjoin.processing import ImageTextProcessor


@pytest.fixture(scope="session")
def own_export(tiny_checkpoints, tmp_path_factory):
    """Our own export, its model and its processor."""
    torch.manual_seed(0)
    model = JointEncoderModel.from_backbones(
        tiny_checkpoints["dinov2"], tiny_checkpoints["bert"], hidden_size=16, num_attention_heads=2
    ).eval()
    processor = ImageTextProcessor.from_backbones(tiny_checkpoints["dinov2"], tiny_checkpoints["bert"])
    return export(model, processor, tmp_path_factory.mktemp("own")), model, processor


@pytest.fixture(scope="session")
def sentence_folders(tiny_checkpoints, tmp_path_factory):
    """Folders of sentence-transformers: BERT with mean pooling, and CLIP."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    folders = {name: tmp_path_factory.mktemp(f"st-{name}") for name in ("bert", "clip")}
    modules = [Transformer(tiny_checkpoints["bert"]), Pooling(24, "mean"), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(folders["bert"]))
    SentenceTransformer(tiny_checkpoints["clip"], device="cpu").save_pretrained(str(folders["clip"]))
    return folders
