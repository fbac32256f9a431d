"""Partial loading of a checkpoint: only the kept layers, and the files that hold them, are read."""

import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig

from conjoin.models.mllm_retriever.configuration_mllm_retriever import cut_layers
from conjoin.storage import read_json, reading

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SMALL_FILES = ["*.json", "*.txt", "*.jinja", "tokenizer.model", "[0-9]_*/*.safetensors"]

_LAYER = re.compile(r"^(?!.*(?:vision|visual|image|audio|sampler|qformer|connector|projector|mtp))"
                    r"((?:\w+\.)*?layers?\.)(\d+)\.")  # fmt: skip
"""The layers of a language model, under any names of the models around it."""
_OF_ALL_LAYERS = {"per_layer_model_projection.weight": 0, "embed_tokens_per_layer.weight": 1}
"""Weights of Gemma's inputs for each layer, and the dimension in which the layers follow each other."""
_HEAD = re.compile(r"^(?:model\.|language_model\.)*lm_head\.")


def fetch_small_files(checkpoint: str, revision: str | None = None) -> Path:
    """Return the folder of a checkpoint; for one on the Hub, download everything but its own weights.

    Raises:
        FileNotFoundError: There is no such folder, and the Hub download fails.
    """
    if Path(checkpoint).is_dir():
        return Path(checkpoint)
    try:
        return Path(snapshot_download(checkpoint, revision=revision, allow_patterns=SMALL_FILES))
    except (OSError, ValueError) as error:  # absent, unreachable or an invalid Hub name
        raise FileNotFoundError(f"there is no folder {checkpoint!r}, and the Hub download failed: {error}") from error


def find_shards(
    checkpoint: str, keep: Callable[[str], bool], revision: str | None = None
) -> tuple[Path, dict[str, list[str] | None]]:
    """Return the folder of a checkpoint and the files of its weights that are needed, which are downloaded.

    Args:
        checkpoint: A folder or the name of a repository on the Hub, with safetensors weights.
        keep: Whether a tensor of a name is needed.
        revision: Branch, tag or commit on the Hub.

    Returns:
        The folder, and the names of the needed tensors by file; None where they are not known before it is opened.

    Raises:
        FileNotFoundError: There are no safetensors weights, or a file is missing.
    """
    folder = fetch_small_files(checkpoint, revision)
    shards: dict[str, list[str] | None] = {SINGLE: None}
    if (folder / INDEX).is_file():
        shards = {}
        for name, shard in read_json(folder / INDEX)["weight_map"].items():
            if keep(name):
                shards.setdefault(shard, []).append(name)  # type: ignore[union-attr]
    if not Path(checkpoint).is_dir():
        folder = Path(snapshot_download(checkpoint, revision=revision, allow_patterns=list(shards)))
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        raise FileNotFoundError(f"{checkpoint!r} lacks {', '.join(absent)}, which holds required weights")
    return folder, shards


