"""Load images: from files, URLs, bytes, PIL images and arrays to upright RGB pictures.

The limits hold before the work: of bytes before a file is read, of pixels before it is decoded.
Every saved checkpoint contains this file, so it imports nothing of this package outside its folder.
"""

import base64
import binascii
import http.client
import io
import ipaddress
import os
import reprlib
import socket
import ssl
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit, urlunsplit

import numpy as np
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError
from torch import Tensor
from transformers import BatchFeature

from .item_error import ItemError, MissingFileError

MAX_IMAGE_BYTES = 2**28
"""Larger files and downloads raise an error before they are read: `MAX_IMAGE_PIXELS` take as much uncompressed."""
MAX_IMAGE_PIXELS = 89_478_485
"""Images with more pixels raise an error before decoding (Pillow's own decompression-bomb limit)."""
COMMON_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are tried first, so that a program that accepts these alone sees the same image."""
MAX_ASPECT_RATIO = 200
"""Narrower images raise an error before decoding, as in Qwen2-VL: resized by the short side, they would grow."""
_DRAFT = 4
"""A large JPEG is decoded at a half, a quarter or an eighth of its size, but at least this many times the target."""
_NEARLY_WHITE = 250
"""A picture with no darker level is plain white to a viewer."""
CONCATENATED = "concatenated"
"""The key in a PIL image's `info` of a picture of several images: cropped, it would lose some of them."""
_ORIENTATION = 0x0112
"""The EXIF tag of the orientation; 1 is upright."""
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80
ALLOW_URLS = "CONJOIN_ALLOW_URLS"
"""The environment variable that allows URLs: `public`, or `private` for all addresses; none if unset. So child
processes and the code in saved checkpoints obey the same switch."""
MAX_SECONDS = 30.0
"""The longest time for one image, redirects included."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_RESERVED = "%/:=&?~#+!$,;'@()*[]"
"""Characters of a URL that need no quoting."""


def load_image(source: Any, name: str = "item", least_side: int | None = None) -> Image.Image:  # noqa: ANN401
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
    data, prefix = _find_image(source, name)
    with _decoding(name, prefix):
        image = data if isinstance(data, Image.Image) else _open(io.BytesIO(data))
    if problem := _size_problem(image.size):
        raise ItemError(name, prefix + problem)
    with _decoding(name, prefix):
        if least_side is not None and image is not data:
            image.draft(None, (least_side, least_side))
        return to_rgb(image)


def image_pixels(source: Any) -> int:  # noqa: ANN401
    """Return how many pixels an image has that `load_image` takes, by its header.

    It is 0 for what cannot be read, and the most that there may be for a URL, which is not fetched.
    """
    if is_url(source):
        return MAX_IMAGE_PIXELS
    try:
        if isinstance(source, str | os.PathLike) and not str(source).startswith("data:"):
            with _open(source) as image:
                return image.width * image.height
        data, _ = _find_image(source, "item")
        image = data if isinstance(data, Image.Image) else _open(io.BytesIO(data))
    except Exception:  # readers of headers raise many kinds on damaged files
        return 0
    return image.width * image.height


def _open(file: str | os.PathLike[str] | io.BytesIO) -> Image.Image:
    """Read the header of an encoded image, of any format that Pillow decodes itself: PostScript (EPS) is a program."""
    Image.init()
    names = dict.fromkeys((*COMMON_FORMATS, *Image.ID))
    return Image.open(file, formats=[name for name in names if name != "EPS"])


@contextmanager
def _decoding(name: str, prefix: str) -> Iterator[None]:
    """Name the image in whatever goes wrong while it is decoded."""
    try:
        yield
    except UnidentifiedImageError as error:
        raise ItemError(name, f"{prefix}cannot read the image, its format is unknown") from error
    except Image.DecompressionBombError as error:
        raise ItemError(name, f"{prefix}image is over the limit of {MAX_IMAGE_PIXELS} pixels") from error
    except MemoryError as error:
        raise ItemError(name, f"{prefix}there is not enough memory to decode the image") from error
    except Exception as error:  # decoders raise many kinds on damaged files
        raise ItemError(name, f"{prefix}cannot read the image, it is truncated or damaged ({error})") from error


def _size_problem(size: tuple[int, int]) -> str | None:
    short, long = sorted(size)
    shown = f"image of {size[0]} x {size[1]} pixels"
    if short == 0 or short * long > MAX_IMAGE_PIXELS:
        return f"{shown} is empty, or over the limit of {MAX_IMAGE_PIXELS} pixels (a decompression bomb?)"
    return (
        f"{shown} is refused: its aspect ratio is over {MAX_ASPECT_RATIO}" if long > MAX_ASPECT_RATIO * short else None
    )


def process_image(image_processor: Any, source: Any, name: str = "item") -> BatchFeature:  # noqa: ANN401
    """Load one image and run an image processor of transformers on it.

    Large pictures are many times larger than what a model sees of them. One call for each picture keeps no more than
    one of them decoded.

    Raises:
        FileNotFoundError: As `load_image`.
        ValueError: As `load_image`, or the image processor refuses the image.
    """
    settings = image_processor.to_dict()
    image = load_image(source, name, _least_side(settings))
    if image.info.get(CONCATENATED) and settings.get("do_center_crop"):
        image = pad_to_square(image)
    try:
        return image_processor(images=[image], return_tensors="pt")
    except ValueError as error:
        width, height = image.size
        raise ItemError(name, f"image of {width} x {height} pixels is refused: {error}") from error


def _least_side(settings: Mapping[str, Any]) -> int | None:
    """The side at which a decoded JPEG still is `_DRAFT` times the target; None where the target is not one size."""
    size = settings.get("size") or {}
    resizes = settings.get("do_resize", True) and not settings.get("crop_to_patches", False)
    if not resizes or not size or not set(size) <= {"height", "width", "shortest_edge"}:
        return None
    return _DRAFT * max(size.values())


def pad_to_square(image: Image.Image) -> Image.Image:
    """Return an RGB image in the middle of a white square, so that a model that crops sees all of it."""
    return ImageOps.pad(image, (max(image.size),) * 2, color="white")


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any PIL image to RGB as a viewer would show it.

    Takes the first frame of an animation that is not empty, applies the EXIF orientation, and converts a colour
    profile to sRGB. Transparent pixels become white, or black where white would hide all of a drawing; 16-bit and
    float greyscale is scaled to 8 bits rather than clipped.
    """
    if "fp" in vars(image):  # it has its file; a copy, or an image from another process, holds one frame and no file
        _seek_first(image)
    profile = image.info.get("icc_profile")
    upright = image.getexif().get(_ORIENTATION, 1) == 1
    if image.mode == "RGB" and not image.has_transparency_data and upright and not profile:
        image.load()
        return image
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):
        return _to_8_bit(image).convert("RGB")
    if not image.has_transparency_data:
        return _to_srgb(image.convert("RGB") if image.mode == "P" else image, profile)
    image = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
    alpha = image.getchannel("A")
    if profile:
        image = _to_srgb(image.convert("RGB"), profile)
        image.putalpha(alpha)
    opacity, white = np.asarray(alpha), _on(image, "white")
    if opacity.min() < 255 and opacity.any() and np.asarray(white).min() >= _NEARLY_WHITE:
        return _on(image, "black")
    return white


