"""Stock checkpoints: the same vectors in transformers and sentence-transformers, without code."""

import numpy as np
import pytest
import torch
from checks import embed, far, load, message, read
from jinja2 import Environment, nodes
from safetensors.torch import load_file
from torch.nn.functional import normalize
from transformers import AutoModel, AutoModelForImageTextToText, AutoProcessor, CLIPModel, CLIPProcessor

from conjoin.hub import export_stock, load_model
from conjoin.hub.build import image_text_processor, mllm_model, mllm_processor, score_fusion_model
from conjoin.retrieval import ItemEncoder, load_encoder
from tiny_mllms import MLLMS, save_mllm

QUERY = "Find it:"
TEXTS = ["a red box", "x"]
WEIGHTS = {
    "internvl": {"language_model.model"},
    "llava": {"language_model.model", "vision_tower.vision_model.encoder"},
    "qwen2_5_vl": {"model"},
    "qwen2_vl": {"model"},
    "qwen3_vl": {"model.language_model"},
}
"""What stands before `.layers.` in published checkpoints."""
pytestmark = pytest.mark.usefixtures("without_video")


@pytest.fixture(scope="module")
def retriever(mllm_checkpoints):
    """`retriever(name, **config)`: a pruned model with a [RET] of its own, and its processor."""

    def build(name, source=None, processor=None, **config):
        source = source or mllm_checkpoints(name)[0]
        torch.manual_seed(0)
        model = mllm_model(source, 3 if name == "qwen3_vl" else 2, **config)
        torch.nn.init.normal_(model.ret_embedding)
        return model, mllm_processor(source, **(processor or {}))

    return build


@pytest.fixture
def items(pictures):
    """Plain items of each kind, and messages; sentence-transformers takes them in batches of their own."""
    plain = ["a b", pictures[1], {"image": pictures[2], "text": "red box"}, {"text": "first", "image": pictures[0]}]
    contents = [(pictures[0], "then", pictures[3], "more\nlines "), pictures[:2], ("then", pictures[2])]
    return [*plain, "x" * 60], [message(*content) for content in contents]


@pytest.mark.parametrize("name", MLLMS)
def test_the_vectors_in_sentence_transformers(name, retriever, items, tmp_path):
    model, processor = retriever(name)
    encoder = load(export_stock(model, processor, tmp_path / "stock", {"query": QUERY}))
    embedder = load_model(tmp_path / "stock")  # nothing but the files says how to embed
    for batch in items:
        expected, told = embed(model, processor, batch), embed(model, processor, batch, instruction=QUERY)
        assert far(told, expected) > 1e-3 and far(embed(*embedder, batch, instruction=QUERY), told) <= 1e-5
        for side in ("left", "right"):
            encoder.tokenizer.padding_side = side
            assert far(encoder.encode(batch), expected) <= 1e-5, side
            assert far(encoder.encode_document(batch), expected) <= 1e-5, side
            assert far(encoder.encode_query(batch), told) <= 1e-5, side
        assert far(np.concatenate([encoder.encode([item]) for item in batch]), expected) <= 1e-5


@pytest.mark.parametrize("name", MLLMS)
def test_the_vectors_in_transformers(name, retriever, items, tmp_path):
    """An ordinary checkpoint: nothing missing, nothing left over, and the last state is the vector."""
    model, processor = retriever(name)
    folder = export_stock(model, processor, tmp_path / "stock")
    stock, report = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert type(stock) is type(model.backbone) and not any(report.values()), report
    whole, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()) and whole.lm_head.weight is whole.get_input_embeddings().weight
    kept = model.config.keep_layers
    assert stock.config.get_text_config().num_hidden_layers == kept == len(stock.language_model.layers)
    assert not list(folder.glob("*.py")) and "auto_map" not in (folder / "config.json").read_text()
    reader = AutoProcessor.from_pretrained(folder)
    options = {"images_kwargs": {"crop_to_patches": False}} if name == "internvl" else {}
    for conversation in items[1]:
        batch = reader.apply_chat_template(
            [conversation], tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=options
        )
        with torch.no_grad():
            state = normalize(stock.eval()(**batch).last_hidden_state[:, -1], dim=-1)
        assert far(state.numpy(), embed(model, processor, [conversation])) <= 1e-5


