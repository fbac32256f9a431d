"""Loading any model: what its folder holds decides how."""

import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from sentence_transformers import SentenceTransformer
from transformers import AutoConfig, AutoModel, PreTrainedModel, ProcessorMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from conjoin.hub.build import from_mllm, image_text_processor, score_fusion_model
from conjoin.hub.embedder import UnsupportedEmbedderError, load_embedder
from conjoin.hub.folder import MODELS, Kind, adapter_base, is_two_towers, loading, local_model, model_kind, model_type
from conjoin.hub.onnx_model import OnnxModel
from conjoin.hub.pruned_checkpoint import cut_checkpoint, load_whole
from conjoin.hub.sentence_model import SentenceModel, SentenceProcessor, load_sentence_model, load_tower
from conjoin.models.score_fusion import ScoreFusionModel
from conjoin.processing import ImageTextProcessor
from conjoin.processing.sentence_files import SentenceFilesMixin
from conjoin.storage import check_checksums, reading

WEIGHTS = ("dtype", "quantization_config")
"""Options of any library's weights."""
REMEDY = "save the model again, or remove SHA256SUMS if you changed the file yourself"
"""What to do about a file that differs from its checksum."""


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
    * Another bare checkpoint: with sentence-transformers, two towers by their projections, another model by `pooling`.

    Args:
        path: A local folder, the name of a repository on the Hub, or `"sample"`: two small towers from pip.
        revision: Branch, tag or commit of the repository.
        pooling: Of a bare checkpoint without projections: `"mean"`, `"cls"` or `"last"`.
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
    if kind == "onnx":
        return OnnxModel(path, revision), load_processor(path, revision)
    if kind == "adapter":
        check_checksums(Path(path), REMEDY)
        model, processor = load_any(adapter_base(path, revision), None, pooling, preset, trust_remote_code)
        merge_adapter(model.body if isinstance(model, SentenceModel) else model, path, revision)
        return model, processor
    if kind == "mllm" and pooling in ("mean", "last"):
        with loading(path, revision):
            return from_mllm(path, revision=revision, readout=pooling)
    saved = _load_saved(path, kind, preset, trust_remote_code, revision=revision)
    return saved or load_tower(path, pooling, trust_remote_code, revision)


def _load_saved(
    path: str | Path,
    kind: Kind,
    preset: str | None,
    trust_remote_code: bool = False,
    **options: Any,  # noqa: ANN401
) -> tuple[Any, Any] | None:
    """Load a model that says itself how it embeds; None for a bare checkpoint."""
    revision = options.get("revision")
    if kind == "own":
        return load_model(path, revision)
    check_checksums(Path(path), REMEDY)
    if kind == "embedder" or preset is not None:
        with loading(path, revision), suppress(UnsupportedEmbedderError):  # sentence-transformers may support it
            return load_embedder(path, preset=preset, **options)
    weights = {name: options[name] for name in WEIGHTS if name in options}
    is_library = kind in ("embedder", "sentence-transformers")
    return load_sentence_model(path, trust_remote_code, revision, **weights) if is_library else None