@contextmanager
def cut_checkpoint(
    checkpoint: str | Path, keep_layers: int | None = None, keep_last: bool = False, revision: str | None = None
) -> Iterator[Path]:
    """Yield a temporary folder with a checkpoint of fewer layers, which loads as the whole one does.

    Its weights are links; only where layers get other numbers, or a weight is for all layers, are they copies. Shards
    of other layers or of the head alone are neither downloaded nor opened. The final norm stays.

    Args:
        checkpoint: A folder or the name of a repository on the Hub, with safetensors weights.
        keep_layers: Number of layers of the language model; all when None.
        keep_last: Keep the first `keep_layers - 1` and the last one, in place of the first `keep_layers`.
        revision: Branch, tag or commit on the Hub.

    Raises:
        FileNotFoundError: There is no such checkpoint, or a shard is missing.
        ValueError: It has fewer layers, or none by the names of its weights; image features enter deeper layers; or a
            shard is damaged.
    """
    source = fetch_small_files(str(checkpoint), revision)
    whole = AutoConfig.from_pretrained(source, trust_remote_code=False)
    config, kept = cut_layers(whole, keep_layers, keep_last)
    depth = whole.get_text_config().num_hidden_layers
    folder, shards = find_shards(str(checkpoint), lambda name: new_name(name, kept) is not None, revision)
    with tempfile.TemporaryDirectory() as work:
        names: dict[str, str] = {}
        for number, shard in enumerate(shards):
            with reading(folder / shard):
                opened = safe_open(str(folder / shard), framework="pt")
            with opened:
                moved = {name: new for name in opened.keys() if (new := new_name(name, kept)) is not None}
                names |= dict.fromkeys(moved.values(), link := f"part-{number}.safetensors")
                is_same = all(
                    name == new and not any(word in name for word in _OF_ALL_LAYERS) for name, new in moved.items()
                )
                if is_same or len(kept) == depth:
                    Path(work, link).symlink_to((folder / shard).resolve())
                else:
                    tensors = {new: _cut(opened.get_tensor(name), name, depth, kept) for name, new in moved.items()}
                    save_file(tensors, Path(work, link))
        found = {int(layer[2]) for name in names if (layer := _LAYER.match(name))}
        if found != {*range(len(kept))}:
            kind = config.model_type
            raise ValueError(f"a {kind!r} has no weights named as {depth} layers; found {sorted(found)}")
        Path(work, INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}), encoding="utf-8")
        replaced = {*folder.glob("*.safetensors"), folder / INDEX, *folder.glob("SHA256SUMS"), folder / "config.json"}
        for file in sorted(folder.rglob("*")):
            if file.is_file() and file not in replaced:
                place = Path(work, file.relative_to(folder))
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(file.resolve())
        config.save_pretrained(work)
        reports = logging.getLogger("transformers.modeling_utils")
        reports.addFilter(_tells_more_than_the_cut)
        try:
            yield Path(work)
        finally:
            reports.removeFilter(_tells_more_than_the_cut)


def load_whole(model_class: Any, path: str | Path, name: str, **options: Any) -> Any:  # noqa: ANN401
    """Load a model by a class of transformers, all of whose weights must be in its folder.

    Args:
        model_class: The class, or `AutoModel`.
        path: A local folder or the name of a repository on the Hub.
        name: What the message calls it.
        options: Of `from_pretrained`.

    Raises:
        ValueError: Weights are missing or of another shape.
    """
    checked = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, report = model_class.from_pretrained(path, **checked, **options)
    wrong = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if wrong:
        lacks = f"{len(wrong)} weights are missing or of another shape, {wrong[:3]} ..."
        raise ValueError(f"the config.json of {name!r} does not fit its weights: {lacks}")
    return model


def _tells_more_than_the_cut(record: logging.LogRecord) -> bool:
    """Whether a report on loading names more than the weights of the other layers in the same shards."""
    text = record.getMessage()
    return "LOAD REPORT" not in text or any(status in text for status in ("MISSING", "MISMATCH", "CONVERSION"))


def new_name(name: str, kept: Sequence[int]) -> str | None:
    """The name of a tensor among the kept layers; None for one of another layer or of the head."""
    layer = _LAYER.match(name)
    if layer is None:
        return None if _HEAD.match(name) else name
    number = int(layer[2])
    return f"{layer[1]}{kept.index(number)}.{name[layer.end() :]}" if number in kept else None


def _cut(tensor: torch.Tensor, name: str, depth: int, kept: Sequence[int]) -> torch.Tensor:
    """Cut a weight that has rows, or columns, for all layers; others stay."""
    place = next((place for word, place in _OF_ALL_LAYERS.items() if word in name), None)
    if place is None:
        return tensor
    split = tensor.unflatten(place, (depth, -1)).index_select(place, torch.tensor(kept))
    return split.flatten(place, place + 1).contiguous()
