"""One function that loads an encoder from any model: ours, sentence-transformers', stock, or an ONNX export."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from conjoin.constants import AUTO, SAMPLE_MODEL
from conjoin.devices import choose_bf16, choose_device
from conjoin.hub.embedder import UnsupportedEmbedderError
from conjoin.hub.load import REMEDY, has_file, is_embedder, is_own_model, load_model
from conjoin.hub.onnx_export import SETTINGS as ONNX_SETTINGS
from conjoin.retrieval.encoder import ItemEncoder, model_name
from conjoin.retrieval.onnx_encoder import OnnxEncoder, load_onnx_model
from conjoin.retrieval.options import ComputeOptions
from conjoin.retrieval.sentence_encoder import load_sentence_transformer
from conjoin.retrieval.stock_encoder import load_stock_model
from conjoin.storage import check_checksums


def load_encoder(path: str | Path, **options: Any) -> ItemEncoder:  # noqa: ANN401 - fields of ComputeOptions
    """Load any model as an encoder.

    `"sample"` is the towers of the embedded sample with nothing trained on top: words are compared with words, and
    pictures with pictures. Otherwise the folder decides how it is read. A `config.json` with a `model_type` of this
    package: with the installed classes, never with code from the folder; an ONNX export of such a model with
    onnxruntime, on the CPU. Else a `modules.json`: as an MLLM retriever if it is an embedder around an MLLM
    (`load_embedder`), else with sentence-transformers. Else as a stock transformers checkpoint: a text encoder, a
    vision transformer, or one with a tower for each.

    Args:
        path: A local folder, the name of a repository on the Hub, or `"sample"`.
        options: Fields of `ComputeOptions`: `batch_size`, `device`, `dtype`, `num_workers`, `input_type`, `dims`,
            `trust_remote_code`, `revision`.

    Raises:
        FileNotFoundError: There is no such model.
        ImportError: sentence-transformers, or the sample, is needed and not installed.
        ValueError: The weights are damaged, the model is no encoder, it needs code that is not trusted, or there is no
            such `device` or `input_type`; or an ONNX export is to run elsewhere than on the CPU in its own precision.
    """
    chosen = ComputeOptions(**options)
    batch_size, dtype, revision = chosen.batch_size, chosen.dtype, chosen.revision
    settings: dict[str, Any] = {"num_workers": chosen.num_workers, "name": model_name(path)}
    settings |= {"input_type": chosen.input_type, "dims": chosen.dims}
    device = choose_device(chosen.device)  # refuses a wrong one before anything is loaded
    if path != SAMPLE_MODEL and _is_onnx(path, revision):
        _check_onnx(path, chosen.device, None if dtype == AUTO else dtype)
        loaded: tuple[Any, Any] = load_onnx_model(path, revision)
        return OnnxEncoder(*loaded, batch_size, "cpu", **settings)
    model, processor = _load(path, chosen.trust_remote_code, revision)
    if isinstance(dtype, str):
        dtype = torch.bfloat16 if choose_bf16(dtype, device) else None
    return ItemEncoder(model, processor, batch_size, device, dtype, **settings)


def _is_onnx(path: str | Path, revision: str | None) -> bool:
    has_config = has_file(path, "config.json", revision)
    return has_config and is_own_model(path, revision) and has_file(path, ONNX_SETTINGS, revision)


def _check_onnx(path: str | Path, device: str | torch.device | None, dtype: torch.dtype | str | None) -> None:
    if device is not None and choose_device(device).type != "cpu":
        raise ValueError(f"{str(path)!r} is an ONNX export, which runs on the CPU, not on {device}")
    if dtype is not None:
        raise ValueError(f"{str(path)!r} is an ONNX export, which computes in its own precision, not in {dtype}")


def _load(path: str | Path, trust_remote_code: bool, revision: str | None) -> tuple[Any, Any]:
    if path == SAMPLE_MODEL:
        from conjoin.retrieval.sample_encoder import load_sample_towers

        return load_sample_towers()
    has_config = has_file(path, "config.json", revision)
    if has_config and is_own_model(path, revision):
        return load_model(path, revision=revision)
    check_checksums(Path(path), REMEDY)
    if has_config and is_embedder(path, revision):
        with suppress(UnsupportedEmbedderError):  # sentence-transformers may support it
            return load_model(path, verify=False, revision=revision)
    if has_file(path, "modules.json", revision):
        return load_sentence_transformer(path, trust_remote_code, revision)
    if Path(path).is_dir() and not has_config:
        raise FileNotFoundError(
            f"cannot load the model {str(path)!r}: it has neither a config.json nor a modules.json"
        )
    return load_stock_model(path, trust_remote_code, revision)
