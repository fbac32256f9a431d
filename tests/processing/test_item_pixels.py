"""Pictures are read in two steps as their image processors read them in one."""

import io
import weakref

import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessorPil, SiglipImageProcessorPil, ViTImageProcessorPil
from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from conjoin.hub.build import image_text_processor, mllm_processor
from conjoin.processing import ImageTextProcessor, item_images
from conjoin.processing.item_images import to_rgb
from conjoin.processing.item_pixels import PictureReader
from conjoin.storage import processor_digest

RED = (255, 0, 0)
SQUARE = {"height": 40, "width": 40}
EYES = {
    "clip": CLIPImageProcessorPil(size={"shortest_edge": 40}, crop_size={"height": 40, "width": 40}),
    "uncropped": CLIPImageProcessorPil(size={"shortest_edge": 40}, do_center_crop=False),
    "siglip": SiglipImageProcessorPil(size=SQUARE),
    "levels": ViTImageProcessorPil(size=SQUARE, do_rescale=False),
    "qwen": Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 900, "longest_edge": 1800}),
    "internvl": GotOcr2ImageProcessorPil(size=SQUARE, crop_to_patches=False),
    "tiles": GotOcr2ImageProcessorPil(size=SQUARE, crop_to_patches=True),
    "convnext": ConvNextImageProcessorPil(size={"shortest_edge": 40}),
    "whole": CLIPImageProcessorPil(do_resize=False, crop_size=SQUARE),
}
UNKNOWN = ("tiles", "convnext", "whole")


def encoded(image, kind="JPEG"):
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("name", EYES)
@pytest.mark.parametrize("size", [(61, 83), (90, 44)])
def test_pixels_are_those_of_the_image_processor(name, size):
    picture = Image.effect_noise(size, 90).convert("RGB").resize(size)
    wanted = EYES[name](images=[picture], return_tensors="pt")
    reader, fast = PictureReader(EYES[name]), PictureReader(EYES[name], torch_resize=True)
    assert reader.is_known == (name not in UNKNOWN)
    levels, grid = reader.read(picture)
    torch.testing.assert_close(reader.normalize(levels), wanted["pixel_values"], atol=1e-6, rtol=1e-6)
    assert (grid is None) == (name != "qwen") and (grid is None or torch.equal(grid, wanted["image_grid_thw"]))
    if not reader.is_known:
        return
    quick, _ = fast.read(picture)
    differences = (levels.int() - quick.int()).abs()
    assert levels.dtype == quick.dtype == torch.uint8
    assert differences.max() <= 2 and 0 < differences.float().mean() < 0.05
    ready = Image.fromarray(reader.resize(picture))  # what sentence-transformers gets
    left = EYES[name](images=[ready], return_tensors="pt", **reader.skipped)["pixel_values"]
    torch.testing.assert_close(reader.normalize(left), wanted["pixel_values"], atol=1e-6, rtol=1e-6)


def test_patches_of_a_size_without_limits_are_left_to_the_image_processor():
    eye = Qwen2VLImageProcessorPil(patch_size=4)
    eye.size = {"longest_edge": 900}
    assert not PictureReader(eye).is_known


def test_the_way_to_resize_is_saved_and_told_apart(tiny_checkpoints, tmp_path):
    names = tiny_checkpoints["dinov2"], tiny_checkpoints["bert"]
    slow, fast = image_text_processor(*names), image_text_processor(*names, torch_resize=True)
    assert processor_digest(slow) != processor_digest(fast)
    fast.save_pretrained(tmp_path)
    again = ImageTextProcessor.from_pretrained(tmp_path)
    assert again.torch_resize and processor_digest(again) == processor_digest(fast)


def test_settings_that_change_are_followed(tiny_checkpoints, pictures):
    processor = image_text_processor(tiny_checkpoints["dinov2"], tiny_checkpoints["bert"])
    before = processor([pictures[0]])["pixel_values"]
    processor.image_processor.image_mean = [0.25] * 3
    assert not torch.equal(processor([pictures[0]])["pixel_values"], before)


def test_what_was_read_ahead_is_an_item(tiny_checkpoints, mllm_checkpoints, pictures):
    items = [pictures[0], "some words", {"text": "a", "image": pictures[1]}]
    processors = [image_text_processor(tiny_checkpoints["dinov2"], tiny_checkpoints["bert"])]
    processors += [mllm_processor(mllm_checkpoints(name)[0]) for name in ("qwen2_vl", "llava")]
    for processor in processors:
        read = processor.reader()
        ahead = processor([read(item, "item") for item in items], device="cpu")
        plain = processor(items)
        assert set(ahead) == set(plain) and all(torch.equal(ahead[name], plain[name]) for name in plain)
        rows = plain["pixel_values"].flatten(1)
        assert not rows[1].any() and rows[0].any() and rows.dtype == torch.float32


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
    reader = PictureReader(processor)
    processor.sizes.clear()
    for source in (encoded(image), encoded(image, "PNG"), Image.open(io.BytesIO(encoded(image)))):
        reader.read(source)
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
    two_towers = image_text_processor(tiny_checkpoints["dinov2"], tiny_checkpoints["bert"])
    assert len(two_towers([{"image": path} for path in paths])["pixel_values"]) == 3
    for name in ("qwen2_vl", "llava"):
        batch = mllm_processor(mllm_checkpoints(name)[0])([{"image": paths}, paths[0]])
        assert len(batch["pixel_values"]) == 2
    assert len(alive) == 3 + 4 + 4
