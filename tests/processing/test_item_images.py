"""Images are read from files, bytes and arrays; from URLs only if the user allows it; always within limits."""

import pickle
import struct

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from conjoin.processing import load_image, parse_items
from conjoin.processing.item_images import MAX_ASPECT_RATIO, MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS
from hostile import encoded, png

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


# what cannot be used
CUT = encoded(Image.effect_noise((64, 64), 80).convert("RGB"), "JPEG")[:900]


def test_missing_file(tmp_path):
    for item in (tmp_path / "gone.png", {"image": str(tmp_path / "gone.png")}, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"item 0: image '.*': no such file"):
            parse_items([item])


@pytest.mark.parametrize(
    ("content", "message"),
    [(CUT, "truncated"), (b"", ": 0 bytes of an unknown format"), (b"<svg/>", r"unknown format \(b'<svg/>'\)")],
)
def test_damaged_files(content, message, tmp_path):
    (tmp_path / "x.jpg").write_bytes(content)
    for source in (tmp_path / "x.jpg", {"bytes": content, "path": "here/x.jpg"}):
        with pytest.raises(ValueError, match=rf"^item 0: image '.*x.jpg': .*{message}"):
            parse_items([source])


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (Image.new("RGB", (0, 5)), "0 x 5 pixels; expected 1 to"),
        (np.zeros((0, 5, 3), np.uint8), "5 x 0 pixels; expected 1 to"),
        (Image.fromarray(np.array([[np.nan, 1.0]], dtype=np.float32)), "pixel values are not finite"),
        (png(10_000, 10_000), f"10000 x 10000 pixels; expected 1 to {MAX_IMAGE_PIXELS} pixels"),
        (png(60_000, 60_000), "exceeds limit"),  # an error of Pillow
        (png(1, 80_000_000), "1 x 80000000 pixels; .*an aspect ratio up to 200"),
        (png(MAX_ASPECT_RATIO + 1, 1), "201 x 1 pixels; .*an aspect ratio up to 200"),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_other_sizes_are_refused_before_they_are_decoded(image, message):
    with pytest.raises(ValueError, match=rf"^item 0: .*{message}"):
        parse_items([{"image": image}])
    load_image(Image.new("RGB", (MAX_ASPECT_RATIO, 1)))


# pixels
def test_exif_orientation():
    image = Image.new("RGB", (8, 4), RED)
    image.paste(BLUE, (0, 0, 4, 4))  # blue left, red right
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    turned = load_image(encoded(image, exif=exif))
    assert turned.size == (4, 8)
    assert turned.getpixel((1, 1)) == BLUE and turned.getpixel((1, 6)) == RED


def row_of(mode, *pixels, palette=None):
    """An image of one row."""
    image = Image.new(mode, (len(pixels), 1))
    if palette:
        image.putpalette(palette)
    for place, pixel in enumerate(pixels):
        image.putpixel((place, 0), pixel)
    return image


