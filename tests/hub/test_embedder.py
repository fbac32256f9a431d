"""Published embedders: the vectors of the publisher's code and of sentence-transformers, saved as what they were."""

import json
import math
import unicodedata

import numpy as np
import pytest
import sentence_transformers
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from PIL import Image
from sentence_transformers import SentenceTransformer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, AutoModelForImageTextToText, AutoTokenizer

from conjoin.hub import export_stock, load_embedder, load_model, save_model
from conjoin.hub.embedder import PRESETS
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


@torch.no_grad()
def embed(model, processor, batch, **options):
    return model(**processor(batch, **options)).embeddings.numpy()


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

    def chat(*content):
        kinds = ["text" if isinstance(part, str) else "image" for part in content]
        return [{"role": "user", "content": [{"type": k, k: part} for k, part in zip(kinds, content, strict=True)]}]

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
        "message": (chat(second, "a red box"), [second], ["a red box"]),
        "interleaved": (chat("a", second, "b", first), [second, first], ["a", "b"]),
    }


@pytest.mark.parametrize("told", [None, INSTRUCTION, "Find it"])
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_embed_as_the_publishers_code(preset, told, pictures, tmp_path):
    save_mllm(WRITTEN[preset][0], tmp_path)
    model, processor = load_embedder(tmp_path, preset=preset, processor=LIMITS)
    publisher, items = Publisher(preset, tmp_path), kinds(pictures)
    found = embed(model, processor, [item for item, *_ in items.values()], instruction=told)
    expected = [publisher(told, images, texts) for _, images, texts in items.values()]
    differences = {name: np.abs(row - other).max() for name, row, other in zip(items, found, expected, strict=True)}
    assert max(differences.values()) <= 1e-6, differences
    own = np.concatenate([embed(model, processor, [item], instruction=told) for item, *_ in items.values()])
    assert np.abs(own - found).max() <= 1e-5 and np.abs(found[0] - found[1]).max() > 1e-3


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
    items = kinds(pictures)
    preset = load_embedder(tmp_path / "source", preset="qwen3_vl_embedding", processor=LIMITS)
    for told in (None, "Find it", INSTRUCTION):
        batch = [item for item, *_ in items.values()]
        assert np.array_equal(
            embed(model, processor, batch, instruction=told), embed(*preset, batch, instruction=told)
        )
    assert processor.prompts == {"query": "Find it"}
    assert processor(["a " * 5000])["input_ids"].shape[1] == 8192
    encoder = SentenceTransformer(str(tmp_path / "source"), device="cpu")
    encoder[0].processor.image_processor.size = {"shortest_edge": LEAST, "longest_edge": MOST}
    saved = SentenceTransformer(str(export_stock(model, processor, tmp_path / "saved")), device="cpu")
    for name in ("text", "long text", "picture", "both", "message", "text first", "interleaved"):
        item, (found,) = items[name][0], embed(model, processor, [items[name][0]])
        assert np.abs(saved.encode([item])[0] - found).max() <= 1e-5, name
        is_ordered = name not in ("text first", "interleaved")  # images before texts
        assert (np.abs(encoder.encode([item])[0] - found).max() <= 1e-5) == is_ordered, name
    (found,) = embed(model, processor, ["a"], instruction="Find it")
    assert np.abs(saved.encode_query(["a"])[0] - found).max() <= 1e-5
    assert np.abs(encoder.encode(["a"], prompt="Find it.")[0] - found).max() <= 1e-5
    assert np.abs(encoder.encode_query(["a"])[0] - found).max() > 1e-4


@pytest.mark.parametrize(("files", "most"), [(1280 * 32 * 32, 1800 * 32 * 32), (600 * 600, 600 * 600)])
def test_the_largest_picture_of_qwen3_vl_embedding(files, most, tmp_path):
    """The publisher's code takes larger pictures than the files say; whoever trained with other limits has them."""
    save_embedder(tmp_path, told=DEFAULT)
    pixels = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps(pixels | {"size": {"shortest_edge": 4096, "longest_edge": files}})
    )
    _, processor = load_embedder(tmp_path)
    assert processor.image_processor.size["longest_edge"] == most


@pytest.mark.parametrize("pooling", ["lasttoken", "mean"])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_folder_embeds_as_in_sentence_transformers(name, pooling, items, tmp_path):
    save_embedder(tmp_path, name, pooling)
    model, processor = load_embedder(tmp_path)
    encoder = SentenceTransformer(str(tmp_path), device="cpu")
    for prompt in (None, INSTRUCTION):
        found = embed(model, processor, items, instruction=prompt)
        for chosen in ([0, 1], [2, 3], [4], *SEVERAL_IMAGES, [0]):
            expected = encoder.encode([items[number] for number in chosen], prompt=prompt)
            assert np.abs(found[chosen] - expected).max() <= 1e-5, (prompt, chosen)
    messages = [[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "image": items[2]}]}]]
    assert np.abs(embed(model, processor, messages) - encoder.encode(messages)).max() <= 1e-5


