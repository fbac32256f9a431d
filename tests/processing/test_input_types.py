"""Items with several images under `seq`, `cat` and `avg`."""

import pytest
import torch
from PIL import Image

from conjoin.hub.build import image_text_processor, mllm_processor
from conjoin.processing import ImageTextProcessor, load_image, parse_item
from conjoin.processing.input_types import INPUT_TYPES, apply_input_type
from conjoin.processing.item_images import concatenate_images
from conjoin.processing.item_pixels import PictureReader

RED, GREEN, BLUE = (
    Image.new("RGB", size, color) for size, color in (((4, 4), "red"), ((4, 2), "lime"), ((2, 2), "blue"))
)


def chat(*parts, role="user"):
    kinds = (
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    )
    return [{"role": role, "content": list(kinds)}]


def parts_of(value):
    """Texts, and the colours of images."""
    shown = {(255, 0, 0): "R", (0, 255, 0): "G", (0, 0, 255): "B"}
    return [part if isinstance(part, str) else shown[part.getpixel((0, 0))] for part in parse_item(value).parts]


@pytest.mark.parametrize(
    "item",
    ["a text", RED, {"text": "t", "image": RED}, {"image": RED, "text": ["a", "b"]}, chat("a", RED, "b"), chat("")],
)
def test_at_most_one_image_stays_as_it_is(item):
    assert all(apply_input_type(item, input_type)[0] is item for input_type in INPUT_TYPES)


@pytest.mark.parametrize(
    ("item", "wanted"),
    [
        (chat("like", RED, "a chair", BLUE, "a sofa"), ["like R a chair", "like B a sofa"]),
        (chat("like", RED, BLUE, "in oak"), ["like R in oak", "like B in oak"]),
        (chat(RED, "a chair", GREEN, BLUE), ["R a chair", "G", "B"]),
        ({"image": [RED, BLUE], "text": "red"}, ["R red", "B red"]),
        ({"text": "red", "image": [RED, BLUE]}, ["red R", "red B"]),
        (chat("Find.", role="system") + chat(RED, "a", BLUE, "b"), ["Find. R a", "Find. B b"]),
    ],
)
def test_the_items_of_an_average(item, wanted):
    found = apply_input_type(item, "avg")
    assert [" ".join(parts_of(each)) for each in found] == wanted
    assert [isinstance(each, list) for each in found] == [isinstance(item, list)] * len(wanted)
    assert apply_input_type(item, "seq") == [item]


def test_a_picture_of_all_images_and_all_texts():
    (found,) = apply_input_type(chat("like", RED, "a chair", BLUE, "a sofa"), "cat")
    picture, text = parse_item(found).parts
    assert text == "like a chair a sofa" and picture.size == (8, 4)
    assert picture.getpixel((3, 3)) == (255, 0, 0) and picture.getpixel((4, 3)) == (0, 0, 255)
    (found,) = apply_input_type(chat("Find.", role="system") + chat(RED, BLUE), "cat")
    assert [message["role"] for message in found] == ["system", "user"]


def test_a_concatenation_has_rows_of_one_height_on_white():
    picture = concatenate_images([RED, GREEN, BLUE])  # of widths 4, 8 and 4 at the height of 4
    assert picture.size == (12, 8)
    pixels = [picture.getpixel(place) for place in ((0, 0), (4, 0), (11, 3), (3, 7), (4, 4))]
    assert pixels == [(255, 0, 0), (0, 255, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)]


def test_a_model_that_crops_sees_all_of_a_concatenation():
    from transformers import CLIPImageProcessorPil

    cropping = CLIPImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}, do_normalize=False
    )
    reader = PictureReader(cropping)
    seen = reader.normalize(reader.read(concatenate_images([RED, BLUE]))[0])[0]
    assert seen[:, 8, 0].tolist() == pytest.approx([1, 0, 0]) and seen[:, 8, 15].tolist() == pytest.approx([0, 0, 1])
    assert seen[:, 0, 0].tolist() == [1, 1, 1]  # above is white


def test_processors_concatenate(tiny_checkpoints, pictures, tmp_path):
    processor = image_text_processor(tiny_checkpoints["dinov2"], tiny_checkpoints["bert"], input_type="cat")
    one = {"image": concatenate_images([load_image(picture) for picture in pictures[:2]]), "text": "a b"}
    batch, wanted = processor([chat("a", pictures[0], "b", pictures[1]), "c"]), processor([one, "c"])
    assert set(batch) == set(wanted) and all(torch.equal(batch[name], wanted[name]) for name in wanted)
    processor.save_pretrained(tmp_path)
    assert ImageTextProcessor.from_pretrained(tmp_path).input_type == "cat"


def test_the_mllm_processor_concatenates(mllm_checkpoints):
    folder = mllm_checkpoints("qwen2_vl")[0]
    plain, processor = (mllm_processor(folder, input_type=each) for each in ("seq", "cat"))
    item = chat("Find it.", role="system") + chat("a", RED, "b", BLUE)
    wanted = plain([{"image": concatenate_images([RED, BLUE]), "text": "a b"}], instruction="Find it.")
    batch = processor([item])
    assert all(torch.equal(batch[name], wanted[name]) for name in wanted)
    assert plain([item])["input_ids"].shape != batch["input_ids"].shape


@pytest.mark.parametrize(
    ("item", "input_type", "message"),
    [
        ([RED, BLUE], "avg", "item 3: a bare list is ambiguous"),
        ({"image": [RED, [BLUE, RED]]}, "cat", "item 3: .* list .* is not an image"),
        (chat(RED, "a", BLUE, " "), "cat", "item 3: text is empty or only white space"),
        (RED, "sum", r"input_type='sum'; expected one of \('seq', 'cat', 'avg'\)"),
    ],
)
def test_items_that_have_no_such_form_are_named(item, input_type, message):
    with pytest.raises(ValueError, match=message):
        apply_input_type(item, input_type, "item 3")


def test_a_concatenation_is_bounded():
    wide, tall = Image.new("RGB", (6000, 40)), Image.new("RGB", (60, 6000))
    picture = concatenate_images([wide, tall])
    assert picture.height <= 2048 and picture.width * picture.height <= 2**24 * 1.01
    assert concatenate_images([tall, tall]).height == 2048
