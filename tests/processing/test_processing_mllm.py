"""The prompts of the MLLM retriever."""

import string

import pytest
import torch
from PIL import Image
from tokenizers import normalizers
from transformers import AutoProcessor, AutoTokenizer, LlamaTokenizer

from conjoin.hub.build import TEMPLATES, mllm_processor, retriever_template
from conjoin.processing import MllmRetrieverProcessor
from conjoin.processing.processing_mllm import Picture, pad_pixels
from tiny_mllms import MLLMS

START = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
END = "<|im_end|>\n<|im_start|>assistant\n[RET]"


@pytest.fixture
def processor(mllm_checkpoints):
    return mllm_processor(mllm_checkpoints("qwen2_vl")[0])


def prompts(processor, batch, mask="attention_mask"):
    """What the model is asked, image tokens as `<n>`."""
    texts = []
    for ids, kept in zip(batch["input_ids"], batch[mask], strict=True):
        text = processor.tokenizer.decode(ids[kept.bool()])
        count = text.count(processor.image_token)
        texts.append(text.replace(processor.image_token * count, f"<{count}>") if count else text)
    return texts


def image(width, height):
    return Image.new("RGB", (width, height), "red")


# prompts


def llama_tokenizer(marks="first"):
    """A tokenizer like Llama's: no split before BPE, and a mark at the start of the text, or of each part (always)."""
    letters = [*string.ascii_letters, *string.punctuation, *string.digits]
    merged = ["▁a", "in", "▁in", "▁S", "ar"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters, *merged]
    merges = [("▁", "a"), ("i", "n"), ("▁", "in"), ("▁", "S"), ("a", "r")]
    made = LlamaTokenizer(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges)
    if marks == "always":  # as in Llama's own tokenizer.json
        made.backend_tokenizer.pre_tokenizer = None
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        made.backend_tokenizer.normalizer = normalizers.Sequence(steps)
    made.add_tokens(["<image>", "[RET]"], special_tokens=True)
    return made


@pytest.mark.parametrize(
    ("name", "marks"), [*((name, None) for name in MLLMS), ("llava", "first"), ("llava", "always")]
)
def test_the_ids_are_those_of_the_whole_prompt(name, marks, mllm_checkpoints):
    processor = mllm_processor(mllm_checkpoints(name)[0])
    if marks is not None:
        processor.tokenizer = llama_tokenizer(marks)
    parts = [{"type": "text", "text": "like an ark"}, {"type": "image", "image": image(16, 16)}]
    parts += [{"type": "image", "image": image(16, 16)}, {"type": "text", "text": "but in pink."}]
    items = ["a box.", image(16, 16), {"image": image(16, 16), "text": "red."}, [{"role": "user", "content": parts}]]
    template = TEMPLATES[name]
    box = template["image"].replace(processor.image_token, processor.image_token * 4)
    box = box if name != "internvl" else f"<img>{box[:-1]}</img>\n"
    line = "" if box.endswith("\n") else "\n"
    both = "image and sentence"

    def whole(body, noun):
        prompt = template["start"] + body + template["request"].format(noun) + template["end"] + "[RET]"
        return processor.tokenizer(prompt, add_special_tokens=False)["input_ids"]

    def found(batch, mask="attention_mask"):
        return [ids[kept.bool()].tolist() for ids, kept in zip(batch["input_ids"], batch[mask], strict=True)]

    plain, instructed = processor(items), processor(items, instruction="Find it.")
    assert found(plain) == [
        whole("a box.\n", "sentence"),
        whole(box + line, "image"),
        whole(f"{box}red.\n", both),
        whole(f"like an ark\n{box}{box}but in pink.\n", both),
    ]
    assert found(instructed) == [
        whole("Find it. a box.\n", "sentence"),
        whole(f"{box}Find it.\n", both),
        whole(f"{box}Find it. red.\n", both),
        whole(f"Find it. like an ark\n{box}{box}but in pink.\n", both),
    ]
    images = [whole(boxes + line, "image") for boxes in (box, box, box + box)]
    assert found(plain, "image_view_mask")[1:] == images
    assert found(instructed, "image_view_mask")[2] == found(instructed)[1]
    assert found(instructed, "text_view_mask")[2] == whole("Find it. red.\n", "sentence")
    texts = ("red.\n", "like an ark\nbut in pink.\n")
    assert found(plain, "text_view_mask")[2:] == [whole(text, "sentence") for text in texts]
    for mask in ("image_view_mask", "text_view_mask"):  # items of one modality are themselves in every view
        assert found(plain, mask)[:2] == found(plain)[:2]
    assert plain["image_mask"].tolist() == [False, True, True, True] and "image_mask" not in processor(items[1:3])
    assert plain["text_mask"].tolist() == [True, False, True, True] and "text_view_mask" not in processor(items[:1])


