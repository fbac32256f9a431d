"""Random changes to small drawings, so that a model learns the content and not the drawing style."""

from collections.abc import Callable

import numpy as np
from PIL import Image, ImageChops, ImageEnhance, ImageFilter, ImageOps

Change = Callable[[Image.Image, np.random.Generator], Image.Image]


def augment_image(image: Image.Image, random: np.random.Generator) -> Image.Image:
    """Mild random changes of position, colour and line to a drawing on white; an RGB image of the same size.

    Each picture is shifted, scaled and rotated a little, with colour jitter. Some pictures also become grey, blurred,
    posterised, outlined or a line drawing. None is mirrored, because names say left and right.
    """
    image = _jitter_colour(_move(image.convert("RGB"), random), random)
    for probability, change in _OCCASIONAL:
        if random.random() < probability:
            image = change(image, random)
    return image


def _move(image: Image.Image, random: np.random.Generator) -> Image.Image:
    """Scale by 0.7 to 1.1, shift by up to 8 % of the side and rotate by up to 12 degrees, on white."""
    scale = 1 + random.uniform(-0.3, 0.1)
    angle = np.deg2rad(random.uniform(-12, 12))
    shift = random.uniform(-0.08, 0.08, size=2) * image.size
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]) / scale  # from output to input
    centre = np.array(image.size) / 2
    offset = centre - turn @ (centre + shift)
    matrix = (*turn[0], offset[0], *turn[1], offset[1])
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC, fillcolor="white")


def _jitter_colour(image: Image.Image, random: np.random.Generator) -> Image.Image:
    """Change gamma, saturation and hue, but keep white, black and the colours that names mention."""
    gamma = np.exp(random.uniform(-0.4, 0.4))
    image = image.point([round(255 * (level / 255) ** gamma) for level in range(256)] * 3)
    image = ImageEnhance.Color(image).enhance(1 + random.uniform(-0.4, 0.3))
    turn = round(random.uniform(-10, 10))  # of 256
    hue, saturation, value = image.convert("HSV").split()
    hue = hue.point([(level + turn) % 256 for level in range(256)])
    return Image.merge("HSV", (hue, saturation, value)).convert("RGB")


def _blur(image: Image.Image, random: np.random.Generator) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(random.uniform(0.003, 0.012) * max(image.size)))


def _posterise(image: Image.Image, random: np.random.Generator) -> Image.Image:
    steps = int(random.integers(2, 6))
    return image.point([round(round(level / 255 * steps) / steps * 255) for level in range(256)] * 3)


def _lines(image: Image.Image) -> Image.Image:
    """Return dark lines on white at the edges of the picture."""
    edges = ImageOps.grayscale(image.filter(ImageFilter.SMOOTH)).filter(ImageFilter.FIND_EDGES)
    edges = ImageOps.expand(ImageOps.crop(edges, 1), 1, fill=0)  # the filter also marks the border
    thick = edges.filter(ImageFilter.MaxFilter(3))
    return ImageOps.invert(thick.point(lambda level: min(255, 6 * max(0, level - 12)))).convert("RGB")


_OCCASIONAL: tuple[tuple[float, Change], ...] = (
    (0.10, lambda image, random: ImageChops.multiply(image, _lines(image))),  # an outline
    (0.05, lambda image, random: _lines(image)),
    (0.10, _posterise),
    (0.10, lambda image, random: image.convert("L").convert("RGB")),
    (0.15, _blur),
)
