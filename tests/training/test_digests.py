"""A cache is known again by what it was made from, wherever that lies."""

import shutil

import pytest

from conjoin.processing import ImageTextProcessor, MllmRetrieverProcessor
from conjoin.training.digests import processor_digest


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_a_processor_is_known_by_what_it_does(name, tiny_checkpoints, tmp_path):
    folder = tiny_checkpoints[name]
    shutil.copytree(folder, tmp_path / "elsewhere")
    processor = ImageTextProcessor.from_backbones(folder, folder)
    digest = processor_digest(processor)
    processor(["a", "longer than that"])  # leaves its padding in the tokenizer
    assert processor_digest(processor) == digest
    processor.save_pretrained(tmp_path / "saved")
    elsewhere = str(tmp_path / "elsewhere")
    for same in (
        ImageTextProcessor.from_backbones(elsewhere, elsewhere),
        ImageTextProcessor.from_pretrained(tmp_path / "saved"),
    ):
        assert processor_digest(same) == digest
    assert processor_digest(ImageTextProcessor.from_backbones(folder, folder, max_text_length=5)) != digest
    processor.image_processor.image_mean = [0.1, 0.2, 0.3]
    assert processor_digest(processor) != digest


def test_the_vocabulary_counts(tiny_checkpoints):
    clip, siglip = tiny_checkpoints["clip"], tiny_checkpoints["siglip"]
    digests = {processor_digest(ImageTextProcessor.from_backbones(clip, text)) for text in (clip, siglip)}
    assert len(digests) == 2


def test_an_mllm_processor(mllm_checkpoints):
    folder, _ = mllm_checkpoints("qwen2_vl")
    digests = [processor_digest(MllmRetrieverProcessor.from_mllm(folder, max_length=n)) for n in (64, 64, 32)]
    assert digests[0] == digests[1] != digests[2]
