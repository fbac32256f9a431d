"""Partial loading of a checkpoint: only the kept layers, and the files that hold them, are read."""

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from conjoin.storage import read_json, reading

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SMALL_FILES = ["*.json", "*.txt", "*.jinja", "tokenizer.model"]

_LAYER = re.compile(r"^(?!.*(?:vision|visual|image|audio|sampler|qformer|connector|projector|mtp))"
                    r"((?:\w+\.)*?layers?\.)(\d+)\.")  # fmt: skip
"""The layers of a language model, under any names of the models around it."""
_OF_ALL_LAYERS = {"per_layer_model_projection.weight": 0, "embed_tokens_per_layer.weight": 1}
"""Weights of Gemma's inputs for each layer, and the dimension in which the layers follow each other."""
_HEAD = re.compile(r"^(?:model\.|language_model\.)*lm_head\.")


def fetch_small_files(checkpoint: str, revision: str | None = None) -> Path:
    """Return the folder of a checkpoint; for one on the Hub, download everything except the weights.

    Raises:
        FileNotFoundError: There is no such folder, and the Hub download fails.
    """
    if Path(checkpoint).is_dir():
        return Path(checkpoint)
    try:
        return Path(snapshot_download(checkpoint, revision=revision, allow_patterns=SMALL_FILES))
    except (OSError, ValueError) as error:  # absent, unreachable or an invalid Hub name
        raise FileNotFoundError(f"there is no folder {checkpoint!r}, and the Hub download failed: {error}") from error


def load_pruned_backbone(
    checkpoint: str,
    config: PreTrainedConfig,
    dtype: torch.dtype | str,
    revision: str | None = None,
    quantization_config: Any = None,  # noqa: ANN401
) -> PreTrainedModel:
    """Load the backbone that `config` describes from a deeper checkpoint.

    Args:
        checkpoint: A folder or the name of a repository on the Hub, with safetensors weights.
        config: The backbone's configuration, with the language model already pruned.
        dtype: Dtype of the weights.
        revision: Branch, tag or commit on the Hub.
        quantization_config: Of transformers, how to store the weights.

    Raises:
        FileNotFoundError: There are no safetensors weights, or a required shard is missing.
        ValueError: The checkpoint lacks weights of the backbone or has other sizes, so it belongs to another model; or
            a shard is damaged.
    """
    keep = partial(_is_kept, depth=config.get_text_config().num_hidden_layers)
    folder, shards = find_shards(checkpoint, keep, revision)
    model_class: Any = AutoModel._model_mapping[type(config)]
    with ExitStack() as files:
        tensors = {}
        for shard, names in shards.items():
            with reading(folder / shard):
                file = files.enter_context(safe_open(str(folder / shard), framework="pt"))
                for name in names if names is not None else file.keys():
                    if keep(name):
                        tensors[name] = file.get_slice(name)  # read when copied into the model
        settings: dict[str, Any] = {"dtype": dtype, "quantization_config": quantization_config}
        settings |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # checked below
        model, report = model_class.from_pretrained(None, config=config, state_dict=tensors, **settings)
    wrong = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if wrong:
        raise ValueError(
            f"{checkpoint!r} is not a checkpoint of {config.model_type!r} with these sizes: "
            f"{len(wrong)} weights are missing or of another shape, {wrong[:3]} ..."
        )
    return model


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


def _is_kept(name: str, depth: int) -> bool:
    """Whether a checkpoint's tensor belongs to the first `depth` layers, or to no layer and not to the head."""
    layer = _LAYER.match(name)
    return int(layer[2]) < depth if layer else not _HEAD.match(name)


