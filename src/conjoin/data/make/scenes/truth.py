"""Which patches and text tokens of a scene show or name an object that picture and text share."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHARED, PRIVATE, NEITHER = 1, 0, -1


def shared_patches(
    image_objects: Sequence[Mapping[str, Any]], text_objects: Sequence[Mapping[str, Any]], grid: int
) -> NDArray[np.int8]:
    """Return `(grid * grid,)`, row-major: `SHARED` or `PRIVATE` by the box around a patch's centre, else `NEITHER`."""
    named = {entry["object"] for entry in text_objects}
    centres = (np.arange(grid) + 0.5) / grid
    truth = np.full((grid, grid), NEITHER, dtype=np.int8)
    for entry in image_objects:
        left, top, right, bottom = entry["box"]
        rows, columns = (centres > top) & (centres < bottom), (centres > left) & (centres < right)
        truth[np.ix_(rows, columns)] = SHARED if entry["object"] in named else PRIVATE
    return truth.reshape(-1)


def shared_tokens(
    image_objects: Sequence[Mapping[str, Any]],
    text_objects: Sequence[Mapping[str, Any]],
    offsets: Sequence[tuple[int, int]],
) -> NDArray[np.int8]:
    """Return `(T,)`: `SHARED` or `PRIVATE` for tokens of a name, `NEITHER` for the other words and special tokens.

    Args:
        image_objects: The objects of the picture.
        text_objects: The objects of the text with their spans.
        offsets: The characters of each token, as `return_offsets_mapping` of a tokenizer gives them.
    """
    shown = {entry["object"] for entry in image_objects}
    truth = np.full(len(offsets), NEITHER, dtype=np.int8)
    for entry in text_objects:
        for place, (start, end) in enumerate(offsets):
            if start < entry["end"] and end > entry["start"] and end > start:
                truth[place] = SHARED if entry["object"] in shown else PRIVATE
    return truth
