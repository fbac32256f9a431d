"""ONNX exports: the vectors of the model, from onnxruntime and OpenVINO, for every kind of item."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from conjoin import ScoreFusionModel
from conjoin.cli.main import main
from conjoin.hub import export, export_onnx, load_model, onnx_export
from conjoin.hub.build import mllm_processor
from conjoin.retrieval import ItemEncoder, load_encoder

for library in ("onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(library)

if torch.__version__ < "2.8":
    pytest.skip("torch 2.7 cannot trace these models", allow_module_level=True)

pytestmark = pytest.mark.slow
FILES = {"config.json", "model.onnx.data", "model.onnx.json", "processor_config.json", "SHA256SUMS"}
FILES |= {"tokenizer.json", "tokenizer_config.json", *onnx_export.GRAPHS.values()}


@pytest.fixture(scope="module")
def exported(exports, tmp_path_factory):
    """`exported(kind)`: the encoder of a model, and the folder of its export; that of score fusion by the command."""
    cache = {}

    def get(kind):
        if kind not in cache:
            source, model, processor = exports(kind)
            out = tmp_path_factory.mktemp(kind) / "onnx"
            if kind == "score_fusion":
                assert main(["export", str(source), "--format", "onnx", "--out", str(out)]) == 0
            else:
                export_onnx(model, processor, out)
            cache[kind] = ItemEncoder(model, processor), out
        return cache[kind]

    return get


@pytest.fixture
def copied(exported, tmp_path):
    """A copy of an export that a test may change."""
    return Path(shutil.copytree(exported("score_fusion")[1], tmp_path / "copy"))


@pytest.fixture(scope="module")
def batches(pictures):
    both = [{"text": text, "image": picture} for text, picture in zip(("x", "blue 12"), pictures, strict=False)]
    texts = ["a red box", "x", "a b c d e f g h 1 2 3"]
    return [[*texts, *pictures, *both], texts[:1], texts, pictures[:1], pictures, both[:1], both, [texts[2], both[0]]]


@pytest.mark.parametrize("kind", ["joint_encoder", "score_fusion", "token_fusion"])
def test_the_vectors_in_onnxruntime(kind, exported, batches):
    """One item or several, of one kind or mixed, long or short."""
    expected, folder = exported(kind)
    encoder = load_encoder(folder)
    for batch in batches:
        assert np.abs(encoder.encode(batch) - expected.encode(batch)).max() <= 1e-5
    told = encoder.encode(["a red box"], prompt="find it")
    assert np.abs(told - expected.encode(["a red box"], prompt="find it")).max() <= 1e-5
    assert np.abs(told - encoder.encode(["a red box"])).max() > 1e-3
    assert encoder.fingerprint == expected.fingerprint and encoder.device.type == "cpu"
    assert (encoder.processing, encoder.dimension) == (expected.processing, expected.dimension)


@pytest.mark.parametrize("kind", ["joint_encoder", "score_fusion", "token_fusion"])
def test_the_vectors_in_openvino(kind, exported, batches):
    openvino = pytest.importorskip("openvino")
    expected, folder = exported(kind)
    core, options = openvino.Core(), {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    for name, batch in (("text", batches[2]), ("image", batches[4]), ("fused", batches[6])):
        graph = core.compile_model(folder / onnx_export.GRAPHS[name], "CPU", options)
        for items in (batch, batch[:1]):
            inputs = expected.processor(items)
            found = graph({each.any_name: inputs[each.any_name].numpy() for each in graph.inputs})["embeddings"]
            assert np.abs(found - expected.encode(items)).max() <= 1e-5


def test_what_is_in_the_folder(exported):
    """No code, no weights twice, no paths of the machine; free dimensions have names."""
    import onnx

    encoder, folder = exported("joint_encoder")
    assert {file.name for file in folder.iterdir()} == FILES
    weights = sum(tensor.numel() * tensor.element_size() for tensor in encoder.model.state_dict().values())
    graphs = {name: onnx.load(folder / file, load_external_data=False) for name, file in onnx_export.GRAPHS.items()}
    assert (folder / "model.onnx.data").stat().st_size < weights
    assert all(str(Path.cwd()).encode() not in graph.SerializeToString() for graph in graphs.values())
    assert all(b".py" not in graph.SerializeToString() for graph in graphs.values())
    shapes = {
        name: {each.name: [dim.dim_param or dim.dim_value for dim in each.type.tensor_type.shape.dim] for each in part}
        for name, graph in graphs.items()
        for part in [[*graph.graph.input, *graph.graph.output]]
    }
    words = {name: ["batch", "length"] for name in ("input_ids", "attention_mask", "special_tokens_mask")}
    images, vectors = {"pixel_values": ["batch", 3, 16, 16]}, {"embeddings": ["batch", 16]}
    assert shapes == {"text": words | vectors, "image": images | vectors, "fused": images | words | vectors}
    assert "auto_map" not in "".join((folder / name).read_text() for name in FILES if name.endswith("config.json"))


def test_8_bits(exports, tmp_path, monkeypatch):
    """Another model, near the first, in less space."""
    monkeypatch.setattr(onnx_export, "GRAPHS", {"text": "model_text.onnx"})  # one graph, to save time
    monkeypatch.setattr("conjoin.hub.onnx_model.GRAPHS", {"text": "model_text.onnx"})
    _, model, processor = exports("score_fusion")
    expected = ItemEncoder(model, processor)
    encoder = load_encoder(export_onnx(model, processor, tmp_path / "int8", "int8"))
    texts = ["a red box", "blue 12", "x"]
    similarities = (encoder.encode(texts) * expected.encode(texts)).sum(1)
    assert similarities.min() > 0.98 and np.abs(encoder.encode(texts) - expected.encode(texts)).max() > 1e-5
    text_weights = sum(value.nbytes for name, value in model.state_dict().items() if not name.startswith("vision"))
    assert (tmp_path / "int8/model.onnx.data").stat().st_size < 0.5 * text_weights
    assert encoder.fingerprint != expected.fingerprint
    assert json.loads((tmp_path / "int8/model.onnx.json").read_text())["precision"] == "int8"


def test_a_folder_holds_one_model(copied, exported, batches):
    """A model that is saved over an export replaces it."""
    expected, _ = exported("score_fusion")
    export(expected.model, expected.processor, copied)
    assert not list(copied.glob("*.onnx*"))
    assert type(load_encoder(copied).model) is ScoreFusionModel


def test_what_cannot_be_exported_or_loaded_is_refused_by_name(
    copied, exported, mllm_checkpoints, tmp_path, monkeypatch
):
    model, processor = exported("score_fusion")[0].model, exported("score_fusion")[0].processor
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="precision='int4'; expected one of"):
        export_onnx(model, processor, out, "int4")
    retriever = mllm_processor(mllm_checkpoints("qwen2_vl")[0])
    with pytest.raises(ValueError, match="not for ScoreFusionModel with MllmRetrieverProcessor"):
        export_onnx(model, retriever, out)
    assert load_encoder(copied, dtype=torch.bfloat16).dtype is None  # it computes in its own precision
    with pytest.raises(ValueError, match="is an ONNX export, which"):
        load_model(copied)
    for library, call in (("onnxscript", export_onnx), ("onnxruntime", load_encoder)):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(ImportError, match=r"conjoin\[onnx\]"):
            call(*((model, processor, out) if call is export_onnx else (copied,)))
        monkeypatch.undo()
    assert not out.exists()
    (copied / "model_image.onnx").write_bytes(b"")
    with pytest.raises(ValueError, match=r"model_image\.onnx' is missing, truncated or damaged"):
        load_encoder(copied)
    (copied / "SHA256SUMS").unlink()
    with pytest.raises(ValueError, match=r"model_image\.onnx' cannot be read: .*; export the model again"):
        load_encoder(copied).encode([Image.new("RGB", (9, 9))])
