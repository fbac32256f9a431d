"""Hostile images, made by code: damaged, unusual, oversized, mislabelled; a part of `hostile.py`."""

import io
import random
import struct
import zlib
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageCms, PngImagePlugin

VECTOR, ERROR, EITHER = "vector", "error", "either"


class Hostile(NamedTuple):
    """A hostile input: of which `kind`, its name, its value and what may come of it."""

    kind: str
    name: str
    value: Any
    allowed: str = EITHER

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


def picture(mode="RGB", size=(24, 18), seed=0):
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(values)
    if mode == "I;16":
        return Image.fromarray(values[..., 0].astype(np.uint16) * 257)
    return image.convert("L").convert(mode) if mode in ("I", "F", "LA") else image.convert(mode)


def encoded(image, file_format, **options):
    stream = io.BytesIO()
    image.save(stream, file_format, **options)
    return stream.getvalue()


def _chunk(kind, data, crc=None):
    crc = zlib.crc32(kind + data) if crc is None else crc
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)


SIGNATURE = b"\x89PNG\r\n\x1a\n"


def _png(width, height, data=b"", *extra, depth=8, colour=2, crc=None):
    """A PNG file that says what it likes about itself."""
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0), crc)
    return SIGNATURE + header + b"".join(extra) + _chunk(b"IDAT", zlib.compress(data)) + _chunk(b"IEND", b"")


FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


def _damaged():
    """Every format cut and with a flipped bit, at seeded places of its head and its body."""
    for file_format in FORMATS:
        whole = encoded(picture(), file_format)
        rng = random.Random(file_format)
        for share in (0.02, 0.25, 0.5, 0.9, 0.99):
            yield f"{file_format} cut at {share:.0%}", whole[: int(len(whole) * share)], EITHER
        places = [rng.randrange(40) for _ in range(4)] + [rng.randrange(40, len(whole)) for _ in range(3)]
        for place in places:
            bit = rng.randrange(8)
            flipped = whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
            yield f"{file_format} with bit {bit} of byte {place} flipped", flipped, EITHER


def _modes():
    saved = {
        "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
        "JPEG": ("L", "RGB", "CMYK"),
        "WEBP": ("RGB", "RGBA"),
        "TIFF": ("1", "L", "LA", "P", "RGBA", "CMYK", "LAB", "I;16", "I", "F"),
        "GIF": ("1", "L", "P"),
        "BMP": ("1", "L", "P", "RGB", "RGBA"),
    }
    for file_format, modes in saved.items():
        for mode in modes:
            yield f"{file_format} of mode {mode}", encoded(picture(mode), file_format), VECTOR
    for orientation in (1, 2, 3, 4, 5, 6, 7, 8, 0, 99):
        exif = Image.Exif()
        exif[0x0112] = orientation
        yield f"JPEG with EXIF orientation {orientation}", encoded(picture(), "JPEG", exif=exif), VECTOR
    palette = picture("P")
    yield "PNG with a transparent palette", encoded(palette, "PNG", transparency=bytes(range(255))), VECTOR
    yield "GIF with a transparent colour", encoded(palette, "GIF", transparency=3), VECTOR
    yield "PNG with a transparent grey", encoded(picture("L"), "PNG", transparency=9), VECTOR
    frames = {"save_all": True, "append_images": [picture(seed=seed) for seed in (1, 2)]}
    for file_format in ("GIF", "WEBP", "PNG", "TIFF"):
        yield f"{file_format} of three frames", encoded(picture(), file_format, **frames), VECTOR
    yield "JPEG progressive", encoded(picture(), "JPEG", progressive=True), VECTOR
    nan = Image.fromarray(np.full((6, 6), np.nan, np.float32))
    yield "TIFF of NaN", encoded(nan, "TIFF"), ERROR
    infinite = Image.fromarray(np.array([[np.inf, 0]] * 2, np.float32))
    yield "TIFF of infinity", encoded(infinite, "TIFF"), ERROR
    negative = Image.fromarray(np.array([[-7.0, 1e30]] * 2, np.float32))
    yield "TIFF of negative and huge floats", encoded(negative, "TIFF"), VECTOR


