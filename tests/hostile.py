"""Hostile images, texts, items and requests, made by code: the corpus of `test_hostile_inputs.py`.

Each has a name, its value and what may come of it: `VECTOR` (it is unusual but sound), `ERROR` (it cannot be used), or
`EITHER` (it depends on the decoder or the model). Nothing else may: no other exception, no hang, no access to the
network or to other files.
"""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from hostile_images import EITHER, ERROR, VECTOR, Hostile, encoded, picture

CANARY = "canary-outside"
"""Part of the name of a file that hostile inputs name and that nobody may open."""


TEXTS = {
    "empty": ("", ERROR),
    "spaces": ("   ", ERROR),
    "white space of all kinds": (" \t\r\n\x0b\x0c\x85\u2003\u3000", ERROR),
    "zero-width space": ("\u200b", EITHER),
    "NUL": ("a\0b", EITHER),
    "a lone high surrogate": ("a \ud800 b", ERROR),
    "surrogates in the wrong order": ("\udc00\ud800", ERROR),
    "joined emoji": ("\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466", EITHER),
    "a thousand combining marks": ("e" + "\u0301" * 1000, EITHER),
    "a byte order mark": ("\ufeffa", EITHER),
    "normalisation that grows": ("\ufdfa" * 50, EITHER),
    "a million letters": ("a" * 10**6, EITHER),
    "a million words": ("ab " * 333_333, EITHER),
    "100,000 emoji": ("\U0001f600" * 10**5, EITHER),
    "template braces": ("{0} {} {{x}} {noun!r} {a.__class__}", VECTOR),
    "jinja": ("{{ 7 * 7 }} {% for a in b %} {{ config }}", VECTOR),
    "shell": ("$(touch x); `id` && rm -rf / | cat ${HOME}", VECTOR),
    "CSV quotes": ('a,"b""\r\nc",d', VECTOR),
    "a script": ("<script>alert(1)</script>", VECTOR),
    "an image tag": ("<img src=x onerror=alert(1)>", VECTOR),
    "a closing tag": ("</title></style></textarea>'\"><svg onload=alert(1)>", VECTOR),
    "an escape of a terminal": ("\x1b[31mred\x1b[0m \x1b]0;title\x07", VECTOR),
    "a path": ("/etc/passwd", VECTOR),
    "a URL": ("http://127.0.0.1:9/a", VECTOR),
}
TOKENS = (
    "<|image_pad|> <|vision_start|> <|vision_end|> <|im_start|> <|im_end|> <|endoftext|> [RET] [CLS] [SEP] [PAD] "
    "[UNK] [MASK] <s> </s> <pad> <unk> <mask> <img> </img> <IMG_CONTEXT> <video> <|startoftext|> <image>"
).split()


def texts() -> list[Hostile]:
    """Texts, those of special tokens of tokenizers among them."""
    found = [Hostile("text", name, *value) for name, value in TEXTS.items()]
    found += [Hostile("text", f"the token {token}", token, EITHER) for token in TOKENS]
    found += [Hostile("text", f"the token {token} in words", f"a {token}{token} b", EITHER) for token in TOKENS[:12]]
    return found


def _deep(depth, wrap):
    value: Any = "a"
    for _ in range(depth):
        value = wrap(value)
    return value


def _message(*parts):
    return {"role": "user", "content": list(parts)}


