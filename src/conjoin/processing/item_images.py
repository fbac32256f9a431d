"""Load images: from files, bytes, PIL images and arrays to upright RGB pictures.

The limits hold before the work: of bytes before a file is read, of pixels before it is decoded.
Every saved checkpoint contains this file, so it imports nothing of this package outside its folder, and it opens no
connection: the package sets `read_url`.
"""

import base64
import io
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageCms, ImageOps, ImageSequence, UnidentifiedImageError
from torch import Tensor

from .item_error import ItemError, MissingFileError

MAX_IMAGE_BYTES = 2**28
"""Larger files and downloads raise an error before they are read: `MAX_IMAGE_PIXELS` take as much uncompressed."""
MAX_IMAGE_PIXELS = 89_478_485
"""Images with more pixels raise an error before decoding (Pillow's own decompression-bomb limit)."""
MAX_ASPECT_RATIO = 200
"""Narrower images raise an error before decoding, as in Qwen2-VL: resized by the short side, they would grow."""
_SAME_LEVELS = 3
"""Profiles of sRGB differ in their rounding."""
CONCATENATED = "concatenated"
"""The key in a PIL image's `info` of a picture of several images: cropped, it would lose some of them."""
MAX_HEIGHT, MAX_PIXELS = 2048, 2**24
"""Images of a concatenation have at most this height; it has at most this many pixels (48 MiB)."""
DATA_URIS = ("data:image/", "data:video/")
"""How encoded pictures begin; a video is one of an unknown format."""
read_url: Callable[[str, str], bytes] | None = None
"""Returns what is at a URL, for the item of a name. The package `conjoin` sets it; without it URLs are refused."""


def load_image(source: Any, name: str = "item", least_side: int | None = None) -> Image.Image:
    """Open `source` and return it as an upright RGB image on white.

    Args:
        source: A PIL image, an array or tensor of an image (see `array_to_image`), a path, a URL (if URLs are
            allowed, see `allow_urls`), a `data:image/` URI, raw bytes, or `{"bytes": ..., "path": ...}` as
            `datasets.Image(decode=False)` gives.
        name: Start of every error message.
        least_side: Allows a JPEG file to be decoded at a lower resolution, with at least this many pixels a side.

    Raises:
        FileNotFoundError: The path does not exist.
        ValueError: Unreadable, truncated, or beyond `MAX_IMAGE_BYTES`, `MAX_IMAGE_PIXELS` or `MAX_ASPECT_RATIO`.
    """
    prefix = ""
    try:
        if isinstance(source, Mapping):
            data, path = source.get("bytes"), source.get("path")
            prefix = f"image {path!r}: " if path and isinstance(data, bytes) else ""
            source = path if data is None else data
        if isinstance(source, str) and source.startswith(DATA_URIS):
            source = decode_base64(source.partition(",")[2], name)
        elif isinstance(source, str | os.PathLike):
            prefix = f"image {os.fspath(source)!r}: "
            source = _read_file(str(source), name, prefix)
        if isinstance(source, bytes):
            image: Image.Image = Image.open(io.BytesIO(source))
        elif isinstance(source, np.ndarray | Tensor):
            image = array_to_image(source)
        elif isinstance(source, Image.Image):
            image = source
        else:
            expected = "a PIL image, an array, a path, a URL or bytes"
            raise ValueError(f"{describe(source)} is not an image; expected {expected}")
        short, long = sorted(image.size)
        if short == 0 or short * long > MAX_IMAGE_PIXELS or long > MAX_ASPECT_RATIO * short:
            limits = f"1 to {MAX_IMAGE_PIXELS} pixels and an aspect ratio up to {MAX_ASPECT_RATIO}"
            raise ValueError(f"{image.width} x {image.height} pixels; expected {limits}")
        if image.format == "EPS":
            raise ValueError("PostScript (EPS) is a program")
        if least_side is not None and isinstance(source, bytes):
            image.draft(None, (least_side, least_side))
        return to_rgb(image)
    except ItemError:
        raise
    except UnidentifiedImageError as error:
        problem = f"{len(source)} bytes of an unknown format ({source[:12]!r})"
        raise ItemError(name, f"{prefix}cannot read the image: {problem}") from error
    except Exception as error:  # on damaged files decoders raise SyntaxError, struct.error, IndexError and others
        problem = str(error) or type(error).__name__
        raise ItemError(name, f"{prefix}cannot read the image: {problem}") from error


