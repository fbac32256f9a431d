"""One folder that `AutoModel` and `SentenceTransformer` both load, with or without this package installed."""

import copy
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, ProcessorMixin

from conjoin.processing.sentence_files import SENTENCE_FILES, SentenceFilesMixin
from conjoin.storage import flush, flush_tree, make_folder, publish_folder, temporary_path, write_checksums

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.onnx", "*.onnx.data", "*.onnx.json")
_SHARDS = "model-?????-of-?????.safetensors"
_EARLIER = ("model.safetensors", "model.safetensors.index.json", _SHARDS, "model_*.onnx", "model.onnx*")
"""The weights that an earlier model may have."""
_LOCAL_PATH_KEYS = ("_name_or_path", "name_or_path")


def export(
    model: PreTrainedModel,
    processor: ProcessorMixin | None,
    folder: str | Path,
    prompts: dict[str, str] | None = None,
    weights: dict[str, Tensor] | None = None,
) -> Path:
    """Save a model of this package as a self-contained checkpoint.

    The folder holds safetensors weights, the processor, the code of both (loaded with `trust_remote_code=True`), and
    the three files that make `SentenceTransformer(folder, trust_remote_code=True)` take text, images, pairs of both,
    lists that mix these, and lists of chat messages. `SHA256SUMS` holds the checksums of the weights and of the
    settings of model and processor; `load_model` compares them.

    All files are written to a temporary folder first and moved when they are complete, the weights last. A failure
    while writing leaves what was there before: an earlier model, or nothing. Other files in `folder` stay.

    Args:
        model: A model of `conjoin.models`.
        processor: Its processor; None leaves its files and those of sentence-transformers out.
        folder: Where to write.
        prompts: Named prompts for sentence-transformers, e.g. `{"query": "Find: "}`; those of the processor when None.
        weights: The weights, if the model does not hold them whole.
    """
    with staged(folder) as staging:
        options: dict[str, Any] = {} if weights is None else {"state_dict": weights}
        model.save_pretrained(staging, **options)
        if processor is not None:
            if prompts is not None and isinstance(processor, SentenceFilesMixin):
                processor = copy.copy(processor)
                processor.prompts = prompts
            processor.save_pretrained(staging)
            pin_image_processors(staging, processor)
        drop_local_paths(staging / "config.json")
        saved = {file.name for file in staging.iterdir() if file.is_file() and file.suffix != ".py"}
        write_checksums(staging, sorted(saved - {*SENTENCE_FILES}))
    return Path(folder)


@contextmanager
def staged(folder: str | Path) -> Iterator[Path]:
    """Yield an empty folder; when the block ends, it becomes `folder`, or its files are moved to one that is there.

    If the block fails, `folder` stays as it was. A killed process may leave a folder `*.conjoin-tmp`.
    """
    folder = Path(folder)
    is_new = not folder.exists()
    make_folder(folder.parent if is_new else folder)
    with temporary_path(folder if is_new else folder / "export") as staging:
        staging.mkdir()
        yield staging
        if is_new:
            publish_folder(staging, folder)
        else:
            flush_tree(staging)
            _move_files(staging, folder)


def _move_files(staging: Path, folder: Path) -> None:
    """Move the files of `staging` to `folder`. An earlier model's weights go first, the new weights come last.

    The folder is flushed after each step. So a process that is killed here, or a power loss, leaves a folder without
    weights, never the files of two models.
    """
    weights = sorted({file.name for pattern in _WEIGHTS for file in staging.glob(pattern)})
    others = sorted({file.name for file in staging.iterdir()} - set(weights))
    for file in [file for pattern in _EARLIER for file in folder.glob(pattern)]:
        file.unlink()
    flush(folder)
    for name in others:
        if (folder / name).is_dir():  # of chat templates
            shutil.rmtree(folder / name)
        os.replace(staging / name, folder / name)
    flush(folder)
    for name in weights:
        os.replace(staging / name, folder / name)
    flush(folder)


def pin_image_processors(folder: Path, *processors: Any) -> None:  # noqa: ANN401 - of any library
    """Name the class of the image processors in the files of a folder, which transformers cuts to that of a family.

    It would then take another class where torchvision is installed, whose pixels differ.

    Args:
        folder: Where processors were saved.
        processors: Image processors, or processors that have one.
    """
    used = {type(getattr(each, "image_processor", each)).__name__ for each in processors}
    for file in [*folder.rglob("preprocessor_config.json"), *folder.rglob("processor_config.json")]:
        settings = json.loads(file.read_text(encoding="utf-8"))
        for part in (settings, settings.get("image_processor")):
            if isinstance(part, dict) and f"{part.get('image_processor_type')}Pil" in used:
                part["image_processor_type"] += "Pil"
        file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def drop_local_paths(file: Path, *more: str) -> None:
    """Remove from a configuration where its parts were loaded from, and `more` keys."""
    config = _without(json.loads(file.read_text(encoding="utf-8")), (*_LOCAL_PATH_KEYS, *more))
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _without(value: Any, keys: tuple[str, ...]) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, dict):
        return {key: _without(part, keys) for key, part in value.items() if key not in keys}
    return [_without(part, keys) for part in value] if isinstance(value, list) else value
