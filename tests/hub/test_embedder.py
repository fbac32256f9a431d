"""Published embedders: the vectors of the publisher's code and of sentence-transformers, saved as what they were."""

import json

import numpy as np
import pytest
import sentence_transformers
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from conjoin.hub import export_stock, load_embedder, load_model
from conjoin.hub.embedder import PRESETS
from conjoin.retrieval import load_encoder
from tiny_embedders import DEFAULT, INSTRUCTION, save_embedder, stock_processor
from tiny_mllms import save_mllm

pytestmark = pytest.mark.usefixtures("without_video")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
SEVERAL_IMAGES = [] if sentence_transformers.__version__.startswith("6.0.") else [[5]]
"""Batches of one item of several images, where sentence-transformers can embed them: 6.0 nests their list twice."""


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedder")
    save_embedder(folder)
    return folder


@pytest.fixture
def items(pictures):
    """Text, image, both, several of both: images first, as all publishers put them."""
    texts = ["a red box", "two\nlines, and a longer text than the others"]
    both = [{"image": pictures[0], "text": texts[0]}, {"image": [*pictures[1:3]], "text": texts}]
    return [*texts, *pictures[:2], *both]


def parts(item):
    """The images and the texts of an item."""
    item = item if isinstance(item, dict) else {"text" if isinstance(item, str) else "image": item}
    listed = [item.get(name, []) for name in ("image", "text")]
    return [value if isinstance(value, list) else [value] for value in listed]


@torch.no_grad()
def embed(model, processor, batch, **options):
    return model(**processor(batch, **options)).embeddings.numpy()


@torch.no_grad()
def publisher(folder, prompts, images, side="right", positions=None, **size):
    """What the publishers' code does: the stock processor and model on whole prompts, the last token, unit length."""
    processor, model = stock_processor(folder, **size), AutoModel.from_pretrained(folder).eval()
    processor.tokenizer.padding_side = side
    flat = [image for group in images for image in group]
    inputs = processor(text=prompts, images=flat or None, padding=True, return_tensors="pt")
    if positions == "1d":
        inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1]).expand(3, len(prompts), -1)
    states, mask = model(**inputs).last_hidden_state, inputs["attention_mask"]
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    return F.normalize(states[torch.arange(len(last)), last], dim=-1).numpy()


def chatml(told, images, texts, end=""):
    shown = IMAGE * len(images) + "".join(texts)
    return f"<|im_start|>system\n{told}<|im_end|>\n<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n{end}"