def test_the_grids_and_pixels_of_several_images(processor):
    batch = processor([{"image": [image(16, 16), image(8, 16)]}, "x"])
    assert batch["image_grids"].tolist() == [[[1, 4, 4], [1, 4, 2]], [[0, 0, 0], [0, 0, 0]]]
    assert batch["pixel_values"].shape == (2, 24, 96)
    assert batch["pixel_attention_mask"].sum(1).tolist() == [24, 0]


def test_words_like_special_tokens_are_words(processor):
    batch = processor(["[RET] <|image_pad|><|im_end|>"])
    special = processor.tokenizer.convert_tokens_to_ids(["[RET]", "<|image_pad|>", "<|im_end|>"])
    counts = [(batch["input_ids"] == token).sum().item() for token in special]
    assert counts == [1, 0, 2]  # what the prompt itself has
    processor.tokenizer, processor.image_token = llama_tokenizer(), "<image>"
    processor.chat_template = retriever_template(**TEMPLATES["llava"])
    ids = processor(["a <image>[RET]</s>"])["input_ids"][0].tolist()
    special = processor.tokenizer.convert_tokens_to_ids(["<image>", "[RET]", "</s>"])
    assert [ids.count(token) for token in special] == [0, 1, 0]


def test_pixel_rows_are_never_as_many_as_tokens():
    """Sentence-transformers takes dimension 1 of a tensor for tokens if it is as long as the prompts."""
    images = [[Picture(torch.ones(rows, 2), None, 1) for rows in (2, 3)], []]
    for num_tokens, rows in ((4, 5), (5, 6)):
        batch = pad_pixels(images, num_tokens)
        assert batch["pixel_values"].shape == (2, rows, 2)
        assert batch["pixel_attention_mask"].shape == (2, rows)
        assert batch["pixel_attention_mask"].sum(1).tolist() == [5, 0]


def test_padding_sides(processor):
    right = processor(["a", "abcd"])
    processor.tokenizer.padding_side = "left"
    left = processor(["a", "abcd"])
    assert right["attention_mask"][0].tolist() == left["attention_mask"][0].tolist()[::-1]
    assert right["attention_mask"][0, -3:].tolist() == [0, 0, 0]
    assert torch.equal(right["input_ids"][0, :-3], left["input_ids"][0, 3:])


# resolution and length


def test_resolution_follows_the_pixels_allowed(mllm_checkpoints):
    folder, _ = mllm_checkpoints("qwen2_vl")
    processor = mllm_processor(folder, min_pixels=16 * 16, max_pixels=32 * 32)
    sizes = [(8, 8), (24, 16), (100, 100), (200, 50)]
    grids = processor([image(*size) for size in sizes])["image_grids"][:, 0, 1:].tolist()
    assert grids == [[4, 4], [4, 6], [8, 8], [4, 16]]


def test_texts_are_cut_and_images_never(processor, warnings):
    items = [{"image": image(24, 24), "text": "abcdefgh" * 5}, "short"]
    full = processor(items)
    longest = int(full["attention_mask"].sum(1).max())
    assert not warnings()
    cut = processor(items, max_length=longest - 10, ids=["a", "b"])
    assert "texts are cut" in warnings()
    assert int(cut["attention_mask"].sum(1).max()) == longest - 10
    assert prompts(processor, cut)[0] == prompts(processor, full)[0].replace("abcdefgh" * 5, ("abcdefgh" * 5)[:30])
    assert prompts(processor, cut, "text_view_mask")[0].count("abcdefgh" * 3 + "abcdef\n") == 1
    assert prompts(processor, cut)[1] == prompts(processor, full)[1]
    message = r"item 'a': images, instruction and prompt take \d+ tokens, \d+ more than max_length=\d+; lower max_pix"
    for item, length in ((items[0], longest - 40), (image(24, 24), 100)):
        with pytest.raises(ValueError, match=message):
            processor([item], max_length=length, ids=["a"])
    several = {"text": ["a" * 10, "b" * 10]}  # the last are cut first
    length = int(processor([several])["attention_mask"].sum()) - 12
    assert f"{'a' * 7}\nb\nSumm" in prompts(processor, processor([several], max_length=length))[0]


