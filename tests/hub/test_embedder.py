"""Published embedders: the vectors of the publisher's code and of sentence-transformers, saved as what they were."""

import json
import math
import unicodedata

import numpy as np
import pytest
import sentence_transformers
import torch
import torch.nn.functional as F
from checks import embed, far, load, message, read
from peft import LoraConfig, get_peft_model
from PIL import Image
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, AutoModelForImageTextToText, AutoTokenizer

from conjoin.hub import export_stock, load_embedder, load_model, save_model
from conjoin.hub.embedder import presets
from conjoin.retrieval import load_encoder
from tiny_embedders import DEFAULT, INSTRUCTION, save_embedder, stock_processor
from tiny_mllms import save_mllm

pytestmark = pytest.mark.usefixtures("without_video")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
SEVERAL_IMAGES = [] if sentence_transformers.__version__.startswith("6.0.") else [[5]]
"""Batches of one item of several images, where sentence-transformers can embed them: 6.0 nests their list twice."""


@pytest.fixture
def items(pictures):
    """Text, image, both, several of both: images first, as all publishers put them."""
    texts = ["a red box", "two\nlines, and a longer text than the others"]
    both = [{"image": pictures[0], "text": texts[0]}, {"image": [*pictures[1:3]], "text": texts}]
    return [*texts, *pictures[:2], *both]


def chatml(told, images, texts, end=""):
    shown = IMAGE * len(images) + "".join(texts)
    return f"<|im_start|>system\n{told}<|im_end|>\n<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n{end}"


def closed(told):
    """An instruction as Qwen3VLEmbedder closes it."""
    return told if unicodedata.category(told[-1]).startswith("P") else f"{told}."


SIDE = 8
"""Pixels of a side of a token of the tiny models."""
LEAST, MOST = 8 * SIDE**2, 16 * SIDE**2
LIMITS = {"min_pixels": LEAST, "max_pixels": MOST}
WRITTEN = {
    "qwen3_vl_embedding": ("qwen3_vl", lambda told, *item: chatml(closed(told) if told else DEFAULT, *item)),
    "gme_qwen2_vl": (
        "qwen2_vl",
        lambda told, *item: chatml(told or "You are a helpful assistant.", *item, end="<|endoftext|>"),
    ),
    "vlm2vec": (
        "qwen2_vl",
        lambda told, images, texts: "<|image_pad|> " * len(images) + " ".join(filter(None, [told, "".join(texts)])),
    ),
}


def resized(image, least, most):
    """An image in the size that qwen-vl-utils chooses."""
    sides = [max(SIDE, round(side / SIDE) * SIDE) for side in image.size]
    pixels = image.width * image.height
    if math.prod(sides) > most:
        sides = [math.floor(side / math.sqrt(pixels / most) / SIDE) * SIDE for side in image.size]
    elif math.prod(sides) < least:
        sides = [math.ceil(side * math.sqrt(least / pixels) / SIDE) * SIDE for side in image.size]
    return image.convert("RGB").resize(sides)


class Publisher:
    """What the code that is published beside the weights does, with the library's classes: one prompt at a time."""

    def __init__(self, preset, folder):
        self.preset, self.write = preset, WRITTEN[preset][1]
        self.processor = stock_processor(folder, shortest_edge=LEAST, longest_edge=MOST)
        self.model = AutoModelForImageTextToText.from_pretrained(folder).eval()

    @torch.no_grad()
    def __call__(self, told, images, texts):
        prompt, options = self.write(told, images, texts), {}
        if self.preset == "qwen3_vl_embedding":
            images, options = [resized(image, LEAST, MOST) for image in images], {"do_resize": False}
        if self.preset == "gme_qwen2_vl":
            images = [resized(image, 4 * SIDE**2, 16384 * SIDE**2) for image in images]
        inputs = self.processor(text=[prompt], images=images or None, return_tensors="pt", **options)
        if self.preset == "qwen3_vl_embedding":
            states = self.model.model(**inputs).last_hidden_state
        else:  # the inner model gets embeddings without ids, so that its positions count tokens
            ids = inputs["input_ids"]
            embeds = self.model.get_input_embeddings()(ids)
            if images:
                features = self.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
                embeds[ids == self.model.config.image_token_id] = torch.cat(list(features.pooler_output))
            states = self.model.model(inputs_embeds=embeds, attention_mask=inputs["attention_mask"]).last_hidden_state
        return F.normalize(states[0, -1], dim=-1).numpy()


def kinds(pictures):
    """Items, each with the images and the texts of which the publisher's code writes the prompt."""
    random = np.random.default_rng(1)
    wide, large, small = (
        Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in ((9, 96), (90, 70), (11, 9))
    )
    first, second = pictures[:2]
    return {
        "text": ("a red box", [], ["a red box"]),
        "lines": (" two\nlines, ", [], [" two\nlines, "]),
        "long text": ("words " * 60, [], ["words " * 60]),
        "Chinese": ("红色的盒子。", [], ["红色的盒子。"]),
        "emoji": ("a 🟥 box", [], ["a 🟥 box"]),
        "two texts": ({"text": ["a", "b"]}, [], ["a", "b"]),
        "picture": (first, [first], []),
        "small": (small, [small], []),
        "wide": (wide, [wide], []),
        "large": (large, [large], []),
        "two pictures": ({"image": [first, second]}, [first, second], []),
        "both": ({"image": second, "text": "a red box"}, [second], ["a red box"]),
        "text first": ({"text": "a red box", "image": second}, [second], ["a red box"]),
        "several": ({"image": [first, wide], "text": ["a", "b"]}, [first, wide], ["a", "b"]),
        "message": (message(second, "a red box"), [second], ["a red box"]),
        "interleaved": (message("a", second, "b", first), [second, first], ["a", "b"]),
    }


