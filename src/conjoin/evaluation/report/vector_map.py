"""A picture of the vectors of an evaluation, as Fig. 4 of PUMA."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from conjoin.evaluation.results import Figure, picture
from conjoin.evaluation.task import TaskScores

_COLOURS = {"text": "blue", "image": "orange", "image + text": "green"}
_SHOWN = 2000
_LEAST = 4
_SIDE, _MARGIN, _RADIUS = 1440, 40, 5
"""Of the drawing in pixels, which is shown at half the size."""


def vector_map(scores: Sequence[TaskScores]) -> Figure:
    """Reduce queries and candidates to two dimensions by t-SNE of their cosine distances, coloured by modality.

    Args:
        scores: Of tasks, at least one. Of more than 2,000 items, that many at random are shown; the seed is that of
            the options.

    Raises:
        ImportError: The `st` extra, which has scikit-learn, is not installed.
        ValueError: The tasks have fewer than four items.
    """
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise ImportError('a map of the vectors needs scikit-learn: pip install "conjoin[st]"') from error
    vectors, seed = scores[0].vectors, scores[0].vectors.options.seed
    named = {rows.folder: rows for each in scores for rows in (each.task.queries, *each.task.corpus)}
    queries = {each.task.queries.folder for each in scores}
    items = [
        (folder, id_, " + ".join(sorted(parts))) for folder, rows in named.items() for id_, parts in rows.parts.items()
    ]
    if len(items) < _LEAST:
        raise ValueError(f"a map of the vectors needs at least {_LEAST} items, got {len(items)}")
    order = np.random.default_rng(seed).permutation(len(items))[:_SHOWN]
    chosen = sorted(items[index] for index in order)
    by_folder = {folder: [id_ for name, id_, _ in chosen if name == folder] for folder in sorted(named)}
    matrix = np.concatenate([vectors.of(named[folder]).vectors(ids) for folder, ids in by_folder.items() if ids])
    perplexity = min(30.0, (len(chosen) - 1) / 3)
    points = TSNE(metric="cosine", perplexity=perplexity, random_state=seed).fit_transform(matrix.astype(np.float32))
    shapes = [(modality, folder in queries) for folder, _, modality in chosen]
    title = f"t-SNE of {len(chosen):,} items: " + ", ".join(
        f"{modality} {_COLOURS[modality]}" for modality in dict.fromkeys(modality for modality, _ in sorted(shapes))
    )
    return Figure(f"{title}; queries are squares", picture(_draw(points, shapes), _SIDE // 2))


def _draw(points: np.ndarray, shapes: Sequence[tuple[str, bool]]) -> Image.Image:
    """A dot for each candidate and a square for each query."""
    low, high = points.min(axis=0), points.max(axis=0)
    pixels = _MARGIN + (points - low) / np.maximum(high - low, 1e-9) * (_SIDE - 2 * _MARGIN)
    image = Image.new("RGB", (_SIDE, _SIDE), "white")
    draw = ImageDraw.Draw(image)
    for (x, y), (modality, is_query) in zip(pixels.tolist(), shapes, strict=True):
        box = (x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS)
        (draw.rectangle if is_query else draw.ellipse)(box, fill=_COLOURS[modality])
    return image
