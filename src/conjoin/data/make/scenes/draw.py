"""The pictures of scenes: objects of one artist on a background, without overlap."""

import io
from functools import lru_cache

import numpy as np
from PIL import Image

from conjoin.data.emoji.art import draw_svg, emoji_drawings
from conjoin.data.make.scenes.objects import scene_objects

SCENE_SIZE = 168
"""Side of the pictures in pixels."""

_CELL = SCENE_SIZE // 2
_SIZES = (0.55, 0.95)
_QUALITY = 92


def draw_scene(
    objects: tuple[str, ...], artist: str, generator: np.random.Generator
) -> tuple[bytes, list[dict[str, object]]]:
    """Draw one to four objects, each in a random quarter at a random size and place.

    Returns:
        The JPEG file, and the box of each object: `{"object", "box": [left, top, right, bottom]}`, as fractions of
        the picture.
    """
    picture = _background(generator)
    boxes: list[dict[str, object]] = []
    for name, cell in zip(objects, generator.permutation(4), strict=False):
        size = int(_CELL * generator.uniform(*_SIZES))
        left, top = (int(edge * _CELL + generator.integers(_CELL - size + 1)) for edge in divmod(int(cell), 2))
        sprite = _sprite(name, artist).resize((size, size), Image.Resampling.BICUBIC)
        picture.paste(sprite, (left, top), sprite)
        box = (left, top, left + size, top + size)
        boxes.append({"object": name, "box": [round(edge / SCENE_SIZE, 4) for edge in box]})
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=_QUALITY)
    return buffer.getvalue(), boxes


def _background(generator: np.random.Generator) -> Image.Image:
    """A light plain colour, gradient, stripes or noise."""
    kind = generator.integers(4)
    first, second = generator.integers(150, 256, size=(2, 3)).astype(np.float32)
    ramp = np.linspace(0, 1, SCENE_SIZE, dtype=np.float32)
    share = np.zeros((SCENE_SIZE, SCENE_SIZE), dtype=np.float32)
    if kind == 1:
        share += ramp[:, None] if generator.integers(2) else ramp
    elif kind == 2:
        share += (ramp * generator.integers(3, 9) % 1 > 0.5) * 0.3
    elif kind == 3:
        share += generator.random((SCENE_SIZE, SCENE_SIZE), dtype=np.float32) * 0.3
    return Image.fromarray((first + (second - first) * share[..., None]).astype(np.uint8))


@lru_cache(maxsize=4096)
def _sprite(concept: str, artist: str) -> Image.Image:
    """The drawing of an object, transparent around it."""
    return draw_svg(_drawings(artist)[concept], background=None).convert("RGBA")


@lru_cache(maxsize=2)
def _drawings(artist: str) -> dict[str, str]:
    return emoji_drawings(artist, [row.concept for row in scene_objects()])
