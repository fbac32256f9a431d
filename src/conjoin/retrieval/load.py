"""One function that loads an encoder from any model: ours, sentence-transformers', stock, or an ONNX export."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from conjoin.constants import AUTO, SAMPLE_MODEL
from conjoin.devices import choose_bf16, choose_device
from conjoin.hub.embedder import UnsupportedEmbedderError, load_embedder
from conjoin.hub.load import REMEDY, has_file, is_embedder, is_own_model, load_model, loading
from conjoin.hub.onnx_export import SETTINGS as ONNX_SETTINGS
from conjoin.retrieval.encoder import ItemEncoder, model_name
from conjoin.retrieval.onnx_encoder import OnnxEncoder, load_onnx_model
from conjoin.retrieval.options import ComputeOptions
from conjoin.retrieval.sentence_encoder import SentenceEncoder, SentenceItems, load_sentence_transformer
from conjoin.retrieval.stock_encoder import load_stock_model
from conjoin.storage import check_checksums


def load_encoder(path: str | Path, **options: Any) -> ItemEncoder:  # noqa: ANN401 - fields of ComputeOptions
    """Load any model as an encoder.

    `"sample"` is the towers of the embedded sample with nothing trained on top: words are compared with words, and
    pictures with pictures. Otherwise the folder decides how it is read:

    * a `config.json` with a `model_type` of this package: with the installed classes, never with code from the folder;
      an ONNX export of such a model with onnxruntime, on the CPU;
    * an MLLM with a `modules.json`, or with `preset`: as an MLLM retriever (`load_embedder`);
    * any other `modules.json`: with sentence-transformers;
    * else as a bare checkpoint of transformers: two towers by their projections, another model by the pooled output
      that its class was trained with, or by `pooling`.

    Args:
        path: A local folder, the name of a repository on the Hub, or `"sample"`.
        options: Fields of `ComputeOptions`: `batch_size`, `device`, `dtype`, `num_workers`, `input_type`, `dims`,
            `pooling`, `preset`, `trust_remote_code`, `revision`.

    Raises:
        FileNotFoundError: There is no such model.
        ImportError: The sample is needed and not installed.
        ValueError: The weights are damaged, the model is no encoder or does not say how it pools, it needs code that
            is not trusted, or there is no such `device` or `input_type`; an option does not belong to this kind of
            model; or an ONNX export is to run elsewhere than on the CPU in its own precision.
    """
    chosen = ComputeOptions(**options)
    batch_size, dtype, revision = chosen.batch_size, chosen.dtype, chosen.revision
    given = {"pooling": chosen.pooling, "preset": chosen.preset}
    needed = {name: value for name, value in given.items() if value is not None}
    settings: dict[str, Any] = {"num_workers": chosen.num_workers, "name": model_name(path), "load_options": needed}
    settings |= {"input_type": chosen.input_type, "dims": chosen.dims}
    device = choose_device(chosen.device)  # refuses a wrong one before anything is loaded
    has_config, has_modules = (
        path != SAMPLE_MODEL and has_file(path, name, revision) for name in ("config.json", "modules.json")
    )
    if path != SAMPLE_MODEL and Path(path).is_dir() and not has_config and not has_modules:
        raise FileNotFoundError(
            f"cannot load the model {str(path)!r}: it has neither a config.json nor a modules.json"
        )
    is_own = has_config and is_own_model(path, revision)
    says_pooling = has_modules or chosen.preset is not None
    if needed and (is_own or path == SAMPLE_MODEL or (chosen.pooling is not None and says_pooling)):
        raise ValueError(f"{needed}: the model {str(path)!r} says itself how it is read and pools; leave it out")
    if is_own and has_file(path, ONNX_SETTINGS, revision):
        if chosen.device is not None and device.type != "cpu":
            raise ValueError(f"{str(path)!r} is an ONNX export, which runs on the CPU, not on {chosen.device}")
        if dtype not in (None, AUTO):
            raise ValueError(f"{str(path)!r} is an ONNX export, which computes in its own precision, not in {dtype}")
        loaded: tuple[Any, Any] = load_onnx_model(path, revision)
        return OnnxEncoder(*loaded, batch_size, "cpu", **settings)
    model, processor = _load(path, chosen, is_own, has_modules, has_config)
    if isinstance(dtype, str):
        dtype = torch.bfloat16 if choose_bf16(dtype, device) else None
    kind = SentenceEncoder if isinstance(processor, SentenceItems) else ItemEncoder
    return kind(model, processor, batch_size, device, dtype, **settings)


def _load(
    path: str | Path, options: ComputeOptions, is_own: bool, has_modules: bool, has_config: bool
) -> tuple[Any, Any]:
    """The model and what turns items into its inputs."""
    revision, trusted = options.revision, options.trust_remote_code
    if path == SAMPLE_MODEL:
        from conjoin.retrieval.sample_encoder import load_sample_towers

        return load_sample_towers()
    if is_own:
        return load_model(path, revision=revision)
    check_checksums(Path(path), REMEDY)
    if options.preset is not None:
        with loading(path, revision):
            return load_embedder(path, preset=options.preset, revision=revision)
    if has_config and is_embedder(path, revision):
        with suppress(UnsupportedEmbedderError):  # sentence-transformers may support it
            return load_model(path, verify=False, revision=revision)
    if has_modules:
        return load_sentence_transformer(path, trusted, revision)
    return load_stock_model(path, options.pooling, trusted, revision)