@pytest.mark.parametrize("name", MLLMS)
def test_what_serving_engines_read(name, retriever, tmp_path):
    """The fields by which vLLM chooses the model, the pooling, the normalisation and the form of messages."""
    folder = export_stock(*retriever(name, embedding_dim=8), tmp_path / "stock")
    config = read(folder / "config.json")
    assert config["architectures"] == [type(MLLMS[name]()[0]).__name__] and config["tie_word_embeddings"]
    assert config["matryoshka_dimensions"] == [8]
    if name == "qwen3_vl":  # without it, vLLM computes other positions of images than transformers
        assert config["text_config"]["rope_parameters"]["mrope_interleaved"] is True
    modules = {entry["type"].rpartition(".")[2]: folder / entry["path"] for entry in read(folder / "modules.json")}
    assert list(modules) == ["Transformer", "Pooling", "Dense", "Normalize"]
    pooling = read(modules["Pooling"] / "config.json")
    assert [key for key, value in pooling.items() if value is True] == ["pooling_mode_lasttoken", "include_prompt"]
    assert {"in_features": 32, "out_features": 8, "bias": False}.items() <= read(
        modules["Dense"] / "config.json"
    ).items()
    assert torch.equal(load_file(modules["Dense"] / "model.safetensors")["linear.weight"], torch.eye(8, 32))
    template = Environment().parse((folder / "chat_template.jinja").read_text())
    loops = [(node.target.name, node.iter.name) for node in template.find_all(nodes.For)]
    assert loops == [("message", "messages"), ("part", "content")]
    names = {key.rsplit(".layers.")[0] for key in load_file(folder / "model.safetensors") if ".layers." in key}
    assert names == WEIGHTS[name]


@pytest.mark.parametrize("rows", [300, 262])
def test_the_row_of_the_token(rows, retriever, tmp_path):
    """[RET] takes a row that the tokenizer does not use, or a new one."""
    save_mllm("qwen2_vl", tmp_path / "source", vocab_size=rows)
    model, processor = retriever("qwen2_vl", source=str(tmp_path / "source"))
    before = model.get_input_embeddings().weight.clone()
    folder = export_stock(model, processor, tmp_path / "stock")
    stock = AutoModel.from_pretrained(folder)
    table = stock.get_input_embeddings().weight
    assert stock.config.get_text_config().vocab_size == len(table) == max(rows, 263)
    assert torch.equal(table[262], model.ret_embedding) and torch.equal(table[:262], before[:262])
    assert torch.equal(model.get_input_embeddings().weight, before), "the exported model is not changed"
    assert far(load(folder).encode(["a b"]), embed(model, processor, ["a b"])) <= 1e-5


@pytest.mark.parametrize("readout", ["before_token", "last"])
def test_other_readouts(readout, retriever, items, tmp_path):
    token = {"ret_token": None if readout == "last" else "[RET]"}
    model, processor = retriever("llava", readout=readout, processor=token)
    encoder = load(export_stock(model, processor, tmp_path / "stock"))
    assert "[RET]" not in encoder[0].processor.chat_template
    for batch in items:
        assert far(encoder.encode(batch), embed(model, processor, batch)) <= 1e-5


def test_cut_texts_keep_their_ends(retriever, tmp_path):
    model, processor = retriever("qwen2_vl", processor={"max_length": 140})
    encoder = load(export_stock(model, processor, tmp_path / "stock"))
    assert encoder.max_seq_length == 140
    texts = ["a red box with" + " many words" * 30, "short"]
    assert far(encoder.encode(texts), embed(model, processor, texts)) <= 1e-5


