"""Published embedders around an MLLM, such as Qwen3-VL-Embedding: what their own files say, and presets for others."""

import json
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from transformers import AutoImageProcessor, ProcessorMixin

from conjoin.hub.build import from_mllm
from conjoin.hub.pruned_checkpoint import fetch_small_files
from conjoin.hub.stock import module_files
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.processing import MllmRetrieverProcessor
from conjoin.processing.sentence_files import MODULES, SETTINGS, TRANSFORMER, sentence_settings
from conjoin.storage import read_json, reading

_DEFAULT = "Represent the user's input."
_READOUTS = {"lasttoken": "last", "mean": "mean"}
"""Readouts of the retriever, by the name of the pooling in sentence-transformers."""
_PUBLISHED_PIXELS = 1280 * 32 * 32
"""The most pixels of a picture in the files of Qwen3-VL-Embedding; its publisher's code takes more."""
_APPLIED = (
    "transformer_task", "modality_config", "module_output_name", "processing_kwargs", "max_seq_length", "unpad_inputs",
)  # fmt: skip
"""Settings of sentence-transformers' first module that are applied, or that change no vector."""


class UnsupportedEmbedderError(ValueError):
    """An embedder does what the MLLM retriever cannot; sentence-transformers still runs it."""


class EmbedderFiles(NamedTuple):
    """What the files of an embedder say beside its weights.

    Args:
        sentence_files: The content of the files of sentence-transformers, by path.
        chat_template: Its chat template.
        config: Fields of `MllmRetrieverConfig`.
        processor: Arguments of `mllm_processor`.
    """

    sentence_files: dict[str, Any]
    chat_template: str
    config: dict[str, Any]
    processor: dict[str, Any]


def _preset(name: str, processor: dict[str, Any], **config: str) -> EmbedderFiles:
    """Return what an embedder would say that reads the last token."""
    files = module_files() | {SETTINGS: sentence_settings() | {"prompts": {}}}
    parts = [Path(__file__).with_name(f"{part}.jinja") for part in ("images_then_texts", name)]
    template = "".join(part.read_text(encoding="utf-8") for part in parts)
    if "punctuation" in template:  # Jinja cannot ask Unicode for it. No plane after the second has any.
        marks = "".join(c for c in map(chr, range(0x20000)) if unicodedata.category(c).startswith("P"))
        template = f"{{%- set punctuation = {json.dumps(marks, ensure_ascii=False)} -%}}\n{template}"
    return EmbedderFiles(files, template, {"readout": "last"} | config, processor)


@cache
def presets() -> dict[str, EmbedderFiles]:
    """What the code of a publisher does whose files do not say it, by name; its prompt is in the template so named."""
    qwen3 = {"min_pixels": 4 * 32 * 32, "max_pixels": 1800 * 32 * 32, "max_length": 8192}
    gme = {"min_pixels": 256 * 28 * 28, "max_pixels": 1280 * 28 * 28, "max_length": 1800, "resize_first": True}
    vlm2vec = {"min_pixels": 4 * 28 * 28, "max_pixels": 1280 * 28 * 28}
    return {
        "qwen3_vl_embedding": _preset("qwen3_vl_embedding", qwen3),
        # positions count tokens: the language model gets embeddings without ids
        "gme_qwen2_vl": _preset("gme_qwen2_vl", gme, position_mode="1d"),
        # positions count tokens: no token marks an image's start
        "vlm2vec": _preset("vlm2vec", vlm2vec, position_mode="1d"),
    }


def load_embedder(
    checkpoint: str | Path,
    keep_layers: int | None = None,
    *,
    preset: str | None = None,
    revision: str | None = None,
    processor: dict[str, Any] | None = None,
    **config: Any,  # noqa: ANN401 - fields of MllmRetrieverConfig
) -> tuple[MllmRetrieverModel, MllmRetrieverProcessor]:
    """Load a published embedder as an MLLM retriever with its own template, prompts, pooling and sizes.

    All of it is read from the files of the checkpoint: `modules.json` and the modules that it names,
    `sentence_bert_config.json`, `config_sentence_transformers.json`, the chat template and the image processor. The
    embeddings equal those of sentence-transformers on the same folder, but for Qwen3-VL-Embedding, whose folder embeds
    as its preset, which is its publisher's own code. `export_stock` writes them back as such a folder.

    Args:
        checkpoint: A folder or the name of a repository on the Hub.
        keep_layers: Number of layers of the language model to keep; all when None.
        preset: For a checkpoint whose files do not say how it embeds, one of `presets()`; it replaces what they say.
        revision: Branch, tag or commit on the Hub.
        processor: Arguments of `mllm_processor`, such as `max_pixels`.
        config: Other fields of `MllmRetrieverConfig`.

    Raises:
        FileNotFoundError: A required file is missing.
        UnsupportedEmbedderError: The embedder does what the MLLM retriever cannot.
        ValueError: There is no such preset.
    """
    if preset is not None and preset not in presets():
        raise ValueError(f"preset={preset!r}; expected one of {sorted(presets())}")
    files = read_embedder(checkpoint, revision) if preset is None else presets()[preset]
    given = {name: value for name, value in (processor or {}).items() if value is not None}
    reader = files.processor | given | {"chat_template": files.chat_template, "sentence_files": files.sentence_files}
    settings = {"ret_token_id": None} | files.config | config
    return from_mllm(checkpoint, keep_layers, revision=revision, processor=reader, **settings)