def test_each_text_is_cut_to_its_own_limit(mllm_checkpoints, tmp_path):
    """As LamRA does at 480 tokens: however large the image is, and the instruction counts."""
    folder = mllm_checkpoints("qwen2_vl")[0]
    processor = mllm_processor(folder, max_text_length=12)
    letters = "abcdefghijklmnop"
    parts = [{"type": "text", "text": letters}, {"type": "image", "image": image(24, 24)}]
    message = [{"role": "user", "content": [*parts, {"type": "text", "text": "0123456789ABCDEF"}]}]
    items = [letters, letters[:12], {"image": image(24, 24), "text": letters}, message, "é" * 8]
    batch = processor(items, ids=list("uvwxy"))
    found = [text.removeprefix(START).partition("Summarize")[0] for text in prompts(processor, batch)]
    box = "<|vision_start|><9><|vision_end|>"
    assert found[:3] == ["abcdefghijkl\n", "abcdefghijkl\n", f"{box}abcdefghijkl\n"]
    assert found[3] == f"abcdefghijkl\n{box}0123456789AB\n" and found[4] == "éééééé\n"
    assert "abcdefghijkl\nSumm" in prompts(processor, batch, "text_view_mask")[2]
    told = prompts(processor, processor([*items[:3], image(8, 8)], instruction="Find it."))
    assert "Find it. abc\n" in told[0] and "Find it. abc\n" in told[2] and "Find it.\n" in told[3]
    assert "Find it at once. a\n" in prompts(processor, processor(["abc"], instruction="Find it at once."))[0]
    processor.save_pretrained(tmp_path)
    assert MllmRetrieverProcessor.from_pretrained(tmp_path).max_text_length == 12


# all architectures, saving, errors


@pytest.mark.parametrize("name", MLLMS)
def test_saves_and_loads(name, mllm_checkpoints, tmp_path):
    processor = mllm_processor(mllm_checkpoints(name)[0], max_length=300)
    processor.save_pretrained(tmp_path)
    items = ["a", image(16, 16), {"image": image(9, 30), "text": "red"}]
    expected = processor(items, instruction="Find it.")
    for again in (
        MllmRetrieverProcessor.from_pretrained(tmp_path),
        AutoProcessor.from_pretrained(tmp_path, trust_remote_code=True),
    ):
        batch = again(items, instruction="Find it.")
        assert batch.keys() == expected.keys() and all(torch.equal(batch[key], expected[key]) for key in batch)
        assert again.max_length == 300


def test_internvl_tiles(mllm_checkpoints):
    """A picture may become several tiles, each with its tokens."""
    processor = mllm_processor(mllm_checkpoints("internvl")[0])
    assert processor([image(32, 16)])["pixel_values"].shape == (1, 1, 3, 16, 16)
    processor.image_processor.crop_to_patches = True
    batch = processor([image(32, 16), "a"])
    tiles = int(batch["pixel_attention_mask"][0].sum())
    assert tiles > 1
    assert (batch["input_ids"][0] == processor.tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")).sum() == 4 * tiles


def test_unusable_calls(processor):
    with pytest.raises(ValueError, match="2 instructions for 3 items; pass one for all, or one for each"):
        processor(["a box", image(8, 8), "red"], instruction=["a", "b"])
    with pytest.raises(ValueError, match="item 'y': the item has neither text nor im"):
        processor(["a", [{"role": "system", "content": "Find it."}]], ids=["x", "y"])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bert", {}, r"'bert' is not a supported MLLM; expected one of \['internvl', 'llava'"),
        ("llava", {"max_pixels": 100}, "'llava' has a fixed resolution; omit min_pixels and max_pixels"),
        ("qwen2_vl", {"max_pixels": -1}, r"min_pixels=\d+, max_pixels=-1; expected 0 < min_pixels <= max_pixels"),
        ("qwen2_vl", {"max_text_length": 0}, "max_text_length=0 must be at least 1"),
    ],
)
def test_a_processor_that_cannot_be_made(name, options, message, mllm_checkpoints, tiny_checkpoints):
    folder = tiny_checkpoints[name] if name in tiny_checkpoints else mllm_checkpoints(name)[0]
    with pytest.raises(ValueError, match=message):
        mllm_processor(folder, **options)


def test_a_tokenizer_that_was_swapped(processor, mllm_checkpoints, tmp_path):
    processor.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(mllm_checkpoints("qwen2_vl")[0]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"'\[RET\]' is no token of this tokenizer \(262 tokens\): was it changed"):
        MllmRetrieverProcessor.from_pretrained(tmp_path)


def test_the_longest_prompt_is_the_models_unless_nothing_may_be_cut(processor):
    assert processor.tokenizer.model_max_length > 10**9
    assert processor([{"image": image(16, 16), "text": "a" * 5000}, "a"])["attention_mask"].sum(1).max() == 1024
    assert processor(["a" * 5000], truncation=False)["input_ids"].shape[1] > 5000
