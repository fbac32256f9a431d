import io
import re
import struct
import zlib

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from conjoin.processing import load_image
from conjoin.serving import ItemError, Limits
from conjoin.serving.limits import TooLargeError, check_where, read_items
from tiny_serving import LIMITS, png, uri


def test_texts_are_never_files(tmp_path, monkeypatch):
    (tmp_path / "secret.png").write_bytes(png())
    monkeypatch.chdir(tmp_path)
    assert read_items([("secret.png", [])], LIMITS) == [{"text": "secret.png"}]


def test_images_and_texts_become_items():
    red, blue = uri(png("red")), uri(png("blue"))
    both, several, places = read_items(
        [("in green", [red]), (None, [red, blue]), ("like <image> with <image>", [red, blue])], LIMITS
    )
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
    ("text", "images", "problem"),
    [
        (None, [], "neither text nor image"),
        ("  ", [], "empty or only white space"),
        ("a" * 201, [], "201 characters; the limit is 200"),
        ("\ud800", [], "not valid Unicode"),
        (None, ["/etc/passwd"], "files are not opened"),
        (None, ["file:///etc/passwd"], "files are not opened"),
        (None, ["data:text/html;base64,aGk="], "files are not opened"),
        (None, ["https://example.org/a.png"], "URLs are not fetched unless you allow it"),
        (None, [uri(b"hello")], "this is no image"),
        (None, [uri(EPS)], "this is no image"),
        (None, [uri(b"")], "this is no image"),
        (None, [uri(png())[:-9] + "!"], "not valid base64"),
        (None, [uri(bomb())], "1000000000 pixels"),
        (None, [uri(png(size=(101, 100)))], "101 x 100 pixels; the limit is 10,000 pixels"),
        (None, [uri(bytes(20_001))], "20,001 bytes; the limit is 20,000"),
        (None, [uri(png())] * 3, "3 images; the limit is 2"),
        (None, [uri(png()), uri(b"hello")], "image 1: this is no image"),
        ("<image> and <image>", [uri(png())], "2 placeholders"),
    ],
)
def test_an_item_that_cannot_be_used_is_named(text, images, problem, monkeypatch):
    monkeypatch.delenv("CONJOIN_ALLOW_URLS", raising=False)
    with pytest.raises(ItemError, match=r"^item 1: ") as caught:
        read_items([("fine", []), (text, images)], LIMITS)
    assert caught.value.item == 1
    assert problem in caught.value.problem


@pytest.mark.parametrize("count", [0, 5])
def test_requests_without_items_and_with_too_many(count):
    with pytest.raises(ValueError, match=f"{count} items; expected 1 to 4"):
        read_items([("a", [])] * count, LIMITS)


@pytest.mark.parametrize(
    "where",
    [
        "price < 50 and (kind = 'shoes (new)' or kind in ('a', 'b')) and not (day is null)",
        "lower(text) like '%it''s (a) --%' and `odd name` >= 2 and length(text) > 3",
        "cast(price as double) / (2 + 1) > 1 and day > date '2025-01-01'",
    ],
)
def test_a_condition_may_compare_and_call_what_is_cheap(where):
    assert check_where(where, Limits()) == where


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ("length(repeat('x',2000000000))>1", "calls 'repeat'"),
        ("array_length(range(0,1000000000))>1", "calls 'array_length'"),
        ("length(lpad(text,2000000000,'x'))>1", "calls 'lpad'"),
        ("levenshtein (text,id)>0", "calls 'levenshtein'"),
        ("length(\"repeat\"('x',2000000000))>1", "calls '\"repeat\"'"),
        ("length(`repeat`('x',2000000000))>1", "calls '`repeat`'"),
        ("length(repeat/**/('x',2000000000))>1", "has no place"),
        ("length(repeat--\n('x',2000000000))>1", "has no place"),
        ("text = E'\\'' || repeat('x',2000000000) || ''", "has no place"),
        ("text = $$'$$ || repeat('x',2000000000)", "has no place"),
        ("text||text||text = 'x'", "has no place"),
        ("text = 'a", "has no place"),
        ("1=1; drop table x", "has no place"),
        ("1+" * 500 + "1 = price", "has 1,009 characters"),
    ],
)
def test_a_condition_may_not_call_what_takes_gigabytes(where, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        check_where(where, Limits())


def test_images_are_upright_and_only_pixels():
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x8298] = "someone"
    Image.new("RGB", (4, 8), "blue").save(buffer, "jpeg", exif=exif)
    (item,) = read_items([(None, [uri(buffer.getvalue())])], LIMITS)
    assert load_image(item["image"]).size == (8, 4)


def test_pixels_of_a_request_are_bounded_before_an_image_is_decoded(monkeypatch):
    image = uri(png(size=(100, 100)))
    monkeypatch.setattr(PngImageFile, "load", lambda image: pytest.fail("an image was decoded"))
    assert len(read_items([(None, [image, image]), (None, [image])], LIMITS)) == 2
    with pytest.raises(TooLargeError, match=r"the 4 images of the request have 40,000 pixels.*the limit is 30,000"):
        read_items([(None, [image, image])] * 2, LIMITS)