@pytest.mark.parametrize(
    ("conversation", "problem"),
    [
        (message(" "), "an item has neither text nor image"),
        (
            [*message("a"), {"role": "system", "content": "Find it."}],
            "a system message, the instruction, must come first",
        ),
        (
            [{"role": "user", "content": [{"type": "video", "video": "v.mp4"}]}],
            "a part of type video cannot be embedded",
        ),
    ],
)
def test_the_template_refuses_what_is_no_item(conversation, problem, retriever, tmp_path):
    processor = load(export_stock(*retriever("qwen2_vl"), tmp_path / "stock"))[0].processor
    with pytest.raises(Exception, match=problem):
        processor.apply_chat_template(conversation)


def score_fusion(folder, processor=None, **config):
    model = score_fusion_model(folder, **config).eval()
    return model, image_text_processor(folder, folder, **(processor or {}))


@pytest.mark.parametrize("weights", [{}, {"image_weight": 0.5, "text_weight": 2.0}])
def test_the_vectors_of_clip(weights, tiny_checkpoints, pictures, tmp_path):
    model, processor = score_fusion(tiny_checkpoints["clip"], **weights)
    before = model.backbone.text_projection.weight.clone()
    folder = export_stock(model, processor, tmp_path / "stock")
    both = [{"text": text, "image": picture} for text, picture in zip(TEXTS, pictures, strict=False)]
    texts, images, sums = (ItemEncoder(model, processor).encode(batch) for batch in (TEXTS, pictures[:2], both))
    stock, report = AutoModel.from_pretrained(folder, output_loading_info=True)
    reader = AutoProcessor.from_pretrained(folder)
    assert type(stock) is CLIPModel and type(reader) is CLIPProcessor and not any(report.values())
    with torch.no_grad():
        text = stock.get_text_features(**reader(text=TEXTS, return_tensors="pt", padding=True)).pooler_output
        image = stock.get_image_features(**reader(images=pictures[:2], return_tensors="pt")).pooler_output
    for vectors, expected in ((text, texts), (image, images), (image + text, sums)):
        assert far(normalize(vectors, dim=-1).numpy(), expected) <= 1e-5
    for batch, expected in ((TEXTS, texts), (pictures[:2], images)):
        assert far(load(folder).encode(batch, normalize_embeddings=True), expected) <= 1e-5
    assert far(load_encoder(folder).encode(both), sums) <= 1e-5
    assert not list(folder.glob("*.py")) and torch.equal(model.backbone.text_projection.weight, before)


def test_the_limit_and_the_prompts_of_clip(tiny_checkpoints, tmp_path, caplog):
    given = {"query": "Find it:", "document": ""}
    folder = export_stock(*score_fusion(tiny_checkpoints["clip"], {"max_text_length": 7}), tmp_path / "stock", given)
    assert AutoProcessor.from_pretrained(folder).tokenizer.model_max_length == 7
    assert "a CLIP checkpoint has no prompts; put them before the texts: {'query': 'Find it:'}" in caplog.text


def test_what_no_stock_checkpoint_can_have(retriever, tiny_checkpoints, tmp_path):
    clip = tiny_checkpoints["clip"]
    mixed = (retriever("qwen2_vl")[0], score_fusion(clip)[1])
    for (model, processor), problem in (
        (retriever("qwen2_vl", position_mode="1d"), "a stock 'qwen2_vl' gives pictures three-dimensional positions"),
        (mixed, "over CLIP; MllmRetrieverModel with ImageTextProcessor is of no arch"),
        (score_fusion(clip, normalize_inputs=True), "normalize_inputs=True cannot be exported"),
        (score_fusion(tiny_checkpoints["siglip"]), "over 'siglip' cannot be a stock checkpoint"),
    ):
        with pytest.raises(ValueError, match=problem):
            export_stock(model, processor, tmp_path / "stock")
    assert not (tmp_path / "stock").exists()
