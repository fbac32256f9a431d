"""One folder that `AutoModel` and `SentenceTransformer` both load, with or without this package installed."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, ProcessorMixin

from conjoin.storage import flush, write_checksums

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_LOCAL_PATH_KEYS = ("_name_or_path", "name_or_path")


def export(
    model: PreTrainedModel, processor: ProcessorMixin | None, folder: str | Path, prompts: dict[str, str] | None = None
) -> Path:
    """Save a model of this package as a self-contained checkpoint.

    The folder holds safetensors weights, the processor, the code of both (loaded with `trust_remote_code=True`), and
    the three files that make `SentenceTransformer(folder, trust_remote_code=True)` take text, images, pairs of both,
    lists that mix these, and lists of chat messages. `SHA256SUMS` holds the checksums of the weights and of the
    settings of model and processor; `load_model` compares them.

    All files are written to a temporary folder inside `folder` first and moved when they are complete, the weights
    last. A failure while writing leaves the model that was there before. Other files in `folder` stay.

    Args:
        model: A model of `conjoin.models`.
        processor: Its processor; None leaves the processor's files out.
        folder: Where to write.
        prompts: Named prompts for sentence-transformers, e.g. `{"query": "Find: "}`.

    Raises:
        ValueError: The model's class is not registered for the auto classes, so its code would be lost.
    """
    parts: list[PreTrainedModel | ProcessorMixin] = [model] if processor is None else [model, processor]
    for part in parts:
        if part._auto_class is None:
            raise ValueError(f"{type(part).__name__} is not registered for auto classes; its code cannot be exported")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".export-", dir=folder))
    try:
        for part in parts:
            part.save_pretrained(staging)
        _drop_local_paths(staging / "config.json")
        saved = sorted(file.name for file in staging.iterdir() if file.is_file() and file.suffix != ".py")
        write_checksums(staging, saved)
        add_sentence_transformers_files(staging, prompts)
        for file in staging.rglob("*"):
            flush(file)
        _move_files(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def add_sentence_transformers_files(folder: str | Path, prompts: dict[str, str] | None = None) -> None:
    """Write what sentence-transformers reads; the vectors it returns are the model's own `embeddings`."""
    embed = {"method": "forward", "method_output_name": "embeddings"}
    files: dict[str, Any] = {
        "modules.json": [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}],
        "sentence_bert_config.json": {
            "transformer_task": "feature-extraction",
            "modality_config": {name: embed for name in ("text", "image")}
            | {"message": embed | {"format": "structured"}},
            "module_output_name": "sentence_embedding",
        },
        "config_sentence_transformers.json": {
            "prompts": prompts or {},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }
    for name, content in files.items():
        (Path(folder) / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _move_files(staging: Path, folder: Path) -> None:
    """Move the files of `staging` to `folder`. An earlier model's weights go first, the new weights come last.

    So a process that is killed here leaves a folder without weights, never the files of two models.
    """
    weights = sorted({file.name for pattern in _WEIGHTS for file in staging.glob(pattern)})
    others = sorted({file.name for file in staging.iterdir()} - set(weights))
    for file in [file for pattern in _WEIGHTS for file in folder.glob(f"model{pattern}")]:
        file.unlink()
    for name in others:
        if (folder / name).is_dir():  # of chat templates
            shutil.rmtree(folder / name)
        os.replace(staging / name, folder / name)
    for name in weights:
        os.replace(staging / name, folder / name)


def _drop_local_paths(file: Path) -> None:
    """Remove from a configuration where its parts were loaded from."""
    config = _without(json.loads(file.read_text(encoding="utf-8")), _LOCAL_PATH_KEYS)
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _without(value: Any, keys: tuple[str, ...]) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, dict):
        return {key: _without(part, keys) for key, part in value.items() if key not in keys}
    return [_without(part, keys) for part in value] if isinstance(value, list) else value