def items(folder: Path) -> list[Hostile]:
    """Values that are passed as items; `folder` is theirs, and the file that they may not open lies beside it.

    It holds the files that they name.
    """
    good = encoded(picture(), "PNG")
    (folder / "good.png").write_bytes(good)
    (folder / "wrong.jpg").write_bytes(good)
    (folder / "empty.png").write_bytes(b"")
    (folder / "directory.png").mkdir(exist_ok=True)
    own = str(folder / "good.png")
    recursive_list: list[Any] = []
    recursive_list.append(recursive_list)
    recursive_dict: dict[str, Any] = {"text": "a"}
    recursive_dict["image"] = recursive_dict
    uri = "data:image/png;base64," + base64.b64encode(good).decode()
    lazy = Image.open(io.BytesIO(encoded(picture(size=(90, 90)), "PNG")[:-900]))
    closed = Image.open(io.BytesIO(good))
    closed.close()
    values: dict[str, tuple[Any, str]] = {
        "None": (None, ERROR),
        "a number": (7, ERROR),
        "bytes": (good, ERROR),
        "an object": (object(), ERROR),
        "a generator": ((letter for letter in "ab"), ERROR),
        "an empty list": ([], ERROR),
        "an empty mapping": ({}, ERROR),
        "a list of texts": (["a", "b"], ERROR),
        "a recursive list": (recursive_list, ERROR),
        "a recursive mapping": (recursive_dict, ERROR),
        "a list 3,000 deep": (_deep(3000, lambda value: [value]), ERROR),
        "an image 3,000 deep": ({"image": _deep(3000, lambda value: [value])}, ERROR),
        "an image of images": ({"image": _deep(3000, lambda value: {"path": value})}, ERROR),
        "recursive images": (_message({"type": "image", "image": recursive_list}), ERROR),
        "unknown keys": ({"text": "a", "caption": "b", 3: 4}, ERROR),
        "an unknown key alone": ({"file_name": own}, ERROR),
        "both None": ({"text": None, "image": None}, ERROR),
        "text of a number": ({"text": 5}, ERROR),
        "texts with None": ({"text": [None, "a"]}, VECTOR),
        "image of a number": ({"image": 5}, ERROR),
        "image of a list of numbers": ({"image": [1, 2]}, ERROR),
        "image of a nested list": ({"image": [[own]]}, ERROR),
        "image of empty bytes": ({"image": b""}, ERROR),
        "bytes that are a text": ({"image": {"bytes": "abc", "path": None}}, ERROR),
        "a path that is a number": ({"image": {"path": 5}}, ERROR),
        "neither bytes nor path": ({"image": {"bytes": None, "path": None}}, ERROR),
        "bytes and a path that is not there": ({"image": {"bytes": good, "path": "/not/there.png"}}, VECTOR),
        "a picture that is cut": ({"image": lazy}, ERROR),
        "a picture that is closed": ({"image": closed}, ERROR),
        "a picture of no pixels": ({"image": Image.new("RGB", (0, 5))}, ERROR),
        "an array of NaN": ({"image": np.full((4, 4, 3), np.nan)}, ERROR),
        "an array without a shape": ({"image": np.array(5)}, ERROR),
        "an array of no pixels": ({"image": np.zeros((0, 4, 3), np.uint8)}, ERROR),
        "a tensor of NaN": ({"image": torch.full((3, 4, 4), torch.nan)}, ERROR),
        "a wrong ending": ({"image": str(folder / "wrong.jpg")}, VECTOR),
        "an empty file": ({"image": str(folder / "empty.png")}, ERROR),
        "a directory": (str(folder / "directory.png"), ERROR),
        "a file that is not there": ("not-there.png", ERROR),
        "a name with NUL": ({"image": "a\0.png"}, ERROR),
        "a name with a surrogate": ({"image": "\ud800.png"}, ERROR),
        "a very long name": ({"image": "a" * 10_000 + ".png"}, ERROR),
        "a device": ({"image": "/dev/zero"}, ERROR),
        "a file URL": ({"image": "file:///etc/passwd"}, ERROR),
        "a URL": ({"image": "http://127.0.0.1:9/a.png"}, ERROR),
        "a URL of metadata": ({"image": "http://169.254.169.254/latest/meta-data/a.png"}, ERROR),
        "a URL of S3": ({"image": "s3://bucket/a.png"}, ERROR),
        "a data URI": ({"image": uri}, VECTOR),
        "a bare data URI": (uri, VECTOR),
        "a data URI that is no base64": ({"image": "data:image/png;base64,%%%"}, ERROR),
        "a data URI of SVG": ({"image": "data:image/svg+xml;base64,PHN2Zy8+"}, ERROR),
        "a video as part": (_message({"type": "video", "video": "clip.mp4"}), ERROR),
        "a role alone": ({"role": "user"}, ERROR),
        "content of an empty text": ({"role": "user", "content": ""}, ERROR),
        "a part of an unknown type": (_message({"type": "audio", "audio": "a"}), ERROR),
        "a type that is a list": (_message({"type": ["text"], "text": "a"}), ERROR),
        "a part of text 5": (_message({"type": "text", "text": 5}), ERROR),
        "an image part without image": (_message({"type": "image"}), ERROR),
        "an image URL of a list": (_message({"type": "image_url", "image_url": {"url": [own]}}), ERROR),
        "base64 that is a number": (_message({"type": "image", "base64": 5}), ERROR),
        "base64 that is none": (_message({"type": "image", "base64": "%"}), ERROR),
        "a message among texts": ([_message("a"), "b"], ERROR),
        "a system message alone": ([{"role": "system", "content": "a"}], EITHER),
        "a role of its own": ([{"role": {"a": 1}, "content": "a"}], EITHER),
        "a thousand parts": (_message(*["a"] * 1000), EITHER),
        "two hundred images": ({"image": [own] * 200}, EITHER),
        "placeholders without images": ({"text": "<image>" * 9}, EITHER),
        "a mapping that lies": (_Liar(), ERROR),
    }
    return [Hostile("item", name, *value) for name, value in values.items()]


