"""Hostile images, texts, items, paths and requests, made by code: the corpus of `test_hostile_inputs.py`.

Each has a name, its value and what may come of it: `VECTOR` (it is unusual but sound), `ERROR` (it cannot be used), or
`EITHER` (it depends on the decoder or the model). Nothing else may: no other exception, no hang, no access to the
network or to other files. What a part of an item may be is in `processing/`.
"""

import io
import json
import random
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, PngImagePlugin

from damage import damages

VECTOR, ERROR, EITHER = "vector", "error", "either"
CANARY = "canary-outside"
"""Part of the name of a file that hostile inputs name and that nobody may open."""


class Hostile(NamedTuple):
    """A hostile input: of which `kind`, its name, its value and what may come of it."""

    kind: str
    name: str
    value: Any
    allowed: str = EITHER

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


def _listed(kind, **by_result):
    """The inputs of a kind, from a mapping for each result."""
    return [
        Hostile(kind, name, value, result) for result, values in by_result.items() for name, value in values.items()
    ]


def picture(size=(24, 18), seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def encoded(image, file_format="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, file_format, **options)
    return stream.getvalue()


def _chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, data=b"", *extra):
    """A PNG file that says what it likes about itself."""
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n" + header + b"".join(extra) + _chunk(b"IDAT", zlib.compress(data)) + _chunk(b"IEND", b"")
    )


