"""Stock checkpoints of MLLM retrievers: the same vectors in transformers and sentence-transformers, without code."""

import json

import numpy as np
import pytest
import torch
from jinja2 import Environment, nodes
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoModelForImageTextToText, AutoProcessor

from conjoin.hub import export_stock
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.processing import ImageTextProcessor, MllmRetrieverProcessor
from tiny_mllms import MLLMS, save_mllm

QUERY = "Find it:"
pytestmark = pytest.mark.usefixtures("without_video")


@pytest.fixture(scope="module")
def retriever(mllm_checkpoints):
    """`retriever(name, **config)`: a pruned model with a [RET] of its own, and its processor."""

    def build(name, source=None, processor=None, **config):
        source = source or mllm_checkpoints(name)[0]
        torch.manual_seed(0)
        model = MllmRetrieverModel.from_mllm(source, 3 if name == "qwen3_vl" else 2, **config)
        torch.nn.init.normal_(model.ret_embedding)
        return model, MllmRetrieverProcessor.from_mllm(source, **(processor or {}))

    return build


@pytest.fixture
def items(pictures):
    """Plain items of each kind, and messages; sentence-transformers takes them in batches of their own."""
    image = [{"type": "image", "image": picture} for picture in pictures]
    words = [{"type": "text", "text": text} for text in ("then", "more\nlines ")]
    plain = ["a b", pictures[1], {"image": pictures[2], "text": "red box"}, {"text": "first", "image": pictures[0]}]
    plain += ["x" * 60]
    contents = [[image[0], words[0], image[3], words[1]], [image[0], image[1]], [words[0], image[2]]]
    return plain, [[{"role": "user", "content": content}] for content in contents]


@torch.no_grad()
def embed(model, processor, batch, **options):
    return model(**processor(batch, **options)).embeddings.numpy()


def read(file):
    return json.loads(file.read_text())


def load(folder, **options):
    return SentenceTransformer(str(folder), device="cpu", **options)


@pytest.mark.parametrize("name", MLLMS)
def test_the_vectors_in_sentence_transformers(name, retriever, items, tmp_path):
    model, processor = retriever(name)
    encoder = load(export_stock(model, processor, tmp_path / "stock", {"query": QUERY}))
    for batch in items:
        expected = embed(model, processor, batch)
        told = embed(model, processor, batch, instruction=QUERY)
        assert np.abs(told - expected).max() > 1e-3
        for side in ("left", "right"):
            encoder.tokenizer.padding_side = side
            assert np.abs(encoder.encode(batch) - expected).max() <= 1e-5, side
            assert np.abs(encoder.encode_document(batch) - expected).max() <= 1e-5, side
            assert np.abs(encoder.encode_query(batch) - told).max() <= 1e-5, side
        alone = np.concatenate([encoder.encode([item]) for item in batch])
        assert np.abs(alone - expected).max() <= 1e-5


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
    options = {} if name != "internvl" else {"images_kwargs": {"crop_to_patches": False}}
    for conversation in items[1]:
        batch = reader.apply_chat_template(
            [conversation], tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=options
        )
        with torch.no_grad():
            state = stock.eval()(**batch).last_hidden_state[:, -1]
        expected = embed(model, processor, [conversation])
        assert (torch.nn.functional.normalize(state, dim=-1) - torch.tensor(expected)).abs().max() <= 1e-5


