"""Folders that several tests of retrieval load."""

import pytest


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
