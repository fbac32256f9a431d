"""Encoders as ONNX graphs, which onnxruntime and OpenVINO run without PyTorch: one graph for each kind of item."""

import copy
import hashlib
import importlib.util
import logging
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedModel, ProcessorMixin

from conjoin.hub.save import staged
from conjoin.processing import ImageTextProcessor
from conjoin.processing.sentence_files import SENTENCE_FILES, write_json_file
from conjoin.progress import progress
from conjoin.storage import model_fingerprint, text_digest

if TYPE_CHECKING:
    import onnx

GRAPHS = {"text": "model_text.onnx", "image": "model_image.onnx", "fused": "model_fused.onnx"}
"""Of each kind of item, the file of the graph that embeds it."""
WEIGHTS = "model.onnx.data"
SETTINGS = "model.onnx.json"
PRECISIONS = ("float32", "int8")

_INPUTS = {
    "pixel_values": {0: "batch"},
    "input_ids": {0: "batch", 1: "length"},
    "attention_mask": {0: "batch", 1: "length"},
    "special_tokens_mask": {0: "batch", 1: "length"},
}
"""The inputs of a graph, with the names of their free dimensions."""
_TEXT, _IMAGE = {"text": "a red box"}, {"image": Image.new("RGB", (64, 64), "red")}
_EXAMPLES = {"text": _TEXT, "image": _IMAGE, "fused": _TEXT | _IMAGE}
_QUANTIZED = ["MatMul", "Gather"]  # products with weights, and tables of embeddings
_INLINE = 1024
_ALIGNMENT = 64


def export_onnx(
    model: PreTrainedModel, processor: ProcessorMixin, folder: str | Path, precision: str = "float32"
) -> Path:
    """Save a joint encoder, score fusion or token fusion as ONNX graphs; `load_encoder` runs them with onnxruntime.

    There is one graph for texts, one for images and one for images with a text, so that no item passes through a tower
    that it does not need. All weights are in `model.onnx.data`, each once. The inputs are those of the model
    (`pixel_values` `(N, 3, H, W)`; `input_ids`, `attention_mask` and `special_tokens_mask` `(N, T)`), as far as the
    model reads them; N and T are free. The output is `embeddings` `(N, D)`, L2-normalised; it equals that of `model`
    to 1e-4 in float32. The processor and the model's configuration are in the folder, and no code.

    Args:
        model: The model, with adapters merged; its weights are written in float32.
        processor: Its processor.
        folder: Where to write, as `export` does.
        precision: `"float32"`, or `"int8"`: in 8 bits the weights of matrix products, one scale for each column, and
            the tables of embeddings (onnxruntime's dynamic quantisation).

    Raises:
        ImportError: onnx, onnxscript or onnxruntime is not installed.
        ValueError: The model does not take images and texts through an `ImageTextProcessor`, or `precision` is
            unknown.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}; expected one of {PRECISIONS}")
    if not isinstance(processor, ImageTextProcessor):
        raise ValueError(
            f"ONNX is for the joint encoder, score fusion and token fusion, not for {type(model).__name__} with "
            f"{type(processor).__name__}; an MLLM retriever is exported as a stock checkpoint"
        )
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f'ONNX export needs {", ".join(missing)}: pip install "conjoin[onnx]"')
    wrapped = _Embeddings(copy.deepcopy(model).cpu().float()).eval()
    with staged(folder) as staging, tempfile.TemporaryDirectory() as scratch:
        with (staging / WEIGHTS).open("wb") as data:
            offsets: dict[bytes, int] = {}
            for name, file in progress(GRAPHS.items(), "exporting", unit="graph"):
                batch = processor([_EXAMPLES[name]] * 2)  # 1 would be a constant
                inputs = {each: batch[each] for each in _INPUTS if each in batch}
                graph = _graph(wrapped, inputs, Path(scratch), precision)
                _move_weights(graph, data, offsets)
                _drop_traces(graph)
                (staging / file).write_bytes(graph.SerializeToString())
        _save_settings(model, processor, staging, precision)
    return Path(folder)


class _Embeddings(nn.Module):
    """A model whose only output is its embeddings."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        special_tokens_mask: Tensor | None = None,
    ) -> Tensor:
        """Return `(N, D)`."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "special_tokens_mask": special_tokens_mask}
        return self.model(pixel_values=pixel_values, **inputs).embeddings


def _graph(model: nn.Module, inputs: dict[str, Tensor], scratch: Path, precision: str) -> "onnx.ModelProto":
    """Return the graph of `model`, with its weights."""
    import onnx

    file, small = str(scratch / "graph.onnx"), str(scratch / "int8.onnx")
    shapes = {name: _INPUTS[name] for name in inputs}
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)  # on torchvision
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names of dimensions that are the same
        program: Any = torch.onnx.export(
            model,
            (),
            kwargs=inputs,
            dynamic_shapes=shapes,
            input_names=list(inputs),
            output_names=["embeddings"],
            dynamo=True,
            verbose=False,
        )
        program.save(file, external_data=True)
        if precision == "int8":
            from onnxruntime.quantization import quantize_dynamic

            shapeless = onnx.load(file, load_external_data=False)
            shapeless.graph.ClearField("value_info")  # wrong for a transposed weight; quantisation infers its own
            onnx.save(shapeless, file)
            quantize_dynamic(
                file, small, _QUANTIZED, per_channel=True, reduce_range=True, use_external_data_format=True
            )
            file = small
    return onnx.load(file)


def _move_weights(graph: "onnx.ModelProto", data: BinaryIO, offsets: dict[bytes, int]) -> None:
    """Move the weights of a graph into a file that several graphs share, unless they are there; small ones stay."""
    from onnx.external_data_helper import set_external_data

    for tensor in graph.graph.initializer:
        raw = tensor.raw_data
        if len(raw) < _INLINE:
            continue
        key = hashlib.sha256(raw).digest()
        if key not in offsets:
            data.write(bytes(-data.tell() % _ALIGNMENT))
            offsets[key] = data.tell()
            data.write(raw)
        set_external_data(tensor, WEIGHTS, offsets[key], len(raw))
        tensor.ClearField("raw_data")


def _drop_traces(graph: "onnx.ModelProto") -> None:
    """Remove the lines of Python, with their paths, that each part of a graph comes from."""
    inner = graph.graph
    for part in (graph, inner, *inner.node, *inner.value_info, *inner.input, *inner.output, *inner.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")


def _save_settings(model: PreTrainedModel, processor: ProcessorMixin, folder: Path, precision: str) -> None:
    """Write the configuration, the processor, and which model this is; no code."""
    fingerprint = model_fingerprint(model)
    if precision != "float32":
        fingerprint = text_digest(f"{fingerprint} {precision}")
    write_json_file(folder / SETTINGS, {"fingerprint": fingerprint, "precision": precision})
    model.config.save_pretrained(folder)
    processor.save_pretrained(folder)
    for file in sorted(folder.iterdir()):
        if file.suffix == ".py" or file.name in SENTENCE_FILES:  # nothing that cannot be loaded
            file.unlink()