def load_model(path: str | Path, revision: str | None = None) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Load a saved model and its processor.

    A model of this package is built from the installed classes; Python files in its folder are never run. A published
    embedder around an MLLM is loaded as an MLLM retriever, see `load_embedder`. The files of a local folder are
    compared with its `SHA256SUMS`, if it has one.

    Args:
        path: A local folder or the name of a repository on the Hub.
        revision: Branch, tag or commit of the repository; a commit never changes.

    Returns:
        The model, in evaluation mode, and its processor.

    Raises:
        FileNotFoundError: There is no such model.
        ValueError: A file is damaged, the configuration does not fit the weights, the model is not one of this
            package, or it is an ONNX export.
    """
    path = local_model(path)
    kind = model_kind(path, revision)
    if kind == "onnx":
        raise ValueError(
            f"{str(path)!r} is an ONNX export, which `load_encoder` runs; here the model itself is needed"
        )
    check_checksums(Path(path), REMEDY)
    if kind == "embedder":
        with loading(path, revision):
            return load_embedder(path, revision=revision)
    processor = load_processor(path, revision)
    with loading(path, revision):
        model_class = MODELS[model_type(path, revision)][0]
        return load_whole(model_class, path, str(path), revision=revision or "main"), processor


def load_trainable(
    model: str | Path | PreTrainedModel,
    processor: Any = None,  # noqa: ANN401
    preset: str | None = None,
    limits: Mapping[str, Any] | None = None,
    **options: Any,  # noqa: ANN401
) -> tuple[Any, Any]:
    """Return a model to train and its processor: of this package, or around one of sentence-transformers.

    An image-text model without the files of sentence-transformers gets them: the state of the last token under its own
    chat template, in unit length.

    Args:
        model: As for `RetrievalTrainer`.
        processor: Of the model; CLIP's own is accepted. None loads that of the model's folder.
        preset: How an embedder embeds whose files do not say it; see `conjoin.hub.embedder.presets()`.
        limits: Arguments of `mllm_processor`, such as `max_pixels`.
        options: For a new model around a name: fields of its configuration, such as `keep_layers`; for one that this
            package has no class for, those of `load_tower`, such as `pooling`.

    Raises:
        FileNotFoundError: There is no such model.
        ValueError: It cannot be trained.
    """
    if isinstance(processor, ProcessorMixin) and not isinstance(processor, SentenceFilesMixin):  # CLIP's
        processor = ImageTextProcessor(processor.image_processor, processor.tokenizer)
    if isinstance(model, str | Path):
        model, own = _load_trainable(model, preset, limits, processor is None, **options)
        return model, processor or own
    if isinstance(model, SentenceTransformer | SentenceModel):
        held = model if isinstance(model, SentenceModel) else SentenceModel(model)
        return held, processor or SentenceProcessor(held.model)
    if isinstance(model, PeftModel):
        if model.active_peft_config.is_prompt_learning:
            raise ValueError(
                f"{model.active_peft_config.peft_type.value} of peft adds prompts; expected adapters (LoRA)"
            )
        model = model.get_base_model()  # with its adapters inside
    name = getattr(model, "name_or_path", "")
    if getattr(getattr(model, "config", None), "model_type", None) in MODELS:
        return model, processor or (load_processor(name) if name else None)
    model = score_fusion_model(model)
    if processor is None and not name:
        raise ValueError(f"{type(model.backbone).__name__} has no folder with a processor: pass processing_class")
    return model, processor or image_text_processor(name, name)


def _load_trainable(
    path: str | Path,
    preset: str | None,
    limits: Mapping[str, Any] | None,
    wants_processor: bool,
    **options: Any,  # noqa: ANN401
) -> tuple[Any, Any]:
    """Load what a folder or a repository holds, to train it."""
    name, revision = local_model(path), options.get("revision")
    kind = model_kind(name, revision)
    keep_layers, keep_last = options.get("keep_layers"), options.pop("keep_last", False)
    if kind in ("sentence-transformers", "tower") and keep_layers is not None:
        options = {name: value for name, value in options.items() if name not in ("keep_layers", "revision")}
        with cut_checkpoint(name, keep_layers, keep_last, revision) as folder:
            with reading(f"{str(path)!r} with {keep_layers} layers", "some weights may be for all layers", (OSError,)):
                model, processor = load_trainable(folder, **options)
        model.source, model.config._name_or_path = (path, revision), str(path)
        return model, processor
    read = {"revision", *(WEIGHTS if kind == "sentence-transformers" else ())}
    if kind in ("own", "sentence-transformers") and (unread := sorted({*options} - read)):
        raise ValueError(f"model_init_kwargs: {unread[0]!r} configures a new model, but {str(path)!r} is a saved one")
    if kind in ("onnx", "adapter"):
        expected = "the model itself" if kind == "onnx" else "adapters and their model as one (conjoin export)"
        raise ValueError(f"{str(path)!r} is an {kind} and cannot be trained; expected {expected}")
    reader = {"processor": dict(limits or {})} if kind == "embedder" or preset is not None else {}
    if (saved := _load_saved(name, kind, preset, False, **options, **reader)) is not None:
        return saved
    if kind == "mllm":
        return from_mllm(name, processor=limits, **options)
    with loading(name, revision):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False, revision=revision)
    if is_two_towers(config):
        model = score_fusion_model(name, **options)
        return model, image_text_processor(name, name) if wants_processor else None
    is_mllm = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return load_tower(name, **({"pooling": "last"} if is_mllm else {}) | options)


def load_processor(path: str | Path, revision: str | None = None) -> ProcessorMixin:
    """Load the processor of a saved model of this package; raises as `load_model`."""
    kind = model_type(path, revision)
    if kind not in MODELS:
        raise ValueError(f"{str(path)!r} is a {kind}; expected a model of this package, one of {[*MODELS]}")
    with loading(path, revision):
        return MODELS[kind][1].from_pretrained(path, trust_remote_code=False, revision=revision or "main")


def merge_adapter(model: Any, path: str | Path, revision: str | None = None) -> Any:  # noqa: ANN401 - a module
    """Merge adapters of peft into the model that they adapt, in place; return it.

    Raises:
        ValueError: They are damaged or do not fit.
    """
    where: dict[str, Any] = {} if revision is None else {"revision": revision}
    with loading(path, revision), warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        adapted: Any = PeftModel.from_pretrained(model, str(path), **where)
    return adapted.merge_and_unload()


def export_problem(model: Any) -> str | None:  # noqa: ANN401
    """Return why a folder that `AutoModel` loads could not hold a score fusion; None if it can."""
    held = getattr(model, "backbone", None)
    if not isinstance(model, ScoreFusionModel) or held is None:
        return None
    name = type(held).__name__
    if not isinstance(held, PreTrainedModel):
        return f"{name} has no configuration of transformers"
    with torch.device("meta"):
        plain = AutoModel.from_config(held.config)
    return None if type(plain) is type(held) else f"AutoModel would build a {type(plain).__name__}, not a {name}"