@pytest.mark.parametrize("name", MLLMS)
def test_what_serving_engines_read(name, retriever, tmp_path):
    """The fields by which vLLM chooses the model, the pooling, the normalisation and the form of messages."""
    model, processor = retriever(name, embedding_dim=8)
    folder = export_stock(model, processor, tmp_path / "stock")
    config = read(folder / "config.json")
    assert config["architectures"] == [type(MLLMS[name]()[0]).__name__] and config["tie_word_embeddings"]
    assert config["matryoshka_dimensions"] == [8]
    if name == "qwen3_vl":  # without it, vLLM computes other positions of images than transformers
        assert config["text_config"]["rope_parameters"]["mrope_interleaved"] is True
    modules = {entry["type"]: entry["path"] for entry in read(folder / "modules.json")}
    kinds = ["Transformer", "Pooling", "Dense", "Normalize"]
    assert list(modules) == [f"sentence_transformers.models.{kind}" for kind in kinds]
    pooling = read(folder / modules["sentence_transformers.models.Pooling"] / "config.json")
    assert [key for key, value in pooling.items() if value is True] == ["pooling_mode_lasttoken", "include_prompt"]
    dense = folder / modules["sentence_transformers.models.Dense"]
    assert read(dense / "config.json") | {"in_features": 32, "out_features": 8, "bias": False} == read(
        dense / "config.json"
    )
    assert torch.equal(load_file(dense / "model.safetensors")["linear.weight"], torch.eye(8, 32))
    template = (folder / "chat_template.jinja").read_text()
    loops = [(node.target.name, node.iter) for node in Environment().parse(template).find_all(nodes.For)]
    assert [(target, iterated.name) for target, iterated in loops] == [("message", "messages"), ("part", "content")]
    names = {key.rsplit(".layers.")[0] for key in load_file(folder / "model.safetensors") if ".layers." in key}
    assert (
        names
        == {
            "internvl": {"language_model.model"},
            "llava": {"language_model.model", "vision_tower.vision_model.encoder"},
            "qwen2_5_vl": {"model"},
            "qwen2_vl": {"model"},
            "qwen3_vl": {"model.language_model"},
        }[name]
    ), "the names of published checkpoints"


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
    assert np.abs(load(folder).encode(["a b"]) - embed(model, processor, ["a b"])).max() <= 1e-5


@pytest.mark.parametrize("readout", ["before_token", "last"])
def test_other_readouts(readout, retriever, items, tmp_path):
    model, processor = retriever(
        "llava", readout=readout, processor={"ret_token": None if readout == "last" else "[RET]"}
    )
    encoder = load(export_stock(model, processor, tmp_path / "stock"))
    assert "[RET]" not in encoder[0].processor.chat_template
    for batch in items:
        assert np.abs(encoder.encode(batch) - embed(model, processor, batch)).max() <= 1e-5


def test_cut_texts_keep_their_ends(retriever, tmp_path):
    model, processor = retriever("qwen2_vl", processor={"max_length": 140})
    encoder = load(export_stock(model, processor, tmp_path / "stock"))
    assert encoder.max_seq_length == 140
    texts = ["a red box with" + " many words" * 30, "short"]
    assert np.abs(encoder.encode(texts) - embed(model, processor, texts)).max() <= 1e-5


def test_instructions_come_first(retriever, tmp_path):
    encoder = load(export_stock(*retriever("qwen2_vl"), tmp_path / "stock"))
    with pytest.raises(Exception, match="an item has neither text nor image"):
        encoder.encode([" "])
    late = [{"role": "user", "content": "a"}, {"role": "system", "content": "Find it."}]
    with pytest.raises(Exception, match="a system message, the instruction, must come first"):
        encoder.encode([late])
    with pytest.raises(Exception, match="a part of type video cannot be embedded"):
        encoder[0].processor.apply_chat_template([{"role": "user", "content": [{"type": "video", "video": "v.mp4"}]}])


def test_what_no_stock_checkpoint_can_have(retriever, tiny_checkpoints, tmp_path):
    out = tmp_path / "stock"
    with pytest.raises(
        ValueError, match="a stock 'qwen2_vl' gives pictures three-dimensional positions, so other vectors"
    ):
        export_stock(*retriever("qwen2_vl", position_mode="1d"), out)
    model, _ = retriever("qwen2_vl")
    clip = tiny_checkpoints["clip"]
    with pytest.raises(ValueError, match="over CLIP; MllmRetrieverModel with ImageTextProcessor is of no arch"):
        export_stock(model, ImageTextProcessor.from_backbones(clip, clip), out)
    assert not out.exists()


def test_a_failure_leaves_the_earlier_model(retriever, tmp_path, monkeypatch):
    model, processor = retriever("qwen2_vl")
    folder = export_stock(model, processor, tmp_path / "stock")
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}

    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("conjoin.hub.stock.write_checksums", fail)
    with pytest.raises(OSError, match="No space left"):
        export_stock(model, processor, folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} == before
