import io
import struct
import zlib
from dataclasses import replace

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from conjoin.processing.item_images import load_image
from conjoin.serving import ItemError, Limits
from conjoin.serving.limits import TooLargeError, read_items, read_picture
from tiny_serving import LIMITS, png, uri


def test_texts_are_never_files(tmp_path, monkeypatch):
    (tmp_path / "secret.png").write_bytes(png())
    monkeypatch.chdir(tmp_path)
    assert read_items(["secret.png", {"text": "secret.png"}], LIMITS).items == [{"text": "secret.png"}] * 2


def test_images_and_texts_become_items():
    (both, several, places), pixels = read_items(
        [
            {"image": uri(png("red")), "text": "in green"},
            {"image": [uri(png("red")), uri(png("blue"))]},
            {"image": [uri(png("red")), uri(png("blue"))], "text": "like <image> with <image>"},
        ],
        LIMITS,
    )
    assert pixels == 5 * 64
    assert load_image(both["image"]).getpixel((0, 0)) == (255, 0, 0)
    assert both["text"] == "in green"
    assert [load_image(image).getpixel((0, 0)) for image in several["image"]] == [(255, 0, 0), (0, 0, 255)]
    assert [part["type"] for part in places[0]["content"]] == ["text", "image_url", "text", "image_url"]


def bomb():
    """A PNG file of 70 bytes that says that it has 10^9 pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 40_000, 25_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(secret) show\n"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (7, "got a number"),
        (None, "got null"),
        ([], "got a list"),
        ({}, "neither text nor image"),
        ({"text": "a", "path": "/etc/passwd"}, "unknown keys"),
        ({"text": 5}, '"text" must be a string'),
        ("  ", "empty or only white space"),
        ("a" * 201, "201 characters; the limit is 200"),
        ("\ud800", "lone surrogate"),
        ({"image": "/etc/passwd"}, "files are not opened"),
        ({"image": "file:///etc/passwd"}, "files are not opened"),
        ({"image": {"path": "/etc/passwd"}}, "files are not opened"),
        ({"image": ["data:text/html;base64,aGk="]}, "files are not opened"),
        ({"image": "https://example.org/a.png"}, "URLs are not fetched unless you allow it"),
        ({"image": uri(b"hello")}, "this is no image"),
        ({"image": uri(EPS)}, "this is no image"),
        ({"image": uri(b"")}, "the file is empty"),
        ({"image": uri(png())[:-9] + "!"}, "not valid base64"),
        ({"image": uri(bomb())}, "the limit is 10,000 pixels"),
        ({"image": uri(png(size=(101, 100)))}, "101 x 100 pixels; the limit is 10,000 pixels"),
        ({"image": uri(bytes(20_001))}, "20,001 bytes; the limit is 20,000"),
        ({"image": uri(bytes(30_000))}, "over 20,000 bytes"),
        ({"image": [uri(png())] * 3}, "3 images; the limit is 2"),
        ({"image": [uri(png()), uri(b"hello")]}, "image 1: this is no image"),
        ({"image": uri(png()), "text": "<image> and <image>"}, "2 placeholders"),
    ],
)
def test_an_item_that_cannot_be_used_is_named(value, problem, monkeypatch):
    monkeypatch.delenv("CONJOIN_ALLOW_URLS", raising=False)
    with pytest.raises(ItemError, match=r"^item 1: ") as caught:
        read_items(["fine", value], LIMITS)
    assert caught.value.item == 1
    assert problem in caught.value.problem


def test_requests_without_items_and_with_too_many():
    for values in ("text", None, {}, []):
        with pytest.raises(ValueError, match="at least one item"):
            read_items(values, LIMITS)
    with pytest.raises(ValueError, match="5 items; the limit is 4"):
        read_items(["a"] * 5, LIMITS)


def test_images_are_upright_and_only_pixels():
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x8298] = "someone"
    Image.new("RGB", (4, 8), "blue").save(buffer, "jpeg", exif=exif)
    picture = read_picture(buffer.getvalue(), "photo.jpg", LIMITS)
    assert load_image(picture.source).size == (8, 4)


def test_pixels_of_a_request_are_bounded_before_an_image_is_decoded(monkeypatch):
    limits = replace(LIMITS, request_pixels=30_000)
    image = uri(png(size=(100, 100)))
    monkeypatch.setattr(PngImageFile, "load", lambda image: pytest.fail("an image was decoded"))
    assert read_items([{"image": [image, image]}, {"image": image}], limits).pixels == 30_000
    with pytest.raises(TooLargeError, match=r"the 4 images of the request have 40,000 pixels.*the limit is 30,000"):
        read_items([{"image": [image, image]}] * 2, limits)


def test_limits_are_positive():
    with pytest.raises(ValueError, match="the limit items must be a positive integer, got 0"):
        Limits(items=0)
