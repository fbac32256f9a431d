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


def scores_of(folder, count=8, **options):
    """Words search pictures and pairs; three pictures search words."""
    pictures = [{"id": f"p{n}", "image": Image.new("RGB", (5, 5), (n * 20, 9, 9))} for n in range(count)]
    pairs = [{"id": f"b{n}", "image": Image.new("RGB", (5, 5), (9, n * 20, 9)), "text": str(n)} for n in range(count)]
    words = Rows("words", [{"id": f"w{n}", "text": f"a thing {n}"} for n in range(count)])
    corpus = Rows("pictures", pictures), Rows("pairs", pairs)
    tasks = [
        RetrievalTask("pictures", words, corpus, {f"w{n}": [f"p{n}"] for n in range(count)}),
        RetrievalTask("pairs", words, corpus, {f"w{n}": [f"b{n}"] for n in range(count)}),
        RetrievalTask("words", corpus[0], (words,), {f"p{n}": [f"w{n}"] for n in range(3)}),
    ]
    return evaluate_tasks(tiny_encoder(), tasks, folder, EvaluateOptions(**options))


def drawn(figure):
    """The colours of at least ten pixels."""
    image = Image.open(io.BytesIO(base64.b64decode(figure.image.split(",")[1]))).convert("RGB")
    counts = Counter(map(tuple, np.asarray(image).reshape(-1, 3).tolist()))
    return {"#{:02x}{:02x}{:02x}".format(*colour) for colour, count in counts.items() if count > 10}


def candidates(*kinds):
    """Candidates of tasks named `QUERY to CANDIDATE`."""
    return [module._Candidate(None, "x", kind.split(" to ")[1], kind) for kind in kinds]


def test_right_candidates_are_drawn_in_the_colour_of_their_modality(tmp_path):
    scores = scores_of(tmp_path)
    figure = vector_map(scores)
    assert figure.title.startswith("t-SNE of 19 right candidates; the colour is their modality, the shape is the task")
    assert set(module._COLOURS.values()) < drawn(figure)
    assert vector_map(scores) == figure
    assert set(module._COLOURS.values()) & drawn(vector_map(scores[:1])) == {module._COLOURS["image"]}


def test_each_task_shows_as_many_candidates_as_others(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(module, "_SHOWN", 12)
    monkeypatch.setattr(module, "_draw", lambda points, chosen: seen.extend(chosen) or Image.new("RGB", (2, 2)))
    monkeypatch.setattr(Rows, "parts", property(lambda rows: pytest.fail("all rows are listed")))
    scores = scores_of(tmp_path)
    vector_map([*scores, scores[0]])  # a task of two settings: 12 / 4 of each
    counts = Counter(each.task for each in seen)
    assert counts["text to image + text"] == counts["image to text"] == 3 <= counts["text to image"] <= 6
    assert len({(each.rows.folder, each.id) for each in seen}) == len(seen)
    assert all(each.id[0] == {"image": "p", "image + text": "b", "text": "w"}[each.modality] for each in seen)


def test_the_shape_is_the_task():
    kinds = module._TASKS
    assert len(kinds) == 9
    image = module._draw(np.array([[n, 0.0] for n in range(9)] + [[0.0, 1.0]]), candidates(*kinds, kinds[0]))
    step = (module._SIDE - 2 * module._MARGIN) / 8
    places = [(module._MARGIN + n * step, module._MARGIN) for n in range(9)]
    places.append((module._MARGIN, module._SIDE - module._MARGIN))
    marks = [np.asarray(image.crop((x - 30, y - 30, x + 30, y + 30))) for x, y in places]
    shapes = [(mark < 250).any(axis=2).tobytes() for mark in marks]
    assert shapes[9] == shapes[0] and len(set(shapes)) == 9
    areas = [(mark < 250).any(axis=2).sum() for mark in marks]
    assert max(areas) < 1.6 * min(areas)


def test_the_legend_has_what_is_drawn():
    def legend(*kinds):
        image = module._draw(np.random.default_rng(0).normal(size=(len(kinds), 2)), candidates(*kinds))
        below = np.asarray(image)[module._SIDE - module._LINE // 2 :]
        return len(below) // module._LINE, (below < 100).all(axis=2).sum()

    rows, ink = legend("text to image")
    assert rows == 2 and ink > 500
    assert legend("text to image", "image to image")[1] > ink
    assert legend(*module._TASKS)[0] == 4


def test_a_report_has_the_map_if_it_is_asked_for(tmp_path):
    for wanted in (True, False):
        scores = scores_of(tmp_path, vector_map=wanted)
        assert len(complete(task_results("t", "s", scores), scores).figures) == wanted


def test_too_few_items_and_a_missing_package_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="at least 4 right candidates, got 3"):
        vector_map(scores_of(tmp_path, 3)[:1])
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    with pytest.raises(ImportError, match=r'needs scikit-learn: pip install "conjoin\[st\]"'):
        vector_map(scores_of(tmp_path / "other"))
