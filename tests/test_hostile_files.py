"""Files that are made to run code, to fill memory or to confuse: a `ValueError` that names the file."""

import json
import os
import pickle

import pyarrow as pa
import pytest
import torch

from conjoin.retrieval import Collection, load_encoder
from conjoin.retrieval.faiss_index import FaissIndex
from conjoin.trainers import load_recipe
from tiny_collections import clustered, made
from tiny_embedders import save_embedder

VECTORS = clustered(20, 8)


class Code:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def recipe(text):
    def read(folder):
        (folder / "hostile.yaml").write_text(text)
        load_recipe(folder / "hostile.yaml")

    return read


def weights(content):
    """A stock model whose weights are `content(mark)`; the code in them would make the folder `mark`."""

    def read(folder):
        from transformers import ViTConfig

        ViTConfig(image_size=16, patch_size=8).save_pretrained(folder / "hostile")
        content(Code(folder / "mark"), folder / "hostile/pytorch_model.bin")
        try:
            load_encoder(folder / "hostile", pooling="cls")
        finally:
            assert not (folder / "mark").exists()

    return read


def embedder(name, text):
    """An embedder with another file of a name."""

    def read(folder):
        save_embedder(folder / "hostile")
        (folder / "hostile" / name).write_text(text)
        load_encoder(folder / "hostile").encode(["a"])

    return read


def sizes(**more):
    """An embedder whose configuration asks for more than its weights hold."""

    def read(folder):
        save_embedder(folder / "hostile")
        config = folder / "hostile/config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "text_config": more}))
        load_encoder(folder / "hostile")

    return read


def words(name, size):
    """An embedder with a file of words of so many bytes."""

    def read(folder):
        save_embedder(folder / "hostile")
        (folder / "hostile" / name).touch()
        os.truncate(folder / "hostile" / name, size)
        load_encoder(folder / "hostile")

    return read


def fewer_ids(folder):
    """An index of FAISS of more vectors than ids."""
    faiss = pytest.importorskip("faiss")
    index = faiss.IndexFlatIP(8)
    index.add(VECTORS)
    FaissIndex(index, pa.array(["a"]), {"version": 1}).write(folder / "hostile")
    FaissIndex.open(folder / "hostile", 1)


def template(text):
    return embedder("chat_template.jinja", text)


def versions(name, content):
    def read(folder):
        made(folder / "hostile", VECTORS)
        (folder / "hostile/data/train.lance/_versions" / name).write_bytes(content)
        Collection(folder / "hostile")

    return read


CASES = {
    "digits": (recipe(f"seed: {'9' * 20_000}"), "hostile.yaml cannot be read: "),
    "deep YAML": (recipe("[" * 20_000), "hostile.yaml cannot be read: .*recursion.*; expected YAML"),
    "deep JSON": (embedder("config.json", "[" * 100_000), "hostile/config.json' cannot be read: .*recursion"),
    "a million layers": (sizes(num_hidden_layers=10**6), "hostile': config.json has num_hidden_layers=1,000,000"),
    "wide layers": (sizes(hidden_size=10**9), "hostile': config.json has hidden_size=1,000,000,000; its weights:"),
    "huge settings": (
        words("tokenizer.json", 2**27 + 1),
        "hostile': tokenizer.json has 134,217,729 bytes; the limit is",
    ),
    "fewer ids than vectors": (fewer_ids, "index.faiss' holds 20 vectors, rows.parquet 1 ids"),
    "no tokenizer": (embedder("tokenizer.json", "{"), "cannot load the model .*hostile': Expecting property name"),
    "a pickle": (weights(lambda code, path: path.write_bytes(pickle.dumps(code))), "hostile': .*as safetensors"),
    "a pickle of PyTorch": (weights(torch.save), "hostile': .*as safetensors"),
    "no weights": (weights(lambda code, path: path.write_bytes(b"hello")), "hostile': it cannot be read"),
    "a broken template": (template("{% if %}"), "chat template of .*hostile'.*TemplateSyntaxError"),
    "a template of code": (template("{{ ''.__class__.__mro__ }}"), "chat template of .*hostile'.*SecurityError"),
    "a template that fails": (template("{{ 1 / 0 }}"), "chat template of .*hostile'.*ZeroDivisionError"),
    "a version 0": (versions("0.manifest", b"x"), "hostile' cannot be read"),
    "a version of both kinds": (versions(f"{2:020}.manifest", b""), "hostile' cannot be read"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_file_is_a_named_error(case, tmp_path):
    read, message = CASES[case]
    with pytest.raises((ValueError, OSError), match=message):
        read(tmp_path)
