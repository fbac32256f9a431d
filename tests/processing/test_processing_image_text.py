import json

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer, CLIPTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from conjoin.hub.build import image_text_processor
from conjoin.processing import ImageTextProcessor

RED = Image.new("RGB", (6, 4), "red")
NAMES = ["pixel_values", "image_mask", "input_ids", "attention_mask", "special_tokens_mask", "text_mask"]


@pytest.fixture(scope="module")
def processor(tiny_checkpoints):
    return image_text_processor(tiny_checkpoints["dinov2"], tiny_checkpoints["bert"])


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# batches


def test_a_mixed_list(processor, pictures):
    batch = processor(["a box", pictures[0], {"text": "red", "image": pictures[1]}])
    assert sorted(batch) == sorted(NAMES)
    assert batch["pixel_values"].shape == (3, 3, 16, 16)
    assert batch["image_mask"].tolist() == [False, True, True]
    assert batch["text_mask"].tolist() == [True, False, True]
    assert not batch["pixel_values"][0].any()
    tokens = processor.tokenizer.convert_ids_to_tokens(batch["input_ids"][2])
    assert tokens == ["[CLS]", "r", "##e", "##d", "[SEP]", "[PAD]"]
    assert batch["attention_mask"].tolist() == [[1] * 6, [0] * 6, [1] * 5 + [0]]
    assert batch["special_tokens_mask"][2].tolist() == [1, 0, 0, 0, 1, 1]
    picture = processor.image_processor(images=[pictures[1]], return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(batch["pixel_values"][2], picture)
    assert sorted(processor(["a", "b"])) == ["attention_mask", "input_ids", "special_tokens_mask"]
    assert sorted(processor([pictures[0]])) == ["pixel_values"]


def test_messages_equal_items(processor, pictures):
    def message(*parts):
        return {"role": "user", "content": list(parts)}

    image, text = {"type": "image", "image": pictures[0]}, {"type": "text", "text": "a box"}
    items = [{"text": "a box", "image": pictures[0]}, "a box", pictures[0], "find a box"]
    conversations = [
        [message(text, image)],
        [message(text)],
        [message(image)],
        [{"role": "system", "content": "find"}, message(text)],
    ]
    expected = processor(items)
    assert same(processor(conversations), expected)
    assert same(processor.apply_chat_template(conversations, tokenize=True, return_dict=True), expected)
    assert same(processor.apply_chat_template(conversations[0]), processor(items[:1]))
    for options in ({"max_length": 4}, {"processor_kwargs": {"text_kwargs": {"max_length": 4}}}):
        assert processor.apply_chat_template(conversations, **options)["input_ids"].shape == (4, 4)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bert", "a [SEP] b[PAD] [CLS]"),
        ("xlm_roberta", "a </s> b</s><pad> <s> <mask>"),
        ("siglip", "a </s> b</s>"),
        ("siglip", "a ＜/s＞"),  # full width; some tokenizers normalise it
    ],
)
def test_words_like_special_tokens_are_words(name, words, tiny_checkpoints):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoints[name])
    batch = image_text_processor(tiny_checkpoints["dinov2"], tokenizer)([words])
    of_text = batch["input_ids"][batch["special_tokens_mask"] == 0].tolist()
    assert of_text and not (set(of_text) & set(tokenizer.all_special_ids)) - {tokenizer.unk_token_id}
    assert batch["special_tokens_mask"].sum() == tokenizer.num_special_tokens_to_add()


def test_a_tokenizer_without_a_limit_cuts_nothing(tiny_checkpoints):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoints["bert"], model_max_length=int(1e30))
    processor = image_text_processor(tiny_checkpoints["dinov2"], tokenizer)
    assert processor(["a " * 99])["input_ids"].shape == (1, 101)
    assert processor(["a b"], max_length=3)["input_ids"].shape == (1, 3)