PIXELS = {"shortest_edge": 8 * 8, "longest_edge": 24 * 24}
WRITTEN = {
    "qwen3_vl_embedding": ("qwen3_vl", lambda told, *item: chatml(told or DEFAULT, *item)),
    "gme_qwen2_vl": (
        "qwen2_vl",
        lambda told, *item: chatml(told or "You are a helpful assistant.", *item, end="<|endoftext|>"),
    ),
    "vlm2vec": (
        "qwen2_vl",
        lambda told, images, texts: "<|image_pad|> " * len(images) + " ".join(filter(None, [told, "".join(texts)])),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("told", [None, INSTRUCTION])
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_embed_as_the_publishers_code(preset, told, items, tmp_path):
    name, write = WRITTEN[preset]
    save_mllm(name, tmp_path)
    limits = {"min_pixels": PIXELS["shortest_edge"], "max_pixels": PIXELS["longest_edge"]}
    model, processor = load_embedder(tmp_path, preset=preset, processor=limits | {"max_length": 1000})
    found = embed(model, processor, items, instruction=told)
    positions = "1d" if preset == "vlm2vec" else None
    side = "left" if preset == "gme_qwen2_vl" else "right"
    listed = [parts(item) for item in items]
    prompts, images = [write(told, *item) for item in listed], [item[0] for item in listed]
    alone = [publisher(tmp_path, [p], [i], side, positions, **PIXELS) for p, i in zip(prompts, images, strict=True)]
    assert np.abs(found - np.concatenate(alone)).max() <= 1e-5
    assert np.abs(found - publisher(tmp_path, prompts, images, side, positions, **PIXELS)).max() <= 1e-5
    own = np.concatenate([embed(model, processor, [item], instruction=told) for item in items])
    assert np.abs(own - found).max() <= 1e-5 and np.abs(found[0] - found[1]).max() > 1e-3


def test_the_instruction_of_qwen3_vl_embedding_ends_in_punctuation(tmp_path):
    save_mllm("qwen3_vl", tmp_path)
    model, processor = load_embedder(tmp_path, preset="qwen3_vl_embedding")
    closed, opened, asked = (embed(model, processor, ["a"], instruction=f"Find it{end}") for end in (".", "", "?"))
    assert np.array_equal(closed, opened) and np.abs(closed - asked).max() > 1e-4


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


def test_prompts_of_the_files(tmp_path, items):
    save_embedder(tmp_path, prompts={"query": INSTRUCTION, "base": "Describe it:"}, default="base")
    (model, processor), encoder = load_embedder(tmp_path), SentenceTransformer(str(tmp_path), device="cpu")
    assert processor.prompts == {"query": INSTRUCTION, "base": "Describe it:"}
    told = embed(model, processor, items[:2], instruction=INSTRUCTION)
    plain = embed(model, processor, items[:2])
    assert np.abs(encoder.encode_query(items[:2]) - told).max() <= 1e-5
    assert np.abs(encoder.encode(items[:2]) - plain).max() <= 1e-5 < np.abs(plain - told).max()


def test_special_tokens_in_a_text_are_words(embedder):
    model, processor = load_embedder(embedder)
    (ids,) = processor(["a <|image_pad|> and <|im_end|>"])["input_ids"].tolist()
    tokenizer = processor.tokenizer
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") not in ids
    assert "a <|image_pad|> and <|im_end|>" in tokenizer.decode(ids)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2
    embed(model, processor, ["a <|image_pad|> and <|im_end|>"])


def test_long_texts_keep_the_end_of_the_prompt(embedder):
    _, processor = load_embedder(embedder, processor={"max_length": 120})
    (short,), (long,) = (processor([text])["input_ids"].tolist() for text in ("a", "a b " * 90))
    assert len(long) == 120 and long[-13:] == short[-13:] and long[:40] == short[:40]


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


def test_a_pruned_embedder_is_an_embedder(embedder, items, tmp_path):
    model, processor = load_embedder(embedder, 2, embedding_dim=8)
    encoder = SentenceTransformer(str(export_stock(model, processor, tmp_path)), device="cpu")
    found = embed(model, processor, items)
    assert found.shape == (6, 8) and np.abs(encoder.encode(items[2:4]) - found[2:4]).max() <= 1e-5
    again, reader = load_model(tmp_path)
    assert again.config.keep_layers == 2 and again.config.embedding_dim == 8
    assert np.array_equal(embed(again, reader, items), found)


@pytest.mark.parametrize("name", ["llava", "internvl", "qwen2_5_vl"])
def test_our_own_stock_exports_are_embedders(name, items, mllm_checkpoints, tmp_path):
    """Also of [RET] and the prompt of PUMA: nothing but the files says how to embed."""
    from conjoin.models.mllm_retriever import MllmRetrieverModel
    from conjoin.processing import MllmRetrieverProcessor

    source = mllm_checkpoints(name)[0]
    model, processor = MllmRetrieverModel.from_mllm(source, 2), MllmRetrieverProcessor.from_mllm(source)
    export_stock(model, processor, tmp_path)
    for told in (None, INSTRUCTION):
        found = embed(*load_model(tmp_path), items, instruction=told)
        assert np.abs(found - embed(model, processor, items, instruction=told)).max() <= 1e-5


def test_encoders_take_every_item(embedder, items):
    encoder = load_encoder(embedder, device="cpu")
    model, processor = load_embedder(embedder)
    expected = embed(model, processor, items, instruction=INSTRUCTION)
    assert np.abs(encoder.encode(items, prompt=INSTRUCTION) - expected).max() <= 1e-5


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"pooling": "cls"}, "pools by"),
        ({"modality_config": {"text": {"method": "forward"}}}, "no structured messages"),
    ],
)
def test_what_cannot_be_read_is_refused(change, problem, tmp_path):
    save_embedder(tmp_path, **change)
    with pytest.raises(ValueError, match=problem):
        load_embedder(tmp_path)


def test_an_unknown_preset_is_refused(embedder):
    with pytest.raises(ValueError, match="gme_qwen2_vl"):
        load_embedder(embedder, preset="gme")