def _read_file(path: str, name: str, prefix: str) -> bytes:
    if is_url(path):
        if read_url is None:
            raise ItemError(name, f"{prefix}this code fetches nothing; pass the image itself")
        return read_url(path, name)
    if not os.path.isfile(path):
        raise MissingFileError(name, f"{prefix}no such file")
    if (size := os.path.getsize(path)) > MAX_IMAGE_BYTES:
        raise ItemError(name, f"{prefix}the file has {size} bytes; the limit is {MAX_IMAGE_BYTES}")
    return Path(path).read_bytes()


def pad_to_square(image: Image.Image) -> Image.Image:
    """Return an RGB image in the middle of a white square, so that a model that crops sees all of it."""
    return ImageOps.pad(image, (max(image.size),) * 2, color="white")


def concatenate_images(images: Sequence[Image.Image]) -> Image.Image:
    """Return RGB images as one: in rows of ceil(sqrt(n)), from left to right, scaled to one height, on white.

    The height is that of the tallest image, within `MAX_HEIGHT` and `MAX_PIXELS`.
    """
    columns = isqrt(len(images) - 1) + 1
    rows = [images[start : start + columns] for start in range(0, len(images), columns)]
    ratios = [[image.width / image.height for image in row] for row in rows]
    limit = int((MAX_PIXELS / (max(map(sum, ratios)) * len(rows))) ** 0.5)
    height = max(1, min(max(image.height for image in images), MAX_HEIGHT, limit))
    widths = [[max(1, round(height * ratio)) for ratio in some] for some in ratios]
    canvas = Image.new("RGB", (max(map(sum, widths)), height * len(rows)), "white")
    for number, (row, some) in enumerate(zip(rows, widths, strict=True)):
        for column, (image, width) in enumerate(zip(row, some, strict=True)):
            canvas.paste(image.resize((width, height)), (sum(some[:column]), number * height))
    canvas.info[CONCATENATED] = True
    return canvas


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any PIL image to RGB as a viewer would show it.

    Takes the first frame of an animation that is not empty, applies the EXIF orientation, and converts a colour
    profile to sRGB. Transparent pixels become white, or black where white would hide all of a drawing; 16-bit and
    float greyscale is scaled to 8 bits rather than clipped.
    """
    if "fp" in vars(image):  # it has its file; a copy, or an image from another process, holds one frame and no file
        for frame in ImageSequence.Iterator(image):
            if not frame.has_transparency_data or frame.convert("RGBA").getchannel("A").getbbox():
                break  # the image stays at this frame
    image.load()
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):
        return _to_8_bit(image).convert("RGB")
    if not image.has_transparency_data:
        return _to_srgb(image.convert("RGB") if image.mode == "P" else image)
    image = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
    alpha, colours = image.getchannel("A"), _to_srgb(image.convert("RGB"))
    opacity, white = np.asarray(alpha), Image.composite(colours, Image.new("RGB", image.size, "white"), alpha)
    if opacity.min() < 255 and opacity.any() and np.asarray(white).min() >= 250:  # plain white to a viewer
        return Image.composite(colours, Image.new("RGB", image.size, "black"), alpha)
    return white


def _to_srgb(image: Image.Image) -> Image.Image:
    """Convert an image to sRGB; without a colour profile that can be read, its colours are taken as they are."""
    with suppress(ImageCms.PyCMSError, OSError, ValueError):
        if transform := _srgb_transform(image.info.get("icc_profile") or b"", image.mode):
            return ImageCms.applyTransform(image, transform) or image
    return image if image.mode == "RGB" else image.convert("RGB")  # a large picture is not copied


@lru_cache(8)
def _srgb_transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return what converts colours of a profile to sRGB; None if they are sRGB: its name is no proof."""
    own, srgb = ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB")
    transform = ImageCms.buildTransform(own, srgb, mode, "RGB")
    levels = np.stack(np.meshgrid(*[np.arange(0, 256, 51, dtype=np.uint8)] * 3), axis=-1).reshape(6, 36, 3)
    colours = Image.fromarray(levels)
    if mode == "RGB" and (converted := ImageCms.applyTransform(colours, transform)):
        return transform if np.abs(np.asarray(converted, dtype=int) - levels).max() > _SAME_LEVELS else None
    return transform