def test_the_end_token_of_clip_in_a_text_is_a_word(tiny_checkpoints):
    pieces = [*bytes_to_unicode().values()]
    pieces += [*(f"{piece}</w>" for piece in pieces), "<|startoftext|>", "<|endoftext|>"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = CLIPTokenizer(vocab=vocab, merges=[], model_max_length=40)
    processor = image_text_processor(tiny_checkpoints["clip"], tokenizer)
    batch = processor(["a <|endoftext|> b", "a b"])
    ends = (batch["input_ids"] == tokenizer.eos_token_id) & (batch["attention_mask"] == 1)
    assert ends.sum(1).tolist() == [1, 1]
    assert batch["input_ids"][0].argmax() == len("a<|endoftext|>b") + 1  # where CLIP reads the text
    assert tokenizer.decode(batch["input_ids"][0][1:-1]) == "a <| endoftext |> b"


# options that libraries pass


def test_options_of_the_library(processor):
    items = ["a box", "red"]
    expected = processor(items)
    assert same(processor(items, padding=True, truncation="longest_first", return_tensors="pt"), expected)
    assert processor(["a" * 60], truncation=False)["input_ids"].shape == (1, 62)
    assert same(processor(["a", "b"], padding=False), processor(["a", "b"]))


# lengths


def test_a_long_text_is_cut_with_a_warning(processor, warnings):
    assert processor(["short", "x"])["input_ids"].shape == (2, 7) and not warnings()
    assert processor(["short", "word " * 20_000])["input_ids"].shape == (2, 40)
    assert "texts of more than 40 tokens are cut" in warnings() and "longer than" not in warnings()


def test_the_longest_text_is_a_setting(tiny_checkpoints):
    folders = tiny_checkpoints["dinov2"], tiny_checkpoints["bert"]
    processor = image_text_processor(*folders, max_text_length=6)
    assert processor(["a" * 30])["input_ids"].shape == (1, 6)
    assert processor(["a" * 30], max_length=10)["input_ids"].shape == (1, 10)
    assert processor(["a " * 300], max_length=99)["input_ids"].shape == (1, 40)  # the tokenizer's own limit


def test_siglip_pads_to_its_full_length(tiny_checkpoints):
    """SigLIP 2 has a tokenizer of another name and without a limit, so the model's configuration tells."""
    folder = tiny_checkpoints["siglip"]
    assert "siglip" not in type(AutoTokenizer.from_pretrained(folder)).__name__.lower()
    for limit in (None, 16):
        processor = image_text_processor(folder, folder, max_text_length=limit)
        assert processor.text_padding == "max_length" and processor.max_text_length == 16
        batch = processor(["a"])
        assert batch["input_ids"].shape == (1, 16) and batch["attention_mask"].sum() == 3
    clip = tiny_checkpoints["clip"]
    assert image_text_processor(clip, clip).text_padding == "longest"


# errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"items": []}, "expected a list of items, got an empty one"),
        ({"items": ["a", {"image": [RED] * 2}], "ids": ["p", "q"]}, "item 'q': 2 images, but this model takes one"),
        ({"items": ["a", RED, "\u200b\u200b"]}, r"item 2: text '\\u200b\\u200b' has no tokens for this tokenizer"),
        ({"items": ["a", "b c"], "padding": False}, "padding=True"),
    ],
)
def test_unusable_calls(processor, arguments, message):
    with pytest.raises(ValueError, match=message):
        processor(**arguments)


def test_unknown_options(processor):
    for option in ({"text_padding": "left"}, {"input_type": "avg"}):
        with pytest.raises(ValueError, match=r"text_padding='left'; expected|input_type='avg'; a processor takes"):
            ImageTextProcessor(processor.image_processor, processor.tokenizer, **option)


# building and saving


def test_save_and_load(tiny_checkpoints, pictures, tmp_path):
    folders = tiny_checkpoints["clip"], tiny_checkpoints["xlm_roberta"]
    processor = image_text_processor(*folders, max_text_length=9, text_padding="max_length")
    processor.save_pretrained(tmp_path)
    again = ImageTextProcessor.from_pretrained(tmp_path)
    assert (again.max_text_length, again.text_padding) == (9, "max_length")
    assert type(again.tokenizer) is type(processor.tokenizer)
    items = ["a red box, a blue box", pictures[0], {"text": "x", "image": pictures[2]}]
    assert same(again(items), processor(items))
    assert same(AutoProcessor.from_pretrained(tmp_path, trust_remote_code=True)(items), processor(items))
    saved = json.loads((tmp_path / "processor_config.json").read_text())
    assert saved["auto_map"]["AutoProcessor"] == "processing_image_text.ImageTextProcessor"