@pytest.mark.parametrize("told", [None, INSTRUCTION, "Find it"])
@pytest.mark.parametrize("preset", presets())
def test_presets_embed_as_the_publishers_code(preset, told, pictures, tmp_path):
    save_mllm(WRITTEN[preset][0], tmp_path)
    model, processor = load_embedder(tmp_path, preset=preset, processor=LIMITS)
    publisher, items = Publisher(preset, tmp_path), kinds(pictures)
    found = embed(model, processor, [item for item, *_ in items.values()], instruction=told)
    expected = [publisher(told, images, texts) for _, images, texts in items.values()]
    differences = {name: far(row, other) for name, row, other in zip(items, found, expected, strict=True)}
    assert max(differences.values()) <= 1e-6, differences
    own = np.concatenate([embed(model, processor, [item], instruction=told) for item, *_ in items.values()])
    assert far(own, found) <= 1e-5 and far(found[0], found[1]) > 1e-3


def test_instructions_of_qwen3_vl_embedding_end_in_punctuation(tmp_path):
    save_mllm("qwen3_vl", tmp_path)
    _, processor = load_embedder(tmp_path, preset="qwen3_vl_embedding")
    every = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)).startswith("P")]
    told = [f"Find it{end}" for end in [*every, "", "$", "+", "♥", "1"]]
    ids = processor(["a"] * len(told), instruction=told)["input_ids"]
    for words, row in zip(told, ids, strict=True):
        prompt = unicodedata.normalize("NFC", f"system\n{closed(words)}<|im_end|>")  # as the tokenizer does
        assert prompt in processor.tokenizer.decode(row), words


def test_a_folder_of_qwen3_vl_embedding_embeds_as_its_preset(pictures, tmp_path):
    """As its publisher's code does; sentence-transformers leaves the instruction open."""
    save_embedder(tmp_path / "source", told=DEFAULT, prompts={"query": "Find it"})
    model, processor = load_embedder(tmp_path / "source", processor=LIMITS)
    preset = load_embedder(tmp_path / "source", preset="qwen3_vl_embedding", processor=LIMITS)
    batch, saved = (
        [item for item, *_ in kinds(pictures).values()],
        load(save_model(model, processor, tmp_path / "out")),
    )
    for told in (None, "Find it", INSTRUCTION):
        found = embed(model, processor, batch, instruction=told)
        assert np.array_equal(found, embed(*preset, batch, instruction=told))
        alone = np.concatenate([saved.encode([item], prompt=told) for item in batch])
        assert far(alone, found) <= 1e-5
    assert processor.prompts == {"query": "Find it"}
    assert processor(["a " * 5000])["input_ids"].shape[1] == 8192
    (found,) = embed(model, processor, ["a"], instruction="Find it")
    source = load(tmp_path / "source")
    assert far(source.encode(["a"], prompt="Find it.")[0], found) <= 1e-5 < far(source.encode_query(["a"])[0], found)


@pytest.mark.parametrize(("files", "most"), [(1280 * 32 * 32, 1800 * 32 * 32), (600 * 600, 600 * 600)])
def test_the_largest_picture_of_qwen3_vl_embedding(files, most, tmp_path):
    """The publisher's code takes larger pictures than the files say; whoever trained with other limits has them."""
    save_embedder(tmp_path, told=DEFAULT)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(read(path) | {"size": {"shortest_edge": 4096, "longest_edge": files}}))
    _, processor = load_embedder(tmp_path)
    assert processor.image_processor.size["longest_edge"] == most


@pytest.mark.parametrize("pooling", ["lasttoken", "mean"])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_folder_embeds_as_in_sentence_transformers(name, pooling, items, tmp_path):
    save_embedder(tmp_path, name, pooling)
    model, processor = load_embedder(tmp_path)
    encoder = load(tmp_path)
    for prompt in (None, INSTRUCTION):
        found = embed(model, processor, items, instruction=prompt)
        for chosen in ([0, 1], [2, 3], [4], *SEVERAL_IMAGES, [0]):
            expected = encoder.encode([items[number] for number in chosen], prompt=prompt)
            assert far(found[chosen], expected) <= 1e-5, (prompt, chosen)
    messages = [message("a", items[2])]
    assert far(embed(model, processor, messages), encoder.encode(messages)) <= 1e-5