@contextmanager
def cut_checkpoint(
    checkpoint: str | Path, keep_layers: int, keep_last: bool = False, revision: str | None = None
) -> Iterator[Path]:
    """Yield a temporary folder with a checkpoint of fewer layers, which loads as the whole one does.

    Its weights are links, copies with `keep_last`. Shards of deeper layers alone are neither downloaded nor opened.
    The final norm stays.

    Args:
        checkpoint: A folder or the name of a repository on the Hub, with safetensors weights.
        keep_layers: Number of layers of the language model.
        keep_last: Keep the first `keep_layers - 1` and the last one, in place of the first `keep_layers`.
        revision: Branch, tag or commit on the Hub.

    Raises:
        FileNotFoundError: There is no such checkpoint, or a shard is missing.
        ValueError: It has fewer layers, or none by the names of its weights; or image features enter deeper layers.
    """
    source = fetch_small_files(str(checkpoint), revision)
    config: Any = AutoConfig.from_pretrained(source, trust_remote_code=False)
    depth, kind = config.get_text_config().num_hidden_layers, config.model_type
    least = len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or [0])
    if not least <= keep_layers <= depth:
        raise ValueError(f"keep_layers={keep_layers} of a {kind!r}; expected {least} to {depth}: it has {depth} layers"
                         + (f", and image features enter the first {least}" if least > 1 else ""))  # fmt: skip
    kept = [*range(keep_layers - 1), depth - 1 if keep_last else keep_layers - 1]
    needed = partial(_is_kept, depth=depth if keep_last else keep_layers)
    folder, shards = find_shards(str(checkpoint), needed, revision)
    with tempfile.TemporaryDirectory() as work, ExitStack() as files:
        names: dict[str, str] = {}
        for number, shard in enumerate(shards):
            with reading(folder / shard):
                opened = files.enter_context(safe_open(str(folder / shard), framework="pt"))
            moved = {}  # the new name of each kept tensor
            for name in opened.keys():
                layer = _LAYER.match(name)
                if layer is None:
                    moved[name] = name
                elif int(layer[2]) in kept:
                    moved[name] = f"{layer[1]}{kept.index(int(layer[2]))}.{name[layer.end() :]}"
            link = f"part-{number}.safetensors"
            names |= dict.fromkeys(moved.values(), link)
            if moved and (keep_last or any(word in name for name in moved for word in _OF_ALL_LAYERS)):
                tensors = {
                    new: _rows_of_layers(opened.get_tensor(name), new, depth, kept) for name, new in moved.items()
                }
                save_file(tensors, Path(work, link))
            elif moved:
                Path(work, link).symlink_to((folder / shard).resolve())
        found = {int(layer[2]) for name in names if (layer := _LAYER.match(name))}
        if found != {*range(keep_layers)}:
            raise ValueError(f"a {kind!r} has no weights named as {depth} layers; found {sorted(found)}")
        Path(work, INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}), encoding="utf-8")
        weights = {*folder.glob("*.safetensors"), folder / INDEX, *folder.glob("SHA256SUMS")}
        for file in [file for file in sorted({*source.rglob("*"), *folder.rglob("*")} - weights) if file.is_file()]:
            place = Path(work, file.relative_to(source if file.is_relative_to(source) else folder))
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.exists():
                place.symlink_to(file.resolve())
        settings = read_json(source / "config.json")
        _cut_settings(settings.get("text_config", settings), depth, kept)
        Path(work, "config.json").unlink()
        Path(work, "config.json").write_text(json.dumps(settings), encoding="utf-8")
        yield Path(work)


def _rows_of_layers(tensor: torch.Tensor, name: str, depth: int, kept: Sequence[int]) -> torch.Tensor:
    """Cut a weight that has rows, or columns, for all layers; others stay."""
    place = next((place for word, place in _OF_ALL_LAYERS.items() if word in name), None)
    if place is None:
        return tensor
    return (
        tensor.unflatten(place, (depth, -1))
        .index_select(place, torch.tensor(kept))
        .flatten(place, place + 1)
        .contiguous()
    )


def _cut_settings(settings: dict[str, Any], depth: int, kept: Sequence[int]) -> None:
    """Cut the settings of a language model to its kept layers, in place: numbers, lists and entries by layer."""
    for name, value in settings.items():
        if name.endswith("_layers") and isinstance(value, list) and len(value) != depth:  # which layers do something
            settings[name] = [kept.index(layer) for layer in value if layer in kept]
        elif isinstance(value, list) and len(value) == depth:
            settings[name] = [value[layer] for layer in kept]
        elif name == "per_layer_config" and value:
            settings[name] = {str(kept.index(int(key))): part for key, part in value.items() if int(key) in kept}
    shared = settings.get("num_kv_shared_layers") or 0  # the last ones, which use keys of layers before them
    if shared:
        settings["num_kv_shared_layers"] = sum(layer >= depth - shared for layer in kept)
    settings["num_hidden_layers"] = len(kept)


__all__ = ["cut_checkpoint", "fetch_small_files", "find_shards", "load_pruned_backbone"]
