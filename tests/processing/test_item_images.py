import copy
import io
import pickle
import struct
import weakref
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from conjoin.processing import ImageTextProcessor, MllmRetrieverProcessor, item_images
from conjoin.processing.item_images import (
    MAX_ASPECT_RATIO,
    MAX_IMAGE_BYTES,
    MAX_IMAGE_PIXELS,
    array_to_image,
    load_image,
    process_image,
    to_rgb,
)
from conjoin.processing.item_inputs import parse_items
from conjoin.retrieval.stock_encoder import load_stock_model

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


# files


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"item 0: image '.*gone.png': no such file"):
        parse_items([tmp_path / "gone.png"])
    with pytest.raises(FileNotFoundError, match="no such file"):
        parse_items([{"image": str(tmp_path / "gone.png")}])
    with pytest.raises(FileNotFoundError, match="no such file"):
        parse_items([tmp_path])


def test_damaged_files(tmp_path, red):
    noise = Image.effect_noise((64, 64), 80).convert("RGB")
    (tmp_path / "cut.jpg").write_bytes(encoded(noise, "JPEG")[:900])
    (tmp_path / "zero.png").write_bytes(b"")
    (tmp_path / "text.png").write_text("I am no picture")
    with pytest.raises(ValueError, match=r"item 0: image '.*cut.jpg': cannot read .* truncated or damaged"):
        parse_items([tmp_path / "cut.jpg"])
    with pytest.raises(ValueError, match=r"item 0: image '.*zero.png': the image has zero bytes"):
        parse_items([tmp_path / "zero.png"])
    with pytest.raises(ValueError, match=r"item 0: image '.*text.png': .* its format is unknown"):
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


# copies


FORMATS = ["PNG", "GIF", "WEBP", "TIFF", "JPEG", "BMP"]
COPIES = {
    "pickle": lambda image: pickle.loads(pickle.dumps(image)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "method": lambda image: image.copy(),
}


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("file_format", FORMATS)
def test_copies_of_opened_images(file_format, how, loaded):
    frames = (
        {"save_all": True, "append_images": [Image.new("RGB", (6, 4), BLUE)]} if file_format in FORMATS[:4] else {}
    )
    for options in ({}, frames):
        image = Image.open(io.BytesIO(encoded(Image.new("RGB", (6, 4), RED), file_format, **options)))
        if loaded:
            image.load()
        expected = np.asarray(load_image(image.copy()))
        np.testing.assert_array_equal(np.asarray(load_image(COPIES[how](image))), expected)
        assert np.abs(np.subtract(expected[1, 1].astype(int), RED)).max() <= 4


@pytest.mark.parametrize("file_format", FORMATS[:4])
def test_a_copy_keeps_transparency_and_orientation(file_format):
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.new("RGBA", (4, 8), (*RED, 0))
    opened = Image.open(io.BytesIO(encoded(image, file_format, **({} if file_format == "GIF" else {"exif": exif}))))
    expected = load_image(encoded(image, file_format, **({} if file_format == "GIF" else {"exif": exif})))
    copied = load_image(COPIES["pickle"](opened))
    assert expected.getpixel((0, 0)) == copied.getpixel((0, 0)) == WHITE
    assert copied.size == expected.size == ((4, 8) if file_format == "GIF" else (8, 4))


# limits


def test_a_file_is_measured_before_it_is_read(tmp_path):
    with (tmp_path / "sparse.png").open("wb") as file:
        file.truncate(60 * 2**30)
    with pytest.raises(ValueError, match=rf"sparse.png': the file has 64424509440 bytes.* {MAX_IMAGE_BYTES}$"):
        load_image(tmp_path / "sparse.png")


@pytest.mark.parametrize("size", [(80_000_000, 1), (1, 80_000_000), (MAX_ASPECT_RATIO + 1, 1)])
def test_a_line_of_pixels_is_refused_before_it_is_decoded(size):
    with pytest.raises(ValueError, match=rf"item: image of {size[0]} x {size[1]} .*aspect ratio is over 200"):
        load_image(huge_png(*size))
    load_image(Image.new("RGB", (MAX_ASPECT_RATIO, 1)))


def test_too_little_memory_is_not_called_damage(monkeypatch):
    def fail(image):
        raise MemoryError

    monkeypatch.setattr(item_images, "to_rgb", fail)
    with pytest.raises(ValueError, match=r"^item 3: there is not enough memory to decode the image$"):
        load_image(Image.new("RGB", (4, 4)), "item 3")


class Sizes:
    """An image processor that lists the sizes of what it sees."""

    def __init__(self, **settings):
        self.settings, self.sizes = settings, []

    def to_dict(self):
        return self.settings

    def __call__(self, images, return_tensors):
        self.sizes += [image.size for image in images]
        return {"pixel_values": torch.zeros(len(images), 3, 2, 2)}


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"size": {"shortest_edge": 20}}, (150, 100)),  # a quarter: 100 pixels are at least four times 20
        ({"size": {"height": 12, "width": 20}}, (150, 100)),
        ({"size": {"height": 60, "width": 60}}, (600, 400)),  # a half would have 200 pixels, not 240
        ({"size": {"shortest_edge": 20}, "do_resize": False}, (600, 400)),
        ({"size": {"height": 20, "width": 20}, "crop_to_patches": True}, (600, 400)),
        ({"size": {"shortest_edge": 400, "longest_edge": 4000}}, (600, 400)),  # of Qwen, areas
        ({}, (600, 400)),
    ],
)
def test_a_large_jpeg_is_decoded_small(settings, size):
    image = Image.effect_noise((600, 400), 50).convert("RGB")
    processor = Sizes(**settings)
    process_image(processor, encoded(image, "JPEG"))
    process_image(processor, encoded(image, "PNG"))
    process_image(processor, Image.open(io.BytesIO(encoded(image, "JPEG"))))
    assert processor.sizes == [size, (600, 400), (600, 400)]