def test_what_the_tokenizer_puts_around_texts(items, tmp_path):
    """The token that it ends them with is the last one, which is read."""
    save_embedder(tmp_path / "source")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "source")
    ends = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<|im_start|>", "<|endoftext|>")]
    around = TemplateProcessing(single="<|im_start|> $A <|endoftext|>", special_tokens=ends)
    tokenizer.backend_tokenizer.post_processor = around
    tokenizer.save_pretrained(tmp_path / "source")
    model, processor = load_embedder(tmp_path / "source")
    for folder in (tmp_path / "source", save_model(model, processor, tmp_path / "saved")):
        for item in (items[0], items[2], items[4]):
            assert far(load(folder).encode([item]), embed(model, processor, [item])) <= 1e-5
    (ids,) = processor(["a"])["input_ids"].tolist()
    assert [ids[0], ids[-1]] == [token for _, token in ends]


@pytest.mark.parametrize("prompts", [{}, {"query": INSTRUCTION}, {"query": "", "document": INSTRUCTION}])
@pytest.mark.parametrize("default", [None, "base"])
def test_each_role_gets_the_prompt_that_sentence_transformers_gives(prompts, default, tmp_path):
    save_embedder(tmp_path, prompts=prompts | {"base": "Describe it:"}, default=default)
    encoder, library = load_encoder(tmp_path, device="cpu"), load(tmp_path)
    for role in ("encode", "encode_query", "encode_document"):
        for how in ({}, {"prompt": ""}, {"prompt_name": "base"}):
            found, wanted = (getattr(each, role)(["a red box"], **how) for each in (encoder, library))
            assert far(found, wanted) <= 1e-5, (role, how)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("adapter", "an adapter beside its weights"),
        ("similarity", "the similarity 'dot'"),
        ({"query_length": 8}, "query_length=8"),
        ({"pooling": "cls"}, "the pooling 'cls'"),
        (
            {"modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}},
            "no structured",
        ),
    ],
)
def test_what_changes_vectors_and_is_not_read_is_left_to_sentence_transformers(change, problem, tmp_path):
    save_embedder(tmp_path, **(change if isinstance(change, dict) else {}))
    if change == "adapter":
        layers = LoraConfig(target_modules=r".*language_model.*\.(q_proj|v_proj)", r=2, init_lora_weights=False)
        get_peft_model(AutoModel.from_pretrained(tmp_path), layers).save_pretrained(tmp_path)
    elif change == "similarity":
        path = tmp_path / "config_sentence_transformers.json"
        path.write_text(json.dumps(read(path) | {"similarity_fn_name": "dot"}))
    with pytest.raises(ValueError, match=f"{problem}.*, which the MLLM retriever lacks"):
        load_embedder(tmp_path)
    found = load_encoder(tmp_path, device="cpu").encode_query(["a red box"])
    assert far(found, load(tmp_path).encode_query(["a red box"])) <= 1e-5


@pytest.mark.parametrize("pooling", ["lasttoken", "mean"])
def test_saved_it_is_what_it_was(pooling, items, tmp_path):
    """The same files, but for what the library writes by itself; only changed weights differ."""
    source, saved = tmp_path / "source", tmp_path / "saved"
    save_embedder(source, pooling=pooling, prompts={"query": INSTRUCTION})
    model, processor = load_embedder(source)
    export_stock(model, processor, saved)
    settings = (
        "modules.json",
        "sentence_bert_config.json",
        "1_Pooling/config.json",
        "config_sentence_transformers.json",
    )
    assert [read(saved / name) for name in settings] == [read(source / name) for name in settings]
    assert (saved / "chat_template.jinja").read_text() == (source / "chat_template.jinja").read_text()
    assert not list(saved.glob("*.py"))
    old, new = (AutoModel.from_pretrained(folder).state_dict() for folder in (source, saved))
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
    found = embed(model, processor, items)
    assert far(load(saved).encode(items[:2]), found[:2]) <= 1e-5
    assert np.array_equal(embed(*load_model(saved), items), found)


def test_a_pruned_embedder_is_an_embedder(items, tmp_path):
    save_embedder(tmp_path / "source")
    model, processor = load_embedder(tmp_path / "source", 2, embedding_dim=8)
    encoder = load(export_stock(model, processor, tmp_path / "saved"))
    found = embed(model, processor, items)
    assert found.shape == (6, 8) and far(encoder.encode(items[2:4]), found[2:4]) <= 1e-5
    again, reader = load_model(tmp_path / "saved")
    assert again.config.keep_layers == 2 and again.config.embedding_dim == 8
    assert np.array_equal(embed(again, reader, items), found)


def test_an_unknown_preset_is_refused(tmp_path):
    with pytest.raises(ValueError, match="gme_qwen2_vl"):
        load_embedder(tmp_path, preset="gme")


def test_gme_is_saved_with_its_code(pictures, tmp_path):
    """A stock Qwen2-VL has other positions."""
    save_mllm("qwen2_vl", tmp_path / "source")
    model, processor = load_embedder(tmp_path / "source", preset="gme_qwen2_vl", processor=LIMITS)
    save_model(model, processor, tmp_path / "saved")
    items = [item for item, *_ in kinds(pictures).values()]
    assert np.array_equal(embed(*load_model(tmp_path / "saved"), items), embed(model, processor, items))