def images() -> list[Hostile]:
    """Files that say that they are images, as bytes."""
    whole = {name: encoded(picture(), name) for name in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")}
    jpeg, gif, bmp = whole["JPEG"], whole["GIF"], whole["BMP"]
    size_of_jpeg = jpeg.index(b"\xff\xc0") + 5
    frames = {"save_all": True, "append_images": [picture(seed=seed) for seed in (1, 2)]}
    sound, odd, wrong = {}, {}, {}
    for name, data in whole.items():  # a bit of the head and of the rest is flipped, and the end is cut
        ends = [int(len(data) * share) for share in (0.02, 0.25, 0.5, 0.9, 0.99)]
        odd |= {f"{name}, {said}": damaged for said, damaged in damages(name, data, 3, ends)}
        odd |= {f"{name}, head, {said}": head + data[40:] for said, head in damages(name, data[:40], 4, ())}
    for name in ("GIF", "WEBP", "PNG", "TIFF"):
        sound[f"{name} of three frames"] = encoded(picture(), name, **frames)
    for name, data in (
        ("cyclic", b"Exif\0\0II*\0\x08\0\0\0\1\0\x69\x87\4\0\1\0\0\0\x08\0\0\0\x08\0\0\0"),
        ("huge count", b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + bytes(20)),
    ):
        odd |= {f"{kind} with {name} EXIF": encoded(picture(), kind, exif=data) for kind in ("JPEG", "WEBP")}
    for size in ((1, 1), (1, 60), (200, 1)):
        odd[f"PNG of {size}"] = encoded(picture(size))
    text = PngImagePlugin.PngInfo()
    text.add_text("Comment", "a" * 10**6, zip=True)
    negative = Image.fromarray(np.array([[-7.0, 1e30]] * 2, np.float32))
    sound |= {
        "PNG with text behind it": whole["PNG"] + b"<script>alert(1)</script>",
        "TIFF of negative and huge floats": encoded(negative, "TIFF"),
    }
    odd |= {
        "PNG with a text that inflates": encoded(picture(), pnginfo=text),
        "APNG with a wrong frame count": png(4, 4, bytes(52), _chunk(b"acTL", struct.pack(">II", 2**31, 0))),
    }
    wrong |= {
        "PNG bomb that inflates": png(30_000, 30_000, bytes(10**6)),
        "PNG of 2^31 x 2^31": png(2**31 - 1, 2**31 - 1),
        "PNG that claims more than it has": png(300, 300, bytes(40)),
        "GIF bomb": gif[:6] + b"\xff\xff\xff\xff" + gif[10:],
        "BMP bomb": bmp[:18] + struct.pack("<ii", 60_000, 60_000) + bmp[26:],
        "JPEG bomb": jpeg[:size_of_jpeg] + b"\xff\xff\xff\xff" + jpeg[size_of_jpeg + 4 :],
        "PPM bomb": b"P6 99999 99999 255\n" + bytes(30),
        "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="http://127.0.0.1:9/a.png"/></svg>',
        "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(secret) show\n",
        "a pickle": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
        "noise": random.Random(0).randbytes(500),
        "a TIFF that points to itself": b"II*\0\x08\0\0\0\0\0\x08\0\0\0",
    }
    return _listed("image", vector=sound, either=odd, error=wrong)


TOKENS = (
    "<|image_pad|> <|vision_start|> <|im_start|> <|im_end|> <|endoftext|> [RET] [CLS] [SEP] [PAD] [UNK] [MASK] <s> "
    "</s> <pad> <mask> <img> <IMG_CONTEXT> <|startoftext|> <image>"
).split()
PAGES = {
    "a script": "<script>alert(1)</script>",
    "a closing tag": "</title></style></textarea>'\"><svg onload=alert(1)>",
    "template braces": "{0} {} {{x}} {noun!r} {a.__class__}",
    "jinja": "{{ 7 * 7 }} {% for a in b %} {{ config }}",
    "shell": "$(touch x); `id` && rm -rf / | cat ${HOME}",
    "CSV quotes": 'a,"b""\r\nc",d',
    "an escape of a terminal": "\x1b[31mred\x1b[0m \x1b]0;title\x07",
    "a path": "/etc/passwd",
    "a URL": "http://127.0.0.1:9/a",
}


def texts() -> list[Hostile]:
    """Texts, those of special tokens of tokenizers among them."""
    wrong = {"white space of all kinds": " \t\r\n\x0b\x0c\x85\u2003\u3000", "surrogates": "\udc00\ud800"}
    odd = {
        "zero-width space": "\u200b",
        "NUL": "a\0b",
        "joined emoji": "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
        "a thousand combining marks": "e" + "\u0301" * 1000,
        "a byte order mark": "\ufeffa",
        "normalisation that grows": "\ufdfa" * 50,
        "a million letters": "a" * 10**6,
        "a million words": "ab " * 333_333,
        "100,000 emoji": "\U0001f600" * 10**5,
    }
    odd |= {f"the token {token}": token for token in TOKENS}
    odd |= {f"the token {token} in words": f"a {token}{token} b" for token in TOKENS}
    return _listed("text", error=wrong, either=odd, vector=PAGES)


def _deep(wrap):
    value: Any = "a"
    for _ in range(3000):
        value = wrap(value)
    return value


def _message(*parts):
    return {"role": "user", "content": list(parts)}


class _Liar(dict):
    """A mapping that has a key and yet has not."""

    def __contains__(self, key):
        return True


def items(folder: Path) -> list[Hostile]:
    """Values that are passed as items; `folder` holds the files that they name."""
    good = encoded(picture())
    for name in ("good.png", "wrong.jpg"):
        (folder / name).write_bytes(good)
    (folder / "directory.png").mkdir(exist_ok=True)
    own = str(folder / "good.png")
    recursive: list[Any] = []
    recursive.append(recursive)
    itself: dict[str, Any] = {"text": "a"}
    itself["image"] = itself
    lazy, closed = Image.open(io.BytesIO(encoded(picture((90, 90)))[:-900])), Image.open(io.BytesIO(good))
    closed.close()
    sound = {
        "bytes and a path that is not there": {"image": {"bytes": good, "path": "/not/there.png"}},
        "a wrong ending": {"image": str(folder / "wrong.jpg")},
    }
    odd = {
        "a system message alone": [{"role": "system", "content": "a"}],
        "a thousand parts": _message(*["a"] * 1000),
        "two hundred images": {"image": [own] * 200},
        "placeholders without images": {"text": "<image>" * 9},
    }
    wrong_images = {
        "3,000 deep": _deep(lambda value: [value]),
        "images of images": _deep(lambda value: {"path": value}),
        "a picture that is cut": lazy,
        "a picture that is closed": closed,
        "a name with NUL": "a\0.png",
        "a name with a surrogate": "\ud800.png",
        "a very long name": "a" * 10_000 + ".png",
        "a device": "/dev/zero",
        "a file URL": "file:///etc/passwd",
        "a URL": "http://127.0.0.1:9/a.png",
        "a URL of metadata": "http://169.254.169.254/latest/meta-data/a.png",
    }
    wrong = {
        "a generator": (letter for letter in "ab"),
        "a recursive list": recursive,
        "a recursive mapping": itself,
        "a list 3,000 deep": _deep(lambda value: [value]),
        "recursive images": _message({"type": "image", "image": recursive}),
        "a directory": str(folder / "directory.png"),
        "a video as part": _message({"type": "video", "video": "clip.mp4"}),
        "a mapping that lies": _Liar(),
        **{f"image of {name}": {"image": value} for name, value in wrong_images.items()},
    }
    return _listed("item", vector=sound, either=odd, error=wrong)


def outside_paths(folder: Path) -> list[Hostile]:
    """Names of a file outside of `folder`, as a table, an archive or a request may hold them."""
    outside = folder.parent / f"{CANARY}.png"
    outside.write_bytes(encoded(picture()))
    (folder / "link.png").unlink(missing_ok=True)
    (folder / "link.png").symlink_to(outside)
    (folder / "inner").mkdir(exist_ok=True)
    names = {
        "down and up": f"inner/../../{CANARY}.png",
        "absolute": str(outside),
        "doubled slashes": f"..//{CANARY}.png",
        "a link with dots": "inner/../link.png",
        "a file URL": outside.as_uri(),
        "percent signs": f"%2e%2e/{CANARY}.png",
        "backslashes": f"..\\{CANARY}.png",
    }
    return _listed("path", error=names)


def requests() -> list[Hostile]:
    """Bodies of HTTP requests to `/embed` and `/search`, as bytes: whatever is no list of items."""
    bodies = [
        *(b"", b"{", b'{"items": ["\xff\xfe"]}', b'["a"]', b"[" * 100_000, b'{"items": [NaN]}'),
        b'{"items": [{"text": ' + b'{"a": ' * 900 + b"1" + b"}" * 900 + b"}]}",
        *(b'{"items": ["\\ud800"]}', b'{"items": [{"image": [["a"]]}]}', b'{"items": ["a"], "items": 5}'),
        b'{"items": [{"image": {"path": "/etc/passwd"}}]}',
        json.dumps({"items": [{"role": "user", "content": "a"}]}).encode(),
    ]
    more = {
        '"\\ud800"': ["1"],
        '"instruction"': ['"\\ud800"', '["a"]'],
        '"k"': ["9" * 400, '"x"'],
        '"where"': ["5", '"\\ud800"', '"' + "(" * 150 + '"', "\"price = 'a'\"", '"1=1; DROP TABLE rows"'],
    }
    bodies += [f'{{"items": ["a"], {key}: {value}}}'.encode() for key, values in more.items() for value in values]
    return [Hostile("request", repr(body[:60]), body) for body in bodies]