def _on(image: Image.Image, colour: str) -> Image.Image:
    """Return a transparent image on a background."""
    canvas = Image.new("RGBA", image.size, colour)
    canvas.alpha_composite(image)
    return canvas.convert("RGB")


def _seek_first(image: Image.Image) -> None:
    """Go to the first frame that is not wholly transparent; to the first one if all are."""
    image.seek(0)
    frame = 0
    try:
        while image.has_transparency_data and not np.asarray(image.convert("RGBA").getchannel("A")).any():
            frame += 1
            image.seek(frame)
    except EOFError:
        image.seek(0)


def _to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Convert an image with a colour profile to sRGB; one whose profile cannot be read is taken as it is."""
    if profile:
        try:
            own = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            if "sRGB" not in ImageCms.getProfileDescription(own):
                srgb = ImageCms.createProfile("sRGB")
                return ImageCms.profileToProfile(image, own, srgb, outputMode="RGB") or image.convert("RGB")
        except (ImageCms.PyCMSError, OSError, ValueError):
            pass
    return image.convert("RGB")


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


def array_to_image(array: np.ndarray | Tensor, name: str = "item") -> Image.Image:
    """Return an array or tensor of one image as a PIL image.

    Its values are integers of 8 bits, or floats from 0 to 1. Its shape is `(H, W)`, `(H, W, C)` or `(C, H, W)`, with
    1, 3 or 4 channels. Where both could be meant, the channels of an array come last, those of a tensor first.

    Raises:
        ValueError: Another shape, type or range; the message starts with `name`.
    """
    values, dims = (array, (2, 0)) if isinstance(array, np.ndarray) else (_to_numpy(array, name), (0, 2))
    if values.dtype.kind == "f" and values.size and 0 <= values.min() and values.max() <= 1:  # NaN is in no range
        values = np.rint(values * 255).astype(np.uint8)
    axes = [axis for axis in dims if values.ndim == 3 and values.shape[axis] in (1, 3, 4)]
    if values.dtype != np.uint8 or not (axes or values.ndim == 2):
        raise ItemError(
            name,
            f"an array of shape {tuple(values.shape)} and type {array.dtype} is not an image; expected "
            "(H, W), (H, W, C) or (C, H, W) with 1, 3 or 4 channels, of uint8, or of floats from 0 to 1",
        )
    values = np.moveaxis(values, axes[0], 2) if axes else values[..., None]
    return Image.fromarray(np.ascontiguousarray(values[..., 0] if values.shape[2] == 1 else values))


def _to_numpy(tensor: Tensor, name: str) -> np.ndarray:
    try:
        values: np.ndarray = (tensor.float() if tensor.is_floating_point() else tensor).numpy(force=True)
    except (TypeError, RuntimeError) as error:  # sparse, or without values
        raise ItemError(name, f"cannot read a tensor of layout {tensor.layout} on {tensor.device}") from error
    return values


def _find_image(source: Any, name: str) -> tuple[Image.Image | bytes, str]:  # noqa: ANN401
    """Return the image or its encoded bytes, and its name as the start of messages."""
    prefix = ""
    if isinstance(source, Mapping):
        data, path = source.get("bytes"), source.get("path")
        prefix = f"image {path!r}: " if path and isinstance(data, bytes) else ""
        source = path if data is None and not isinstance(path, Mapping) else data
    if isinstance(source, Image.Image):
        return source, prefix
    if isinstance(source, np.ndarray | Tensor):
        return array_to_image(source, name), prefix
    if isinstance(source, bytes):
        data = source
    elif isinstance(source, str) and source.startswith("data:image/"):
        data = decode_base64(source.partition(",")[2], name)
    elif isinstance(source, str | os.PathLike):
        prefix = f"image {os.fspath(source)!r}: "
        data = fetch(str(source), name, MAX_IMAGE_BYTES) if is_url(source) else _read_file(source, name, prefix)
    else:
        raise ItemError(name, f"{describe(source)} is not an image; expected a PIL image, a path, a URL or bytes")
    if not data:
        raise ItemError(name, f"{prefix}the image has zero bytes")
    return data, prefix


def decode_base64(text: str, name: str) -> bytes:
    """Return the bytes that `text` encodes; errors start with `name`."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ItemError(name, f"the image is not valid base64 ({error})") from error