def _sizes():
    for width, height in ((1, 1), (1, 60), (60, 1), (2, 2), (1, 200), (200, 1)):
        yield f"PNG of {width} x {height}", encoded(picture(size=(width, height)), "PNG"), EITHER
    for width, height in ((1, 5000), (5000, 1)):
        yield f"PNG of {width} x {height}", encoded(picture(size=(width, height)), "PNG"), ERROR
    yield "PNG bomb of 10^9 pixels", _png(40_000, 25_000), ERROR
    yield "PNG bomb that inflates", _png(30_000, 30_000, bytes(10**6)), ERROR
    yield "PNG of 2^31 x 2^31", _png(2**31 - 1, 2**31 - 1), ERROR
    yield "PNG of 0 x 0", _png(0, 0), ERROR
    yield "PNG of 0 x 5", _png(0, 5), ERROR
    yield "PNG that claims more than it has", _png(300, 300, bytes(40)), ERROR
    gif = encoded(picture(), "GIF")
    yield "GIF bomb", gif[:6] + b"\xff\xff\xff\xff" + gif[10:], ERROR
    bmp = bytearray(encoded(picture(), "BMP"))
    bmp[18:26] = struct.pack("<ii", 60_000, 60_000)
    yield "BMP bomb", bytes(bmp), ERROR
    bmp[18:26] = struct.pack("<ii", 24, -18)
    yield "BMP from top to bottom", bytes(bmp), VECTOR
    bmp[18:26] = struct.pack("<ii", -24, 18)
    yield "BMP of negative width", bytes(bmp), EITHER
    jpeg = encoded(picture(), "JPEG")
    start = jpeg.index(b"\xff\xc0") + 5
    yield "JPEG bomb", jpeg[:start] + b"\xff\xff\xff\xff" + jpeg[start + 4 :], ERROR
    yield "PPM bomb", b"P6 99999 99999 255\n" + bytes(30), ERROR
    yield "PPM without pixels", b"P6 10 10 255\n", ERROR
    text = PngImagePlugin.PngInfo()
    text.add_text("Comment", "a" * 10**6, zip=True)
    yield "PNG with a text that inflates", encoded(picture(), "PNG", pnginfo=text), EITHER


def _metadata():
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for name, data in (("sound", profile), ("garbled", b"\xff" * 300), ("cut", profile[:50]), ("empty", b"\0")):
        for file_format in ("PNG", "JPEG", "WEBP", "TIFF"):
            yield f"{file_format} with a {name} ICC profile", encoded(picture(), file_format, icc_profile=data), VECTOR
    for name, data in (
        ("garbled", b"Exif\0\0" + b"\xff" * 60),
        ("cyclic", b"Exif\0\0II*\0\x08\0\0\0\1\0\x69\x87\4\0\1\0\0\0\x08\0\0\0\x08\0\0\0"),
        ("cut", b"Exif\0\0MM\0*\0\0"),
        ("huge count", b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + bytes(20)),
    ):
        yield f"JPEG with {name} EXIF", encoded(picture(), "JPEG", exif=data), EITHER
        yield f"WEBP with {name} EXIF", encoded(picture(), "WEBP", exif=data), EITHER
    whole = encoded(picture(), "PNG")
    yield "PNG with text behind it", whole + b"<script>alert(1)</script>", VECTOR
    yield "PNG twice", whole * 2, VECTOR
    yield "PNG without an end", whole[:-12], EITHER
    yield "PNG with a wrong checksum of its header", _png(4, 4, bytes(52), crc=7), ERROR
    yield "PNG without pixels", SIGNATURE + _chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 8, 2, 0, 0, 0)), ERROR
    yield "PNG with an unknown critical chunk", _png(4, 4, bytes(52), _chunk(b"ABCD", b"x")), EITHER
    yield "PNG of 3 bits", _png(4, 4, bytes(52), depth=3), ERROR
    yield "PNG of an unknown colour type", _png(4, 4, bytes(52), colour=5), ERROR
    yield "PNG palette without palette", _png(4, 4, bytes(20), colour=3), EITHER
    yield "APNG with a wrong frame count", _png(4, 4, bytes(52), _chunk(b"acTL", struct.pack(">II", 2**31, 0))), EITHER


def _no_images():
    svg = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="http://127.0.0.1:9/a.png"/><script>1</script></svg>'
    for name, data in {
        "zero bytes": b"",
        "the signature of PNG": SIGNATURE,
        "SVG": svg,
        "XML with an external entity": b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><a>&b;</a>',
        "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(secret) show\n",
        "a pickle": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
        "zeros": bytes(500),
        "noise": random.Random(0).randbytes(500),
        "a WEBP of nothing": b"RIFF\x04\0\0\0WEBP",
        "a TIFF that points to itself": b"II*\0\x08\0\0\0\0\0\x08\0\0\0",
        "an XBM": b"#define a_width 8\n#define a_height 8\nstatic char a_bits[] = {",
        "a video": b"\0\0\0\x18ftypmp42" + bytes(60),
    }.items():
        yield name, data, ERROR


def images() -> list[Hostile]:
    """Files that say that they are images, as bytes."""
    makers = (_damaged, _modes, _sizes, _metadata, _no_images)
    return [Hostile("image", *made) for maker in makers for made in maker()]
