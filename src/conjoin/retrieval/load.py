"""One function that makes an encoder of any model."""

import logging
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from conjoin.devices import choose_device
from conjoin.hub.folder import local_model
from conjoin.hub.load import load_any
from conjoin.hub.onnx_model import OnnxModel
from conjoin.retrieval.encoder import ItemEncoder, model_name

logger = logging.getLogger(__name__)


def load_encoder(
    path: str | Path,
    *,
    batch_size: int = 32,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    threads: int | None = None,
    input_type: str | None = None,
    truncate_dim: int | None = None,
    pooling: str | None = None,
    preset: str | None = None,
    compile: bool = False,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> ItemEncoder:
    """Load any model as an encoder.

    Args:
        path: As for `load_any`, which says how the model is read and what is refused.
        batch_size: Items per forward pass.
        device: Where to run; `None` takes a GPU when there is one.
        dtype: As for `ItemEncoder`, such as `"bfloat16"`; an ONNX export computes in its own.
        threads: As for `ItemEncoder`.
        input_type: How an item with several images is embedded, `"seq"`, `"cat"` or `"avg"`; see `ItemEncoder`.
        truncate_dim: Keep this many leading numbers of each vector, L2-normalised again (Matryoshka); all when None.
        pooling: As for `load_any`.
        preset: As for `load_any`.
        compile: Compile the layers of language models and towers by torch: the first batches take a minute longer, the
            others less. Where that fails, a warning says so, and they run as they are.
        trust_remote_code: As for `load_any`.
        revision: Branch, tag or commit of a repository on the Hub; a commit never changes.

    Raises:
        FileNotFoundError: There is no such model.
        ImportError: The sample is needed and not installed.
        ValueError: As `load_any`; there is no such `device`, `dtype` or `input_type`; or an ONNX export is to run
            elsewhere than on the CPU.
    """
    target = choose_device(device)  # refuses a wrong one before anything is loaded
    path = local_model(path)
    model, processor = load_any(path, revision, pooling, preset, trust_remote_code)
    if isinstance(model, OnnxModel):
        if device is not None and target.type != "cpu":
            raise ValueError(f"{str(path)!r} is an ONNX export, which runs on the CPU, not on {device}")
        target, dtype = torch.device("cpu"), None
    options = {name: value for name, value in (("pooling", pooling), ("preset", preset)) if value is not None}
    settings: dict[str, Any] = {"threads": threads, "input_type": input_type, "truncate_dim": truncate_dim}
    settings |= {"name": model_name(path), "load_options": options}
    encoder = ItemEncoder(model, processor, batch_size, target, dtype, **settings)
    if compile:
        _compile_layers(encoder)
    return encoder


def _compile_layers(encoder: ItemEncoder) -> None:
    """Compile each layer; layers that are alike share what is compiled."""
    layers = [each for each in encoder.model.modules() if isinstance(each, GradientCheckpointingLayer)]
    problem = None if layers else "it has no layers of transformers"
    for layer in layers:
        layer.compile(dynamic=True)
    try:
        _ = encoder.dimension  # compiles
    except (OSError, RuntimeError) as error:  # such as a missing compiler of C
        problem = f"{type(error).__name__}: {str(error).strip():.200}"
        for layer in layers:
            layer._compiled_call_impl = None
    if problem is not None:
        logger.warning("%s runs without compiled layers: %s", encoder.name, problem)
