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

from conjoin.processing.sentence_files import SENTENCE_FILES, SentenceFilesMixin, write_json_file
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
    with staged(folder, has_code=True) as staging:
        options: dict[str, Any] = {} if weights is None else {"state_dict": weights}
        model.save_pretrained(staging, **options)
        if processor is not None:
            if prompts is not None and isinstance(processor, SentenceFilesMixin):
                processor = copy.copy(processor)
                processor.prompts = prompts
            processor.save_pretrained(staging)
    return Path(folder)


@contextmanager
def staged(folder: str | Path, has_code: bool = False) -> Iterator[Path]:
    """Yield an empty folder; when the block ends, it becomes `folder`, or its files are moved to one that is there.

    Its settings lose the paths of this machine, and without code what names some. `SHA256SUMS` has all files but the
    code and the files at its top that sentence-transformers reads, which may be changed. If the block fails, `folder`
    stays as it was. A killed process may leave a folder `*.conjoin-tmp`.
    """
    folder = Path(folder)
    is_new = not folder.exists()
    make_folder(folder.parent if is_new else folder)
    with temporary_path(folder if is_new else folder / "export") as staging:
        staging.mkdir()
        yield staging
        for file in staging.rglob("*config.json"):
            settings = json.loads(file.read_text(encoding="utf-8"))
            kept = _without(settings, (*_LOCAL_PATH_KEYS, *(() if has_code else ("auto_map",))))
            if kept != settings:
                write_json_file(file, kept)
        files = [file.relative_to(staging).as_posix() for file in sorted(staging.rglob("*")) if file.is_file()]
        write_checksums(staging, [file for file in files if file not in SENTENCE_FILES and file[-3:] != ".py"])
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


def _without(value: Any, keys: tuple[str, ...]) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, dict):
        return {key: _without(part, keys) for key, part in value.items() if key not in keys}
    return [_without(part, keys) for part in value] if isinstance(value, list) else value