def _read_file(path: str | os.PathLike[str], name: str, prefix: str) -> bytes:
    if not os.path.isfile(path):
        raise MissingFileError(name, f"{prefix}no such file")
    try:
        size = os.path.getsize(path)
        if size > MAX_IMAGE_BYTES:
            raise ItemError(name, f"{prefix}the file has {size} bytes; the limit is {MAX_IMAGE_BYTES}")
        return Path(path).read_bytes()
    except OSError as error:
        raise ItemError(name, f"{prefix}cannot read the file ({error})") from error


def describe(value: Any) -> str:  # noqa: ANN401
    """Return the type and a short form of any value, however deep or long, for error messages."""
    return f"{type(value).__name__} {_REPR.repr(value)[:80]}"


def allow_urls(private: bool = False) -> None:
    """Let this process, and those it starts, fetch images from http and https URLs. By default none is fetched.

    What was allowed before stays allowed.

    Args:
        private: Also allow private, loopback and link-local addresses, and use the proxies of the environment. Without
            this no proxy is used, because the address of a host cannot be checked behind a proxy.
    """
    if private or not os.environ.get(ALLOW_URLS):
        os.environ[ALLOW_URLS] = "private" if private else "public"


def is_url(source: object) -> bool:
    """Whether `source` is an http or https URL."""
    return isinstance(source, str) and source[:8].lower().startswith(("http://", "https://"))


def check_urls_allowed(url: str, name: str) -> str:
    """Return which addresses are allowed, `"public"` or `"private"`.

    Raises:
        ItemError: None, so the image `url` of the item `name` cannot be used.
    """
    allowed = os.environ.get(ALLOW_URLS, "")
    if allowed not in ("public", "private"):
        raise ItemError(
            name,
            f"image {url!r}: URLs are not fetched unless you allow it: pass --allow-urls, call "
            f"conjoin.processing.allow_urls() or set {ALLOW_URLS}=public",
        )
    return allowed


