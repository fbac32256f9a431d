import base64
import io
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


def mark(image, x, y):
    """What is drawn at a place, and its shape: where it is not white."""
    pixels = np.asarray(image.crop((x - 22, y - 22, x + 22, y + 22)))
    return pixels, (pixels < 250).any(axis=2)


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


def test_the_shape_is_the_task_and_the_colour_the_modality():
    kinds = [*module._TASKS, module._TASKS[0]]
    image = module._draw(np.array([[n, 0.0] for n in range(9)] + [[0.0, 1.0]]), candidates(*kinds))
    step, last = (module._SIDE - 2 * module._MARGIN) / 8, module._SIDE - module._MARGIN
    places = [(module._MARGIN + n * step, module._MARGIN) for n in range(9)] + [(module._MARGIN, last)]
    marks = [mark(image, *place) for place in places]
    shapes = [shape.tobytes() for _, shape in marks]
    assert shapes[9] == shapes[0] and len(set(shapes)) == 9
    areas = [shape.sum() for _, shape in marks]
    assert max(areas) < 1.6 * min(areas)
    for kind, (pixels, _) in zip(kinds, marks, strict=True):
        assert "#" + bytes(pixels[22, 22]).hex() == module._COLOURS[kind.split(" to ")[1]]


def test_the_legend_has_the_colour_shape_and_name_of_what_is_drawn():
    found = []
    for kind in module._TASKS:
        image = module._draw(np.array([[0.0, 0.0], [1.0, 1.0]]), candidates(kind, kind))
        (colour, _), (_, shape) = (mark(image, module._MARGIN, module._SIDE + row * module._LINE) for row in (0, 1))
        assert "#" + bytes(colour[22, 22]).hex() == module._COLOURS[kind.split(" to ")[1]]
        names = np.asarray(image)[module._SIDE + module._LINE // 2 :, module._MARGIN + 22 :]
        assert (names < 100).all(axis=2).sum() > 400
        found.append(shape.tobytes())
    assert len(set(found)) == 9


def test_a_report_has_the_map_if_it_is_asked_for(tmp_path):
    for wanted in (True, False):
        scores = scores_of(tmp_path, vector_map=wanted)
        assert len(complete(task_results("t", "s", scores), scores).figures) == wanted


def test_too_few_items_are_named(tmp_path):
    with pytest.raises(ValueError, match="at least 4 right candidates, got 3"):
        vector_map(scores_of(tmp_path, 3)[:1])