CLEAR, BLACK, GREY = (0, 0, 0, 0), (0, 0, 0), (76, 76, 76)
HALF_CLEAR = row_of("RGBA", CLEAR, (*BLACK, 255))
PALETTE = row_of("P", 0, 1, palette=[*BLACK, *RED])
LEVELS = Image.fromarray(np.array([[0, 128 * 257, 65535]], np.uint16))
PSD = b"8BPS" + struct.pack(">H6xHIIHH", 1, 3, 1, 2, 8, 3) + bytes(14) + bytes([255, 0, 0, 0, 0, 255])
"""A file of Photoshop without layers: a red and a blue pixel."""
CLEAR_LEVEL = Image.fromarray(np.array([[1000, 65535, 0]], np.uint16))


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        *((HALF_CLEAR.convert(mode), [WHITE, BLACK]) for mode in ("RGBA", "RGBa", "LA")),
        (HALF_CLEAR.convert("LA").convert("La"), [WHITE, BLACK]),
        (Image.new("PA", (1, 1), (0, 0)), [WHITE]),
        (PSD, [RED, BLUE]),
        (row_of("RGBA", (255, 0, 0, 128)), [(255, 127, 127)]),
        *((encoded(PALETTE, name, transparency=0), [WHITE, RED]) for name in ("PNG", "GIF")),
        (encoded(row_of("RGB", BLUE, RED), transparency=BLUE), [WHITE, RED]),
        *((row_of("RGB", RED).convert(mode), [colour]) for mode, colour in (("CMYK", RED), ("L", GREY), ("HSV", RED))),
        (row_of("RGB", WHITE).convert("1"), [WHITE]),
        (encoded(Image.new("CMYK", (1, 1), (0, 255, 255, 0)), "JPEG"), [RED]),
        *((encoded(LEVELS, name), [(level,) * 3 for level in (0, 128, 255)]) for name in ("PNG", "TIFF")),
        (Image.fromarray(np.full((1, 1), 200, np.uint16)), [(1,) * 3]),  # what is dark stays dark
        (encoded(CLEAR_LEVEL, transparency=1000), [WHITE, WHITE, BLACK]),
        (Image.fromarray(np.array([[0.0, 0.5, 1.0]], np.float32)), [BLACK, (128,) * 3, WHITE]),
        (Image.fromarray(np.array([[0.0, 51.0, 255.0]], np.float32)), [BLACK, (51,) * 3, WHITE]),
    ],
)
def test_every_mode_as_a_viewer_shows_it_on_white(image, expected):
    rgb = load_image(image)
    assert rgb.mode == "RGB" and [rgb.getpixel((place, 0)) for place in range(rgb.width)] == expected


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animation_is_its_first_frame_that_is_not_empty(file_format, tmp_path):
    options = {"WEBP": {"lossless": True}, "TIFF": {}}.get(file_format, {"disposal": 2})
    empty, red, blue = (Image.new("RGBA", (8, 8), colour) for colour in (CLEAR, (*RED, 255), (*BLUE, 255)))
    for frames in ([empty, red, blue], [red, blue]):
        frames[0].save(tmp_path / "moving", file_format, save_all=True, append_images=frames[1:], **options)
        opened = Image.open(tmp_path / "moving")
        opened.seek(len(frames) - 1)
        for image in (tmp_path / "moving", opened):
            assert load_image(image).getpixel((3, 3)) == RED
    assert load_image(pickle.loads(pickle.dumps(Image.open(tmp_path / "moving")))).getpixel((3, 3)) == RED


# limits
def test_a_file_is_measured_before_it_is_read(tmp_path):
    with (tmp_path / "sparse.png").open("wb") as file:
        file.truncate(60 * 2**30)
    with pytest.raises(ValueError, match=rf"sparse.png': the file has 64424509440 bytes.* {MAX_IMAGE_BYTES}$"):
        load_image(tmp_path / "sparse.png")


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
    narrow = picture[:3]  # where two axes could be the channels: the last of an array, the first of a tensor
    assert np.asarray(load_image(narrow)).tolist() == narrow.tolist()
    assert np.asarray(load_image(torch.tensor(narrow))).tolist() == np.moveaxis(narrow, 0, 2).tolist()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((5, 7, 2), np.uint8),
        np.zeros((5,), np.uint8),
        np.zeros((1, 5, 7, 3), np.uint8),
        np.zeros((5, 7, 3), np.int64),
        np.full((5, 7, 3), -0.1),
        np.full((5, 7, 3), np.nan),
        np.array([["a"]]),
        torch.full((3, 5, 7), 200.0),
    ],
)
def test_other_arrays_are_refused(array):
    with pytest.raises(
        ValueError,
        match=r"item 0: cannot read the image: an array of shape \(.*\) and type .* is not an image; expected",
    ):
        parse_items([{"image": array}])


def swapped_profile():
    """sRGB with the red and the blue primary swapped, under another name."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for old, new in ((b"rXYZ", b"tmpX"), (b"bXYZ", b"rXYZ"), (b"tmpX", b"bXYZ")):
        profile = profile.replace(old, new, 1)
    return profile.replace("sRGB".encode("utf-16-be"), "BGRs".encode("utf-16-be"))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_a_colour_profile_is_converted_to_srgb(mode):
    image = Image.new("RGB", (4, 4), "red").convert(mode)
    for profile, expected in ((swapped_profile(), (0, 0, 255)), (b"damaged", (255, 0, 0)), (None, (255, 0, 0))):
        assert (
            np.abs(np.subtract(load_image(encoded(image, icc_profile=profile)).getpixel((0, 0)), expected)).max() <= 3
        )


def test_white_on_transparency_stays_visible():
    logo = Image.new("RGBA", (4, 4), (255, 255, 255, 0))
    assert load_image(logo).getextrema() == ((255, 255),) * 3  # there is nothing to see
    logo.putpixel((1, 1), (255, 255, 255, 255))
    assert load_image(logo).getpixel((0, 0)) == BLACK and load_image(logo).getpixel((1, 1)) == WHITE
    logo.putpixel((2, 2), (255, 0, 0, 255))
    assert load_image(logo).getpixel((0, 0)) == WHITE