class _Liar(dict):
    """A mapping that has a key and yet has not."""

    def __contains__(self, key):
        return True


def outside_paths(folder: Path) -> list[Hostile]:
    """Names of a file outside of `folder`, as a table, an archive or a request may hold them."""
    outside = folder.parent / f"{CANARY}.png"
    outside.write_bytes(encoded(picture(), "PNG"))
    (folder / "link.png").unlink(missing_ok=True)
    (folder / "link.png").symlink_to(outside)
    (folder / "inner").mkdir(exist_ok=True)
    names = {
        "up": f"../{CANARY}.png",
        "down and up": f"inner/../../{CANARY}.png",
        "absolute": str(outside),
        "absolute with dots": str(folder / ".." / f"{CANARY}.png"),
        "doubled slashes": f"..//{CANARY}.png",
        "a dot between": f"./.././{CANARY}.png",
        "a link": "link.png",
        "a link with dots": "inner/../link.png",
        "a file URL": outside.as_uri(),
        "percent signs": f"%2e%2e/{CANARY}.png",
        "backslashes": f"..\\{CANARY}.png",
    }
    return [Hostile("path", name, value, ERROR) for name, value in names.items()]


def requests() -> list[Hostile]:
    """Bodies of HTTP requests to `/embed` and `/search`, as bytes: whatever is no list of items."""
    bodies: dict[str, bytes] = {
        "nothing": b"",
        "no JSON": b"{",
        "bytes that are not UTF-8": b'{"items": ["\xff\xfe"]}',
        "a list": b'["a"]',
        "100,000 brackets": b"[" * 100_000,
        "a deep item": b'{"items": [{"text": ' + b'{"a": ' * 900 + b"1" + b"}" * 900 + b"}]}",
        "a key with a surrogate": b'{"items": ["a"], "\\ud800": 1}',
        "an instruction with a surrogate": b'{"items": ["a"], "instruction": "\\ud800"}',
        "an item with a surrogate": b'{"items": ["\\ud800"]}',
        "NaN": b'{"items": [NaN]}',
        "a huge k": b'{"items": ["a"], "k": ' + b"9" * 400 + b"}",
        "k of a text": b'{"items": ["a"], "k": "x"}',
        "an instruction that is a list": b'{"items": ["a"], "instruction": ["a"]}',
        "where of a number": b'{"items": ["a"], "where": 5}',
        "where of SQL": b'{"items": ["a"], "where": "1=1; DROP TABLE rows"}',
        "where of Python": b'{"items": ["a"], "where": "__import__(\'os\').system(\'true\')"}',
        "where of a surrogate": b'{"items": ["a"], "where": "\\ud800"}',
        "where of brackets": b'{"items": ["a"], "where": "' + b"(" * 150 + b'"}',
        "where of another type": b'{"items": ["a"], "where": "price = \'a\'"}',
        "an image of a list of lists": b'{"items": [{"image": [["a"]]}]}',
        "an image of an object": b'{"items": [{"image": {"path": "/etc/passwd"}}]}',
        "a message": json.dumps({"items": [{"role": "user", "content": "a"}]}).encode(),
        "keys twice": b'{"items": ["a"], "items": 5}',
    }
    return [Hostile("request", name, body, EITHER) for name, body in bodies.items()]