def test_what_the_tokenizer_puts_around_texts(items, tmp_path):
    """The token that it ends them with is the last one, which is read."""
    save_embedder(tmp_path / "source")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "source")
    ends = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<|im_start|>", "<|endoftext|>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|endoftext|>", special_tokens=ends
    )
    tokenizer.save_pretrained(tmp_path / "source")
    (model, processor), chosen = load_embedder(tmp_path / "source"), [items[0], items[2], items[4]]
    saved = save_model(model, processor, tmp_path / "saved")
    encoders = [SentenceTransformer(str(folder), device="cpu") for folder in (tmp_path / "source", saved)]
    for item in chosen:
        (found,) = embed(model, processor, [item])
        assert all(np.abs(encoder.encode([item])[0] - found).max() <= 1e-5 for encoder in encoders)
    (ids,) = processor(["a"])["input_ids"].tolist()
    assert [ids[0], ids[-1]] == [token for _, token in ends]


@pytest.mark.parametrize("prompts", [{}, {"query": INSTRUCTION}, {"query": "", "document": INSTRUCTION}])
@pytest.mark.parametrize("default", [None, "base"])
def test_each_role_gets_the_prompt_that_sentence_transformers_gives(prompts, default, tmp_path):
    save_embedder(tmp_path, prompts=prompts | {"base": "Describe it:"}, default=default)
    encoder, library = load_encoder(tmp_path, device="cpu"), SentenceTransformer(str(tmp_path), device="cpu")
    for role in ("encode", "encode_query", "encode_document"):
        for how in ({}, {"prompt": ""}, {"prompt_name": "base"}):
            found, wanted = (getattr(each, role)(["a red box"], **how) for each in (encoder, library))
            assert np.abs(found - wanted).max() <= 1e-5, (role, how)


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
        path.write_text(json.dumps(json.loads(path.read_text()) | {"similarity_fn_name": "dot"}))
    with pytest.raises(ValueError, match=f"{problem}.*, which the MLLM retriever lacks"):
        load_embedder(tmp_path)
    library = SentenceTransformer(str(tmp_path), device="cpu")
    found = load_encoder(tmp_path, device="cpu").encode_query(["a red box"])
    assert np.abs(found - library.encode_query(["a red box"])).max() <= 1e-5


@pytest.mark.parametrize("pooling", ["lasttoken", "mean"])
def test_saved_it_is_what_it_was(pooling, items, tmp_path):
    """The same files, but for what the library writes by itself; only changed weights differ."""
    source, saved = tmp_path / "source", tmp_path / "saved"
    save_embedder(source, pooling=pooling, prompts={"query": INSTRUCTION})
    model, processor = load_embedder(source)
    export_stock(model, processor, saved)
    for name in ("modules.json", "sentence_bert_config.json", "1_Pooling/config.json"):
        given, written = (json.loads((folder / name).read_text()) for folder in (source, saved))
        assert written == given, name
    settings = [json.loads((folder / "config_sentence_transformers.json").read_text()) for folder in (source, saved)]
    assert settings[0] == settings[1]
    assert (saved / "chat_template.jinja").read_text() == (source / "chat_template.jinja").read_text()
    assert not list(saved.glob("*.py"))
    old, new = (AutoModel.from_pretrained(folder).state_dict() for folder in (source, saved))
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
    found = SentenceTransformer(str(saved), device="cpu").encode(items[:2])
    assert np.abs(found - embed(model, processor, items[:2])).max() <= 1e-5
    again = load_model(saved)
    assert np.array_equal(embed(*again, items), embed(model, processor, items))


def test_a_pruned_embedder_is_an_embedder(items, tmp_path):
    save_embedder(tmp_path / "source")
    model, processor = load_embedder(tmp_path / "source", 2, embedding_dim=8)
    encoder = SentenceTransformer(str(export_stock(model, processor, tmp_path / "saved")), device="cpu")
    found = embed(model, processor, items)
    assert found.shape == (6, 8) and np.abs(encoder.encode(items[2:4]) - found[2:4]).max() <= 1e-5
    again, reader = load_model(tmp_path / "saved")
    assert again.config.keep_layers == 2 and again.config.embedding_dim == 8
    assert np.array_equal(embed(again, reader, items), found)


@pytest.mark.parametrize("name", ["llava", "internvl", "qwen2_5_vl"])
def test_our_own_stock_exports_are_embedders(name, items, retriever, tmp_path):
    """Also of [RET] and the prompt of PUMA: nothing but the files says how to embed."""
    model, processor = retriever(name, 2)
    export_stock(model, processor, tmp_path)
    for told in (None, INSTRUCTION):
        found = embed(*load_model(tmp_path), items, instruction=told)
        assert np.abs(found - embed(model, processor, items, instruction=told)).max() <= 1e-5


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
    with pytest.raises(ValueError, match="gives pictures three-dimensional positions, so other vectors"):
        export_stock(model, processor, tmp_path / "stock")
