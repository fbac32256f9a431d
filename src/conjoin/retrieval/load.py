"""One function that loads any model, and one that makes an encoder of it."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from conjoin.devices import choose_device, choose_dtype
from conjoin.hub.build import from_mllm
from conjoin.hub.embedder import UnsupportedEmbedderError, load_embedder
from conjoin.hub.load import REMEDY, adapter_base, load_model, loading, local_model, merge_adapter, model_kind
from conjoin.retrieval.encoder import ItemEncoder, model_name
from conjoin.retrieval.onnx_encoder import OnnxModel, load_onnx_model
from conjoin.retrieval.sentence_model import SentenceModel, load_sentence_model, load_tower
from conjoin.storage import check_checksums


def load_encoder(
    path: str | Path,
    *,
    batch_size: int = 32,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    num_workers: int = 0,
    input_type: str | None = None,
    truncate_dim: int | None = None,
    pooling: str | None = None,
    preset: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> ItemEncoder:
    """Load any model as an encoder.

    Args:
        path: As for `load_any`, which says how the model is read and what is refused.
        batch_size: Items per forward pass.
        device: Where to run; `None` takes a GPU when there is one.
        dtype: As for `ItemEncoder`, such as `"bfloat16"`.
        num_workers: Processes that decode images and tokenise ahead of the model; 0 does it in this one.
        input_type: How an item with several images is embedded, `"seq"`, `"cat"` or `"avg"`; see `ItemEncoder`.
        truncate_dim: Keep this many leading numbers of each vector, L2-normalised again (Matryoshka); all when None.
        pooling: As for `load_any`.
        preset: As for `load_any`.
        trust_remote_code: As for `load_any`.
        revision: Branch, tag or commit of a repository on the Hub; a commit never changes.

    Raises:
        FileNotFoundError: There is no such model.
        ImportError: The sample is needed and not installed.
        ValueError: As `load_any`; there is no such `device`, `dtype` or `input_type`; or an ONNX export is to run
            elsewhere than on the CPU in its own precision.
    """
    target = choose_device(device)  # refuses a wrong one before anything is loaded
    path = local_model(path)
    model, processor = load_any(path, revision, pooling, preset, trust_remote_code)
    if isinstance(model, OnnxModel):
        if device is not None and target.type != "cpu":
            raise ValueError(f"{str(path)!r} is an ONNX export, which runs on the CPU, not on {device}")
        if dtype != "auto" and choose_dtype(dtype) is not None:
            raise ValueError(f"{str(path)!r} is an ONNX export, which computes in its own precision, not in {dtype}")
        target, dtype = torch.device("cpu"), None
    options = {name: value for name, value in (("pooling", pooling), ("preset", preset)) if value is not None}
    settings: dict[str, Any] = {"num_workers": num_workers, "input_type": input_type, "truncate_dim": truncate_dim}
    settings |= {"name": model_name(path), "load_options": options}
    return ItemEncoder(model, processor, batch_size, target, dtype, **settings)


def load_any(
    path: str | Path,
    revision: str | None = None,
    pooling: str | None = None,
    preset: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """Load any model and its processor, `model(**processor(items)).embeddings`; its files say how (`model_kind`).

    * A model of this package: with the installed classes, never with code from the folder; its ONNX export with
      onnxruntime.
    * A folder of sentence-transformers: around an MLLM as an MLLM retriever (`load_embedder`), else with the library.
    * Adapters of peft: on the model that they name, which is loaded likewise; they are merged.
    * An MLLM: as an MLLM retriever, with `preset` or `pooling`.
    * Another bare checkpoint: with sentence-transformers, two towers by their projections, another model by the
      pooled output that its class was trained with, or by `pooling`.

    Args:
        path: A local folder, the name of a repository on the Hub, or `"sample"`: two small towers from pip.
        revision: Branch, tag or commit of the repository.
        pooling: Of a bare checkpoint that does not say how it pools: `"mean"`, `"cls"` or `"last"`.
        preset: Load an MLLM as a published embedder, one of `conjoin.hub.embedder.presets()`.
        trust_remote_code: Run Python code from the folder where a model of another package needs it.

    Raises:
        FileNotFoundError: There is no such model.
        ImportError: The sample is needed and not installed.
        ValueError: The weights are damaged, the model is no encoder or does not say how it pools, it needs code that
            is not trusted, or an option does not belong to this kind of model.
    """
    path = local_model(path)
    kind = model_kind(path, revision)
    given = {name: value for name, value in (("pooling", pooling), ("preset", preset)) if value is not None}
    says_pooling = kind == "embedder" or preset is not None
    if given and (kind in ("own", "onnx", "sentence-transformers") or (pooling is not None and says_pooling)):
        raise ValueError(f"{given}: the model {str(path)!r} says itself how it is read and pools; leave it out")
    if kind == "own":
        return load_model(path, revision)
    if kind == "onnx":
        return load_onnx_model(path, revision)
    check_checksums(Path(path), REMEDY)
    if kind == "adapter":
        model, processor = load_any(adapter_base(path, revision), None, pooling, preset, trust_remote_code)
        with loading(path, revision):
            merge_adapter(model.body if isinstance(model, SentenceModel) else model, path, revision)
        return model, processor
    if preset is not None or kind == "embedder":
        with loading(path, revision), suppress(UnsupportedEmbedderError):  # sentence-transformers may support it
            return load_embedder(path, preset=preset, revision=revision)
    if kind in ("embedder", "sentence-transformers"):
        return load_sentence_model(path, trust_remote_code, revision)
    if kind == "mllm" and pooling in ("mean", "last"):
        with loading(path, revision):
            return from_mllm(path, revision=revision, readout=pooling)
    return load_tower(path, pooling, trust_remote_code, revision)