def read_embedder(checkpoint: str | Path, revision: str | None = None) -> EmbedderFiles:
    """Read how a folder of sentence-transformers embeds.

    Raises:
        FileNotFoundError: A file that `modules.json` names is missing, or there is no chat template.
        UnsupportedEmbedderError: The MLLM retriever does not have its modules, pooling or form of messages.
    """
    from sentence_transformers.sentence_transformer.modules import Pooling

    folder = fetch_small_files(str(checkpoint), revision)
    files: dict[str, Any] = {name: read_json(folder / name) for name in (MODULES, TRANSFORMER)}
    files[SETTINGS] = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else sentence_settings()
    unread, pooling, cut = [*_unread(folder, files)], "", files[SETTINGS].get("truncate_dim")
    for module in files[MODULES]:
        kind, path = module["type"].rpartition(".")[2], str(module["path"])
        if kind == "Pooling":
            files[f"{path}/config.json"] = read_json(folder / path / "config.json")
            pooling = Pooling.load(str(folder / path)).pooling_mode
        elif kind == "Dense":
            cut = _cut(folder / path)
            unread += [] if cut else ["a linear module that does more than to cut the vector"]
        elif kind not in ("Transformer", "Normalize"):
            unread.append(f"the module {module['type']!r}")
    if pooling not in _READOUTS:
        unread.append(f"the pooling {pooling!r}")
    if unread:
        raise UnsupportedEmbedderError(f"{str(checkpoint)!r} has {', '.join(unread)}, which the MLLM retriever lacks")
    written = ProcessorMixin.get_processor_dict(folder)[0].get("chat_template")
    template = written or read_json(folder / "tokenizer_config.json").get("chat_template")
    if not template:
        raise FileNotFoundError(f"{str(checkpoint)!r} has no chat template")
    config = {"readout": _READOUTS[pooling], "embedding_dim": cut}
    found = EmbedderFiles(files, template, config, {"max_length": files[TRANSFORMER].get("max_seq_length")})
    is_published = _DEFAULT in template and "seen.instruction" not in template  # nor saved by this package
    return _as_its_code(found, folder) if is_published else found


def _unread(folder: Path, files: dict[str, Any]) -> Iterator[str]:
    """What changes the vectors of an embedder and would not be applied."""
    message = files[TRANSFORMER].get("modality_config", {}).get("message")
    if message is None or message.get("format", "structured") != "structured":
        yield "no structured messages"
    if (folder / "adapter_config.json").is_file():
        yield "an adapter beside its weights (adapter_config.json)"
    if files[SETTINGS].get("similarity_fn_name") not in (None, "cosine"):
        yield f"the similarity {files[SETTINGS]['similarity_fn_name']!r}"
    yield from (f"{name}={value!r}" for name, value in files[TRANSFORMER].items() if name not in _APPLIED and value)
    path = folder / "preprocessor_config.json"
    known = read_json(path) if path.is_file() else {}
    for name, values in files[TRANSFORMER].get("processing_kwargs", {}).items():
        repeats = name == "image" and all(key in known and known[key] == value for key, value in values.items())
        if name != "chat_template" and not repeats:
            yield f"processing_kwargs of {name!r}"


def _as_its_code(files: EmbedderFiles, folder: Path) -> EmbedderFiles:
    """Return how Qwen3-VL-Embedding is read: as by its publisher's code, in the limits with which it was trained."""
    if read_json(folder / "config.json")["model_type"] != "qwen3_vl":
        return files
    _, template, _, limits = presets()["qwen3_vl_embedding"]
    limits = limits | {name: value for name, value in files.processor.items() if value is not None}
    size = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False).size
    if size["longest_edge"] != _PUBLISHED_PIXELS:
        limits |= {"min_pixels": None, "max_pixels": None}
    return files._replace(chat_template=template, processor=limits)


def _cut(folder: Path) -> int | None:
    """How many components a linear module keeps; None if it does more than to keep the first ones."""
    config = read_json(folder / "config.json")
    with reading(folder / "model.safetensors"):
        weights = load_file(folder / "model.safetensors") if (folder / "model.safetensors").is_file() else {}
    size = (config["out_features"], config["in_features"])
    is_plain = config.get("activation_function", "").endswith("Identity") and set(weights) == {"linear.weight"}
    return size[0] if is_plain and torch.equal(weights["linear.weight"].float(), torch.eye(*size)) else None