def _to_8_bit(image: Image.Image) -> Image.Image:
    """Scale greyscale of more than 8 bits to 0..255, transparent pixels to 255.

    The full range is 16 bits in mode I;16, 8 or 16 bits in mode I, and 0..1 or 0..255 for floats: the smallest that
    holds all values, or their maximum.
    """
    values = np.asarray(image).astype(np.float64)
    peak = values.max()
    if not np.isfinite(values).all():
        raise ValueError("pixel values are not finite")
    limits = (65535,) if image.mode.startswith("I;16") else (255, 65535) if image.mode == "I" else (1, 255)
    full = next((limit for limit in limits if peak <= limit), peak)
    levels = np.clip(np.rint(values * (255 / full)), 0, 255)
    levels[values == image.info.get("transparency", np.nan)] = 255
    return Image.fromarray(levels.astype(np.uint8))


def array_to_image(array: np.ndarray | Tensor) -> Image.Image:
    """Return an array or tensor of one image as a PIL image.

    Its values are integers of 8 bits, or floats from 0 to 1. Its shape is `(H, W)`, `(H, W, C)` or `(C, H, W)`, with
    1, 3 or 4 channels. Where both could be meant, the channels of an array come last, those of a tensor first.

    Raises:
        ValueError: Another shape, type or range.
    """
    values: Any = array
    if isinstance(array, Tensor):
        values = (array.float() if array.is_floating_point() else array).numpy(force=True)
    dims = (0, 2) if isinstance(array, Tensor) else (2, 0)
    if values.dtype.kind == "f" and values.size and 0 <= values.min() and values.max() <= 1:  # NaN is in no range
        values = np.rint(values * 255).astype(np.uint8)
    axes = [axis for axis in dims if values.ndim == 3 and values.shape[axis] in (1, 3, 4)]
    if values.dtype != np.uint8 or not (axes or values.ndim == 2):
        expected = "(H, W), (H, W, C) or (C, H, W) with 1, 3 or 4 channels, of uint8, or of floats from 0 to 1"
        given = f"an array of shape {tuple(values.shape)} and type {array.dtype}"
        raise ValueError(f"{given} is not an image; expected {expected}")
    values = np.moveaxis(values, axes[0], 2) if axes else values[..., None]
    return Image.fromarray(np.ascontiguousarray(values[..., 0] if values.shape[2] == 1 else values))


def decode_base64(text: str, name: str) -> bytes:
    """Return the bytes that `text` encodes, in either alphabet, padded or not; errors start with `name`."""
    plain = "".join(text.split()).translate(str.maketrans("-_", "+/")).rstrip("=")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except ValueError as error:
        raise ItemError(name, f"the image is not valid base64 ({error})") from error


def is_url(source: object) -> bool:
    """Whether `source` is an http or https URL."""
    return isinstance(source, str) and source[:8].lower().startswith(("http://", "https://"))


def describe(value: Any) -> str:
    """Return the type and a short form of any value, however deep or long, for error messages."""
    return f"{type(value).__name__} {reprlib.repr(value)[:80]}"
