import base64
import http.server
import io
import struct
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conjoin.processing.item_inputs import MAX_IMAGE_PIXELS, Item, load_image, parse_items, to_rgb

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def encoded(image, file_format="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def huge_png(width, height):
    """A PNG of a few bytes that claims a size."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.fixture
def red():
    return Image.new("RGB", (6, 4), RED)


@pytest.fixture
def red_file(red, tmp_path):
    path = tmp_path / "red.png"
    red.save(path)
    return path


# what counts as an item


def test_every_form_of_an_item(red, red_file):
    items = parse_items(
        [
            "a red box",
            red,
            red_file,
            str(red_file),
            {"text": "a", "image": red},
            {"image": [red, red], "text": "b"},
            {"text": "only", "image": None},
            {"bytes": encoded(red), "path": None},
            {"role": "user", "content": "hello"},
            [
                {"role": "system", "content": "find"},
                {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image", "image": red}, "y"]},
            ],
        ]
    )
    assert [item.modality for item in items] == (
        ["text", "image", "image", "image", "image,text", "image,text", "text", "image", "text", "image,text"]
    )
    assert items[4].parts[0] == "a" and items[5].parts[2] == "b"  # the order of the keys is kept
    assert items[9].texts == ["find", "x", "y"] and isinstance(items[9].parts[2], Image.Image)
    assert all(image.mode == "RGB" and image.getpixel((0, 0)) == RED for item in items for image in item.images)
    assert items[0] == Item(("a red box",))


@pytest.mark.parametrize("key", ["image", "url", "path", "base64"])
def test_message_images(key, red, red_file):
    value = {
        "image": red,
        "url": str(red_file),
        "path": str(red_file),
        "base64": base64.b64encode(encoded(red)).decode(),
    }
    (item,) = parse_items([{"role": "user", "content": [{"type": "image", key: value[key]}]}])
    assert item.images[0].getpixel((0, 0)) == RED


def test_message_image_url_and_data_uri(red):
    uri = "data:image/png;base64," + base64.b64encode(encoded(red)).decode()
    content = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "image_url", "image_url": uri}]
    items = parse_items([{"role": "user", "content": content}, uri, {"image": uri}])
    assert [len(item.images) for item in items] == [2, 1, 1]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "NoneType None is not an item; expected a string"),
        (3.5, "float 3.5 is not an item"),
        ("", "text is empty"),
        (" \t\n", "only white space"),
        ("bad \ud800 text", "lone surrogate '\\\\ud800' at position 4"),
        ({"text": ""}, "text is empty"),
        ({"text": 5}, "text must be a string, got int 5"),
        ({}, "neither text nor image"),
        ({"text": None, "image": None}, "neither text nor image"),
        ({"text": "a", "picture": 1}, r"unknown keys \['picture'\]"),
        (["a", "b"], "a bare list is ambiguous"),
        ([], "a bare list is ambiguous"),
        ({"role": "user", "content": None}, "content must be a string or a list"),
        ({"role": "user", "content": [{"type": "image"}]}, 'no "image", "url", "path" or "base64"'),
        ({"role": "user", "content": [{"type": "audio", "audio": "x"}]}, "unknown message part"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "NoneType None is not an image"),
        ({"role": "user", "content": ""}, "neither text nor image"),
        ({"image": 7}, "int 7 is not an image"),
        ({"image": b""}, "the image has zero bytes"),
        ({"image": b"hello"}, "its format is unknown"),
        ({"image": "data:image/png;base64,@@"}, "not valid base64"),
    ],
)
def test_bad_items_are_named(value, message):
    with pytest.raises(ValueError, match=rf"^item 1 \(id 'q2'\).*{message}"):
        parse_items(["fine", value], ids=["q1", "q2"])


def test_what_is_none_is_not_there(red):
    parts = [{"type": "image", "image": None}, {"type": "text", "text": "a"}, {"type": "text", "text": None}]
    rows = [{"image": None, "text": "a"}, {"image": red, "text": None}, [{"role": "user", "content": parts}]]
    assert [item.modality for item in parse_items(rows)] == ["text", "image", "text"]
    for nothing in ({"image": None}, [{"role": "user", "content": parts[::2]}]):
        with pytest.raises(ValueError, match=r"item 0: .* has neither text nor image"):
            parse_items([nothing], empty_text="embed")


def test_empty_texts_on_request(red):
    chat = [{"role": "user", "content": [{"type": "image", "image": None}, {"type": "text", "text": ""}]}]
    rows = ["", " ", {"text": "", "image": None}, {"text": ["", "a"]}, {"text": "", "image": red}, chat]
    found = parse_items(rows, empty_text="embed")
    assert [item.modality for item in found] == ["text", "text", "text", "text", "image", "text"]
    assert [item.texts for item in found] == [[""], [""], [""], ["a"], [], [""]]
    for row in rows:
        with pytest.raises(ValueError, match=r"item 0: .*(text is empty|neither text nor image)"):
            parse_items([row])


def test_a_pair_of_text_and_image_is_refused(red):
    with pytest.raises(ValueError, match="item 0: a bare list is ambiguous"):
        parse_items([["a", red]])


@pytest.mark.parametrize("single", ["text", b"bytes", {"text": "a"}])
def test_one_item_is_no_list(single):
    with pytest.raises(TypeError, match="expected a list of items"):
        parse_items(single)


# files


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"item 0, image '.*gone.png': no such file"):
        parse_items([tmp_path / "gone.png"])
    with pytest.raises(FileNotFoundError, match="no such file"):
        parse_items([{"image": str(tmp_path / "gone.png")}])
    with pytest.raises(FileNotFoundError, match="no such file"):
        parse_items([tmp_path])


def test_a_bare_string_that_reads_like_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r'item 0: no such file: .*gone.JPG.*pass \{"text": ...\}'):
        parse_items([str(tmp_path / "gone.JPG")])
    texts = ["a page about logo.png", "what is .png?"]
    assert [item.texts for item in parse_items([*texts, {"text": "logo.png"}])] == [
        [texts[0]],
        [texts[1]],
        ["logo.png"],
    ]


def test_damaged_files(tmp_path, red):
    noise = Image.effect_noise((64, 64), 80).convert("RGB")
    (tmp_path / "cut.jpg").write_bytes(encoded(noise, "JPEG")[:900])
    (tmp_path / "zero.png").write_bytes(b"")
    (tmp_path / "text.png").write_text("I am no picture")
    with pytest.raises(ValueError, match=r"item 0, image '.*cut.jpg': cannot read .* truncated or damaged"):
        parse_items([tmp_path / "cut.jpg"])
    with pytest.raises(ValueError, match=r"item 0, image '.*zero.png': the image has zero bytes"):
        parse_items([tmp_path / "zero.png"])
    with pytest.raises(ValueError, match=r"item 0, image '.*text.png': .* its format is unknown"):
        parse_items([tmp_path / "text.png"])
    with pytest.raises(ValueError, match=r"image 'here/x.jpg': cannot read the image, it is truncated"):
        load_image({"bytes": encoded(noise, "JPEG")[:900], "path": "here/x.jpg"})


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM"])
@pytest.mark.filterwarnings("ignore")
def test_no_damage_escapes_without_a_name(file_format):
    random = np.random.default_rng(0)
    whole = np.frombuffer(encoded(Image.effect_noise((24, 24), 80).convert("RGB"), file_format), np.uint8)
    errors = 0
    for _ in range(60):
        damaged = whole[: random.integers(1, len(whole))].copy()
        damaged[random.integers(0, min(len(damaged), 40), size=2)] = random.integers(0, 256, size=2)
        try:
            assert load_image(damaged.tobytes(), "item 3").mode == "RGB"
        except ValueError as error:
            assert str(error).startswith("item 3: ")
            errors += 1
    assert errors


@pytest.mark.parametrize("side", [10_000, 60_000])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_bomb_is_refused_before_it_is_decoded(side):
    with pytest.raises(ValueError, match=rf"item 0: image .*over the limit of {MAX_IMAGE_PIXELS} pixels"):
        parse_items([{"image": huge_png(side, side)}])


def test_empty_pil_image():
    with pytest.raises(ValueError, match="image of 0 x 5 pixels is empty"):
        parse_items([Image.new("RGB", (0, 5))])


# pixels


def test_rgb_is_passed_through(red):
    assert to_rgb(red) is red


def test_exif_orientation():
    image = Image.new("RGB", (8, 4), RED)
    image.paste(BLUE, (0, 0, 4, 4))  # blue left, red right
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    turned = load_image(encoded(image, exif=exif))
    assert turned.size == (4, 8)
    assert turned.getpixel((1, 1)) == BLUE and turned.getpixel((1, 6)) == RED


@pytest.mark.parametrize("modes", [["RGBA"], ["RGBa"], ["LA"], ["LA", "La"]])
def test_alpha_goes_on_white(modes):
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 0, 255))
    for mode in modes:
        image = image.convert(mode)
    rgb = to_rgb(image)
    assert rgb.mode == "RGB"
    assert rgb.getpixel((0, 0)) == WHITE and rgb.getpixel((1, 0)) == (0, 0, 0)


def test_palette_with_alpha_channel_goes_on_white():
    assert to_rgb(Image.new("PA", (1, 1), (0, 0))).getpixel((0, 0)) == WHITE


def test_half_transparency_blends_with_white():
    assert to_rgb(Image.new("RGBA", (1, 1), (255, 0, 0, 128))).getpixel((0, 0)) == (255, 127, 127)


@pytest.mark.parametrize("file_format", ["PNG", "GIF"])
def test_palette_transparency(file_format):
    image = Image.new("P", (2, 1), 0)
    image.putpalette([0, 0, 0, 255, 0, 0])
    image.putpixel((1, 0), 1)
    rgb = load_image(encoded(image, file_format, transparency=0))
    assert rgb.getpixel((0, 0)) == WHITE and rgb.getpixel((1, 0)) == RED


def test_transparent_colour_key():
    image = Image.new("RGB", (2, 1), BLUE)
    image.putpixel((1, 0), RED)
    rgb = load_image(encoded(image, transparency=BLUE))
    assert rgb.getpixel((0, 0)) == WHITE and rgb.getpixel((1, 0)) == RED


@pytest.mark.parametrize(("mode", "expected"), [("CMYK", RED), ("L", (76, 76, 76)), ("1", WHITE), ("HSV", RED)])
def test_other_modes(mode, expected):
    image = Image.new("RGB", (2, 2), WHITE if mode == "1" else RED).convert(mode)
    assert np.abs(np.subtract(to_rgb(image).getpixel((0, 0)), expected)).max() <= 2


def test_cmyk_jpeg():
    rgb = load_image(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))
    assert np.abs(np.subtract(rgb.getpixel((4, 4)), RED)).max() <= 4


@pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
def test_16_bit_greyscale_is_scaled(file_format):
    image = Image.fromarray(np.array([[0, 128 * 257, 65535]], dtype=np.uint16))
    rgb = load_image(encoded(image, file_format))
    assert np.asarray(rgb)[0, :, 0].tolist() == [0, 128, 255]


def test_dark_16_bit_greyscale_stays_dark():
    assert np.asarray(to_rgb(Image.fromarray(np.full((1, 1), 200, dtype=np.uint16)))).max() == 1


def test_16_bit_transparency():
    image = Image.fromarray(np.array([[1000, 65535, 0]], dtype=np.uint16))
    rgb = load_image(encoded(image, transparency=1000))
    assert np.asarray(rgb)[0, :, 0].tolist() == [255, 255, 0]


@pytest.mark.parametrize(
    ("values", "expected"), [([0.0, 0.5, 1.0], [0, 128, 255]), ([0.0, 51.0, 255.0], [0, 51, 255])]
)
def test_float_greyscale(values, expected):
    assert np.asarray(to_rgb(Image.fromarray(np.array([values], dtype=np.float32))))[0, :, 0].tolist() == expected


def test_not_finite_pixels():
    with pytest.raises(ValueError, match=r"item 0: .*pixel values are not finite"):
        parse_items([Image.fromarray(np.array([[np.nan, 1.0]], dtype=np.float32))])


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "TIFF"])
def test_first_frame_of_an_animation(file_format, red, tmp_path):
    path = tmp_path / "moving"
    red.save(path, file_format, save_all=True, append_images=[Image.new("RGB", (6, 4), BLUE)])
    assert np.abs(np.subtract(load_image(path).getpixel((1, 1)), RED)).max() <= 4
    opened = Image.open(path)
    opened.seek(1)
    assert np.abs(np.subtract(load_image(opened).getpixel((1, 1)), RED)).max() <= 4


# URLs


@pytest.fixture
def server(tmp_path):
    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_image_from_a_url_goes_on_white(server, tmp_path):
    Image.new("RGBA", (2, 2), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    (item,) = parse_items([f"{server}/clear.png"])
    assert item.images[0].getpixel((0, 0)) == WHITE


def test_url_errors_name_the_url(server):
    with pytest.raises(ValueError, match=rf"item 0, image '{server}/gone.png': cannot fetch the image .*404"):
        parse_items([f"{server}/gone.png"])


def test_the_file_stands_alone():
    """It travels with every checkpoint: nothing of this package may be imported."""
    source = Path(load_image.__code__.co_filename).read_text()
    assert "import conjoin" not in source and "from conjoin" not in source and "from ." not in source