def fetch(url: str, name: str, max_bytes: int) -> bytes:
    """Return the body of a URL.

    Raises:
        ItemError: URLs are not allowed, or it cannot be fetched within the limits.
    """
    limits = _Limits(max_bytes, check_urls_allowed(url, name) == "private")
    try:
        parts = urlsplit(url)
        path, query = (quote(part, safe=_RESERVED) for part in (parts.path, parts.query))
        ascii_url = urlunsplit((parts.scheme, parts.netloc.encode("idna").decode(), path, query, ""))
        request = urllib.request.Request(ascii_url, headers={"User-Agent": "Mozilla/5.0 (compatible; conjoin)"})
        with _opener(limits).open(request, timeout=MAX_SECONDS) as response:
            return b"".join(iter(partial(response.read, 2**16), b""))
    except (OSError, http.client.HTTPException, ValueError, MemoryError) as error:
        cause = error.reason if isinstance(error, URLError) and not isinstance(error, HTTPError) else error
        words = f"it takes over {MAX_SECONDS:g} seconds" if isinstance(cause, TimeoutError) else cause
        raise ItemError(name, f"image {url!r}: cannot fetch the image ({words})") from error


class _Limits:
    """What one fetch may use: its connections share the time and the bytes, also after redirects."""

    def __init__(self, max_bytes: int, private: bool) -> None:
        self.max_bytes, self.private = max_bytes, private
        self._received = 0
        self._end = time.monotonic() + MAX_SECONDS

    def connect(self, address: tuple[str, int], *unused: object) -> socket.socket:
        """Open a connection, as `socket.create_connection`, to an address that was checked."""
        addresses = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        hidden = [ip for ip in (str(entry[4][0]) for entry in addresses) if not self.private and not _is_public(ip)]
        if hidden:
            raise OSError(
                f"the host {address[0]!r} has the address {hidden[0]}, which is not public; allow it by "
                f"--allow-private-urls, allow_urls(private=True) or {ALLOW_URLS}=private"
            )
        failure = OSError(f"the host {address[0]!r} has no address")
        for family, kind, protocol, _, where in addresses:
            connection = self.limited(socket.socket)(family, kind, protocol)
            try:
                connection.settimeout(self._seconds_left())
                connection.connect(where)
                return connection
            except OSError as error:
                connection.close()
                failure = error
        raise failure

    def limited(self, kind: type[socket.socket]) -> type[socket.socket]:
        """Return a kind of socket that receives no more than the limits allow."""

        def recv_into(connection: socket.socket, *args: Any) -> int:  # noqa: ANN401
            connection.settimeout(self._seconds_left())
            count = kind.recv_into(connection, *args)
            self._received += count
            if self._received > self.max_bytes:
                raise OSError(f"it has over {self.max_bytes} bytes")
            return count

        return type(kind.__name__, (kind,), {"recv_into": recv_into})

    def _seconds_left(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class _Handler(urllib.request.AbstractHTTPHandler):
    """Opens http and https URLs by the connections of `_Limits`."""

    def __init__(self, limits: _Limits) -> None:
        super().__init__()
        self.limits = limits
        self.tls = ssl.create_default_context()
        self.tls.sslsocket_class = limits.limited(ssl.SSLSocket)  # type: ignore[assignment]

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._connection, http.client.HTTPConnection), request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._connection, http.client.HTTPSConnection), request, context=self.tls)

    http_request = https_request = urllib.request.AbstractHTTPHandler.do_request_

    def _connection(self, kind: Any, host: str, **options: Any) -> Any:  # noqa: ANN401
        connection = kind(host, **options)
        connection._create_connection = self.limits.connect
        return connection


def _opener(limits: _Limits) -> urllib.request.OpenerDirector:
    """An opener of http and https alone; proxies of the environment only where addresses are not checked."""
    opener = urllib.request.OpenerDirector()
    kinds = urllib.request
    for kind in (kinds.HTTPRedirectHandler, kinds.HTTPDefaultErrorHandler, kinds.HTTPErrorProcessor):
        opener.add_handler(kind())
    opener.add_handler(kinds.UnknownHandler())
    opener.add_handler(_Handler(limits))
    if limits.private:
        opener.add_handler(kinds.ProxyHandler())
    return opener


def _is_public(address: str) -> bool:
    """Whether an IP address belongs to the public internet, also one that holds an address of IPv4."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        translated = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else None
        ip = ip.ipv4_mapped or ip.sixtofour or translated or ip
    return ip.is_global and not ip.is_multicast
