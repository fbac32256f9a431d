"""Draw scores, segments and masks over the patches of a picture."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageDraw, ImageFont

SHORTEST_SIDE = 280
"""Smaller pictures are enlarged to at least this many pixels."""

Word = tuple[str, tuple[int, int, int] | None]
"""A word and its background colour; None for a masked word."""

_COLD, _MIDDLE, _WARM = (38, 84, 168), (236, 236, 232), (196, 42, 36)
_SEGMENTS = np.array(
    [(230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167)]
)
_MASKED = (128, 128, 128)
_MARGIN, _LINE = 10, 18


def heat_map(
    picture: Image.Image, scores: ArrayLike, grid: tuple[int, int], threshold: float | None = None
) -> Image.Image:
    """Draw high scores in warm and low scores in cold colours; patches not above `threshold` turn pale.

    Args:
        picture: The model's input image.
        scores: `(P,)`, row-major.
        grid: Rows and columns of patches.
        threshold: Scores above it keep their colour; None keeps all.

    Raises:
        ValueError: The number of scores differs from the number of patches.
    """
    values = _on_grid(scores, grid)
    colours = np.stack([warmth(value) for value in relative(values.ravel())]).reshape(*grid, 3)
    shown = _blend(picture, colours, np.full(grid, 0.55))
    if threshold is None:
        return shown
    return _blend(shown, np.full((*grid, 3), 255), np.where(values > threshold, 0.0, 0.75))


def segment_map(picture: Image.Image, segments: ArrayLike, grid: tuple[int, int]) -> Image.Image:
    """Draw each segment in its own colour; `segments` `(P,)` are integers from 0."""
    return _blend(picture, _SEGMENTS[_on_grid(segments, grid).astype(int) % len(_SEGMENTS)], np.full(grid, 0.5))


def masked_picture(picture: Image.Image, weights: ArrayLike, grid: tuple[int, int]) -> Image.Image:
    """Cover patches of weight 0 with grey; `weights` `(P,)` are in [0, 1]."""
    return _blend(picture, np.broadcast_to(_MASKED, (*grid, 3)), 1 - _on_grid(weights, grid))


def relative(scores: ArrayLike) -> NDArray[np.float64]:
    """Scale scores linearly to 0 (lowest) to 1 (highest); 0.5 if all are equal."""
    values = np.asarray(scores, dtype=float)
    span = np.ptp(values)
    return (values - values.min()) / span if span > 0 else np.full_like(values, 0.5)


def warmth(value: float) -> tuple[int, int, int]:
    """Return the colour of a relative score, from cold (0) to warm (1)."""
    ends, share = ((_COLD, _MIDDLE), 2 * value) if value < 0.5 else ((_MIDDLE, _WARM), 2 * value - 1)
    red, green, blue = (round(low + share * (high - low)) for low, high in zip(*ends, strict=True))
    return red, green, blue


def strip(panels: Sequence[tuple[str, Image.Image]], lines: Sequence[tuple[str, Sequence[Word]]]) -> Image.Image:
    """Draw captioned pictures in a row, with captioned lines of coloured words below.

    Args:
        panels: Captions and pictures.
        lines: Captions and words.
    """
    font = ImageFont.load_default(13)
    width = sum(max(picture.width, round(font.getlength(caption))) + _MARGIN for caption, picture in panels) + _MARGIN
    height = _LINE + max(picture.height for _, picture in panels) + 2 * _MARGIN
    rows = [_wrap(words, width - 2 * _MARGIN, font) for _, words in lines]
    canvas = Image.new("RGB", (width, height + sum((len(row) + 1) * (_LINE + 6) for row in rows) + _MARGIN), "white")
    draw = ImageDraw.Draw(canvas)
    x = _MARGIN
    for caption, picture in panels:
        draw.text((x, _MARGIN), caption, "black", font)
        canvas.paste(picture, (x, _MARGIN + _LINE))
        x += max(picture.width, round(font.getlength(caption))) + _MARGIN
    y = height
    for (caption, _), row in zip(lines, rows, strict=True):
        draw.text((_MARGIN, y), caption, "black", font)
        for line in row:
            y += _LINE + 6
            for left, (word, colour) in line:
                box = (left + _MARGIN, y, left + _MARGIN + font.getlength(word) + 8, y + _LINE)
                if colour is None:
                    draw.text((box[0] + 4, y + 1), word, _MASKED, font)
                    draw.line((box[0] + 2, y + _LINE // 2, box[2] - 2, y + _LINE // 2), _MASKED)
                else:
                    draw.rounded_rectangle(box, 4, colour)
                    draw.text((box[0] + 4, y + 1), word, "white" if sum(colour) < 380 else "black", font)
        y += _LINE + 6
    return canvas


def _wrap(
    words: Sequence[Word], width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont
) -> list[list[tuple[float, Word]]]:
    """Break words into lines; return each word with its horizontal offset."""
    lines: list[list[tuple[float, Word]]] = [[]]
    left = 0.0
    for word in words:
        size = font.getlength(word[0]) + 12
        if left and left + size > width:
            lines.append([])
            left = 0.0
        lines[-1].append((left, word))
        left += size
    return lines


def _on_grid(values: ArrayLike, grid: tuple[int, int]) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=float)
    if array.shape != (grid[0] * grid[1],):
        raise ValueError(f"values have shape {array.shape}, expected one for each of {grid[0]} x {grid[1]} patches")
    return array.reshape(grid)


def _blend(picture: Image.Image, colours: NDArray, alphas: NDArray) -> Image.Image:
    """Blend `colours` `(rows, columns, 3)` over the patches of the enlarged picture, with opacity `alphas`."""
    base = _enlarged(picture)
    over, opacity = (
        Image.fromarray(array.astype(np.uint8)).resize(base.size, Image.Resampling.NEAREST)
        for array in (colours, np.round(255 * alphas))
    )
    return Image.composite(over, base, opacity)


def _enlarged(picture: Image.Image) -> Image.Image:
    scale = max(1, -(-SHORTEST_SIDE // min(picture.size)))
    return picture.convert("RGB").resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
