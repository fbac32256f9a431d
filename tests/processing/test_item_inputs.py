import base64

import numpy as np
import pytest
import torch
from PIL import Image

from conjoin.processing import parse_items
from conjoin.processing.item_inputs import Item, SystemText
from hostile import encoded

RED = (255, 0, 0)


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


def test_images_of_messages(red, red_file):
    data = base64.b64encode(encoded(red)).decode()
    uri = f"data:image/png;base64,{data}"
    keys = {"image": red, "url": str(red_file), "path": str(red_file), "base64": data}
    content = [{"type": "image", key: value} for key, value in keys.items()]
    content += [{"type": "image_url", "image_url": {"url": uri}}, {"type": "image_url", "image_url": uri}]
    content += [{"type": "image", "image": [red, red]}, {"type": "text", "text": ["a", "b"]}]
    message, *others = parse_items([{"role": "user", "content": content}, uri, {"image": uri}])
    assert [len(item.images) for item in (message, *others)] == [8, 1, 1] and message.texts == ["a", "b"]
    assert {image.getpixel((0, 0)) for item in (message, *others) for image in item.images} == {RED}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "NoneType None is not an item; expected a string"),
        (3.5, "float 3.5 is not an item"),
        ("", "text is empty"),
        ("bad \ud800 text", "not valid Unicode: .*position 4"),
        ({"text": ""}, "text is empty"),
        ({"text": 5}, "text must be a string, got int 5"),
        ({}, "neither text nor image"),
        ({"image": None}, "neither text nor image"),
        ({"text": "a", "picture": 1}, r"unknown keys \['picture'\]"),
        (["a", Image.new("RGB", (2, 2))], "a bare list is ambiguous"),
        ({"role": "user", "content": None}, "content must be a string or a list"),
        ({"role": "user", "content": [{"type": "image"}]}, 'message part dict .*; expected type "text", or type'),
        (
            {"role": "user", "content": [{"type": "audio", "audio": "x"}]},
            'message part dict .*; expected type "text", or type',
        ),
        ({"role": "user", "content": [{"type": "image_url"}]}, "NoneType None is not an image"),
        ({"role": "user", "content": ""}, "neither text nor image"),
        ({"image": 7}, "int 7 is not an image"),
        ({"image": b""}, ": 0 bytes of an unknown format"),
        ({"image": b"hello"}, ": 5 bytes of an unknown format"),
        ({"image": "data:image/png;base64,@@"}, "not valid base64"),
        ("data:video/mp4;base64,AAAA", "cannot read the image: 3 bytes of an unknown format"),
    ],
)
def test_bad_items_are_named(value, message):
    with pytest.raises(ValueError, match=rf"^item 'q2'.*{message}"):
        parse_items(["fine", value], ids=["q1", "q2"])


def test_a_text_is_cut_to_what_a_model_may_read(red):
    """A tokenizer takes seconds for a million characters, and ends the process at a hundred million."""
    item = Item(("a" * 10**6, red, SystemText("b" * 10**6)))
    short = item.shortened(40)
    assert [len(text) for text in short.texts] == [40 * 64, 40 * 64] and isinstance(short.parts[2], SystemText)
    assert item.shortened(None) is item and short.images == [red]
    assert len(Item(("a" * 10**7,)).shortened(None).texts[0]) == 2**22


def test_what_is_none_is_not_there(red):
    parts = [{"type": "image", "image": None}, {"type": "text", "text": "a"}, {"type": "text", "text": None}]
    rows = [{"image": None, "text": "a"}, {"image": red, "text": None}, [{"role": "user", "content": parts}]]
    assert [item.modality for item in parse_items(rows)] == ["text", "image", "text"]


@pytest.mark.parametrize(
    "single", ["text", b"bytes", {"text": "a"}, np.zeros((2, 2, 3), np.uint8), np.zeros(3), torch.zeros(3, 2, 2)]
)
def test_one_item_is_no_list(single):
    with pytest.raises(TypeError, match=rf"expected a list of items, got one {type(single).__name__}; wrap it in a"):
        parse_items(single)
    assert parse_items(np.array(["a", "b"]))[1].texts == ["b"]


def test_a_bare_string_that_reads_like_a_missing_file(tmp_path):
    for name in ("gone.JPG", "gone.heic", "gone.svg", "gone.mp4"):
        with pytest.raises(FileNotFoundError, match=rf'item 0: no such file: .*{name}.*pass \{{"text": ...\}}'):
            parse_items([str(tmp_path / name)])
    texts = ["a page about logo.png", "what is .png?"]
    assert [item.texts for item in parse_items([*texts, {"text": "logo.png"}])] == [
        [texts[0]],
        [texts[1]],
        ["logo.png"],
    ]
