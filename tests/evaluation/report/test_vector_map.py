import base64
import io
import sys
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from conjoin.evaluation import EvaluateOptions, RetrievalTask, Rows, evaluate_tasks
from conjoin.evaluation.benchmark import complete, task_results
from conjoin.evaluation.report import vector_map as module
from conjoin.evaluation.report.vector_map import vector_map
from tiny_encoder import tiny_encoder

COLOURS = {"text": (0, 0, 255), "image": (255, 165, 0), "image + text": (0, 128, 0)}


def scores_of(folder, count=8, **options):
    """Words search pictures and pairs."""
    pictures = [{"id": f"p{n}", "image": Image.new("RGB", (5, 5), (n * 20, 9, 9))} for n in range(count)]
    pairs = [{"id": f"b{n}", "image": Image.new("RGB", (5, 5), (9, n * 20, 9)), "text": str(n)} for n in range(count)]
    words = Rows("words", [{"id": f"w{n}", "text": f"a thing {n}"} for n in range(count)])
    corpus = Rows("pictures", pictures), Rows("pairs", pairs)
    task = RetrievalTask("across", words, corpus, {f"w{n}": [f"p{n}"] for n in range(count)})
    return evaluate_tasks(tiny_encoder(), [task], folder, EvaluateOptions(**options))


def drawn(figure):
    image = Image.open(io.BytesIO(base64.b64decode(figure.image.split(",")[1]))).convert("RGB")
    pixels = np.asarray(image).reshape(-1, 3).tolist()
    return Counter(name for pixel in map(tuple, pixels) for name, colour in COLOURS.items() if pixel == colour)


def test_every_item_is_drawn_in_the_colour_of_its_modality(tmp_path):
    scores = scores_of(tmp_path)
    figure = vector_map(scores)
    assert figure.title.startswith("t-SNE of 24 items: image orange, image + text green, text blue")
    found = drawn(figure)
    assert set(found) == set(COLOURS) and found["text"] > 1.1 * found["image"]  # squares
    assert vector_map(scores) == figure


def test_of_many_items_some_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SHOWN", 9)
    assert vector_map(scores_of(tmp_path)).title.startswith("t-SNE of 9 items")


def test_a_report_has_the_map_if_it_is_asked_for(tmp_path):
    for wanted in (True, False):
        scores = scores_of(tmp_path, vector_map=wanted)
        assert len(complete(task_results("t", "s", scores), scores).figures) == wanted


def test_too_few_items_and_a_missing_package_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="at least 4 items, got 3"):
        vector_map(scores_of(tmp_path, 1))
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    with pytest.raises(ImportError, match=r'needs scikit-learn: pip install "conjoin\[st\]"'):
        vector_map(scores_of(tmp_path / "other"))
