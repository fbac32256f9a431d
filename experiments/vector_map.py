"""A picture of the vectors of a model on M-BEIR, as Fig. 4 of PUMA: t-SNE of right candidates.

    python experiments/vector_map.py runs/demo/model --data runs/mini-mbeir --out runs/map.png

It needs scikit-learn, which comes with sentence-transformers.
"""

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from sklearn.manifold import TSNE

from conjoin.evaluation import Cell, CellScores, Rows, evaluate_cells
from conjoin.evaluation.tasks.mbeir import MbeirOptions, mbeir_cells
from conjoin.retrieval import load_encoder

_COLOURS = {"text": "#0072b2", "image": "#d55e00", "image + text": "#009e73"}
_TASKS = [f"{query} to {candidate}" for query, candidate in itertools.product(_COLOURS, repeat=2)]
_Shape = tuple[int, float, int]
_DOT: _Shape = (16, 1, 0)
_STARS: list[_Shape] = [
    _DOT,
    (3, 0.5, 0),
    (4, 0.71, 1),
    (4, 0.4, 0),
    (3, 0.5, 1),
    (4, 0.4, 1),
    (5, 0.45, 0),
    (4, 0.71, 0),
    (3, 0.25, 0),
]
_SHAPES = dict(zip(_TASKS, _STARS, strict=True))
"""For each kind of task a star: its points, its inner radius, and whether it is turned by half a point."""
_SHOWN = 2000
_LEAST = 4
_SIDE, _MARGIN, _RADIUS, _LINE = 1440, 40, 9, 44
"""Of the drawing in pixels, which is shown at half the size."""


class _Candidate(NamedTuple):
    """A candidate that is drawn."""

    rows: Rows
    id: str
    modality: str
    task: str


def vector_map(scores: Sequence[CellScores]) -> Image.Image:
    """Reduce right candidates to two dimensions by t-SNE of their cosine distances.

    The colour is the candidate's modality. The shape is the kind of task: the modalities of query and candidate, which
    are the tasks of M-BEIR.

    Args:
        scores: Of tasks, at least one. Each shows right candidates of random queries, at most 2,000 divided by the
            number of tasks; the seed is that of the options.

    Raises:
        ValueError: The tasks have fewer than four right candidates.
    """
    vectors, seed = scores[0].vectors, scores[0].vectors.options.seed
    chosen = _sample(scores, seed)
    if len(chosen) < _LEAST:
        raise ValueError(f"a map of the vectors needs at least {_LEAST} right candidates, got {len(chosen)}")
    by_part = itertools.groupby(chosen, key=lambda each: each.rows.folder)
    parts = [list(members) for _, members in by_part]
    matrix = np.concatenate([vectors.of(part[0].rows).vectors([each.id for each in part]) for part in parts])
    perplexity = min(30.0, (len(chosen) - 1) / 3)
    points = TSNE(metric="cosine", perplexity=perplexity, random_state=seed).fit_transform(matrix.astype(np.float32))
    return _draw(points, chosen)


def _sample(scores: Sequence[CellScores], seed: int) -> list[_Candidate]:
    """A right candidate of each of some queries, as many of each task, by part of the corpus; each candidate once."""
    random = np.random.default_rng(seed)
    share = max(1, _SHOWN // len(scores))
    chosen: dict[tuple[str, str], _Candidate] = {}
    for each in scores:
        asked = random.choice(len(each.ids), min(share, len(each.ids)), replace=False)
        for query in (each.ids[position] for position in asked):
            candidate = _candidate(each.cell, query)
            chosen.setdefault((candidate.rows.folder, candidate.id), candidate)
    return [chosen[key] for key in sorted(chosen)]


def _candidate(cell: Cell, query: str) -> _Candidate:
    """The first right candidate of a query."""
    id_ = min(cell.qrels[query])
    modality = _modality(cell.corpus.row(id_))
    return _Candidate(cell.corpus, id_, modality, f"{_modality(cell.queries.row(query))} to {modality}")


def _modality(row: Mapping[str, Any]) -> str:
    return " + ".join(part for part in ("image", "text") if row.get(part) is not None)


def _draw(points: np.ndarray, chosen: Sequence[_Candidate]) -> Image.Image:
    """The candidates, and a legend below them: colours, then shapes."""
    colours = [name for name in _COLOURS if any(each.modality == name for each in chosen)]
    tasks = [name for name in _TASKS if any(each.task == name for each in chosen)]
    low, high = points.min(axis=0), points.max(axis=0)
    pixels = _MARGIN + (points - low) / np.maximum(high - low, 1e-9) * (_SIDE - 2 * _MARGIN)
    image = Image.new("RGB", (_SIDE, _SIDE + _LINE * (1 + math.ceil(len(tasks) / 3))), "white")
    draw = ImageDraw.Draw(image)
    for place, each in zip(pixels.tolist(), chosen, strict=True):
        draw.polygon(_outline(_SHAPES[each.task], *place), _COLOURS[each.modality], "white")
    font = ImageFont.load_default(26)
    entries = [(number, name, _DOT, _COLOURS[name]) for number, name in enumerate(colours)]
    entries += [(3 + number, name, _SHAPES[name], "black") for number, name in enumerate(tasks)]
    for number, name, shape, colour in entries:
        x, y = _MARGIN + number % 3 * _SIDE / 3, _SIDE + number // 3 * _LINE
        draw.polygon(_outline(shape, x, y), colour)
        draw.text((x + 3 * _RADIUS, y), name, "black", font, "lm")
    return image


def _outline(shape: _Shape, x: float, y: float) -> list[tuple[float, float]]:
    """The corners of a shape around a point; all shapes have one area."""
    points, inner, turn = shape
    outer = _RADIUS * math.sqrt(math.pi / (points * math.sin(math.pi / points) * inner))
    corners = [
        (math.pi * ((index + turn) / points - 0.5), outer * (inner if index % 2 else 1)) for index in range(2 * points)
    ]
    return [(x + radius * math.cos(angle), y + radius * math.sin(angle)) for angle, radius in corners]


def main() -> None:
    """Evaluate a model and draw the map."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", required=True, help="folder of M-BEIR, or of its miniature")
    parser.add_argument("--cells", nargs="+", help="such as oven_task8 (default: all 16)")
    parser.add_argument("--out", type=Path, required=True, help="the picture; the vectors are kept beside it")
    args = parser.parse_args()
    cells = mbeir_cells(MbeirOptions(data=args.data, cells=args.cells, pools=["global"]))
    vector_map(evaluate_cells(load_encoder(args.model), cells, args.out.with_suffix(""))).save(args.out)


if __name__ == "__main__":
    main()