def test_a_batch_holds_one_decoded_picture(tiny_checkpoints, mllm_checkpoints, tmp_path, monkeypatch):
    alive = []

    def watched(image):
        assert not any(picture() for picture in alive), "an earlier picture of the batch is still decoded"
        rgb = to_rgb(image)
        alive.append(weakref.ref(rgb))
        return rgb

    monkeypatch.setattr(item_images, "to_rgb", watched)
    for number in range(3):
        Image.new("RGB", (30, 20 + number), RED).save(tmp_path / f"{number}.png")
    paths = [str(tmp_path / f"{number}.png") for number in range(3)]
    two_towers = ImageTextProcessor.from_backbones(tiny_checkpoints["dinov2"], tiny_checkpoints["bert"])
    assert len(two_towers([{"image": path} for path in paths])["pixel_values"]) == 3
    for name in ("qwen2_vl", "llava"):
        batch = MllmRetrieverProcessor.from_mllm(mllm_checkpoints(name)[0])([{"image": paths}, paths[0]])
        assert len(batch["pixel_values"]) == 2
    _, stock = load_stock_model(tiny_checkpoints["clip"])
    assert len(stock(paths)["pixel_values"]) == 3
    assert len(alive) == 3 + 4 + 4 + 3


# arrays


def test_arrays_and_tensors():
    picture = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    first = np.moveaxis(picture, 2, 0)
    forms = [picture, first, picture[::-1][::-1], torch.tensor(first), torch.tensor(picture)]
    scaled = torch.tensor(first) / 255
    forms += [picture / 255, (picture / 255).astype(np.float32), scaled, scaled.double(), scaled.requires_grad_()]
    forms += [np.dstack([picture, np.full((5, 7), 255, np.uint8)])]
    for form in forms:
        (item,) = parse_items([form])
        (image,) = item.images
        np.testing.assert_array_equal(np.asarray(image), picture)
    halved = np.asarray(load_image(scaled.bfloat16()))
    assert np.abs(halved.astype(int) - picture).max() <= 1
    grey = np.arange(35, dtype=np.uint8).reshape(5, 7)
    for form in (grey, grey[..., None], grey[None], torch.tensor(grey)):
        assert np.asarray(load_image(form))[..., 1].tolist() == grey.tolist()
    assert load_image(np.zeros((5, 7, 4), np.uint8)).getpixel((0, 0)) == WHITE


def test_channels_of_a_narrow_picture():
    """Where two axes could be the channels: the last of an array, the first of a tensor."""
    values = np.arange(3 * 5 * 3, dtype=np.uint8).reshape(3, 5, 3)
    assert np.asarray(array_to_image(values)).tolist() == values.tolist()
    assert np.asarray(array_to_image(torch.tensor(values))).tolist() == np.moveaxis(values, 0, 2).tolist()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((5, 7, 2), np.uint8),
        np.zeros((5,), np.uint8),
        np.zeros((1, 5, 7, 3), np.uint8),
        np.zeros((5, 7, 3), np.int64),
        np.full((5, 7, 3), 2.0),
        np.full((5, 7, 3), -0.1),
        np.full((5, 7, 3), np.nan),
        np.array([["a"]]),
        torch.zeros(5, 7, 2),
        torch.full((3, 5, 7), 200.0),
    ],
)
def test_other_arrays_are_refused(array):
    with pytest.raises(ValueError, match=r"item 0: an array of shape \(.*\) and type .* is not an image; expected"):
        parse_items([{"image": array}])


def test_an_empty_array():
    with pytest.raises(ValueError, match=r"item 0: .*is empty"):
        parse_items([np.zeros((0, 5, 3), np.uint8)])
