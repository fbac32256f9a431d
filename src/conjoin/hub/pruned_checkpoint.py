"""Partial loading of an MLLM checkpoint: only the kept tensors and the files that hold them are read."""

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SMALL_FILES = ["*.json", "*.txt", "*.jinja", "tokenizer.model"]

_LANGUAGE = r"^(?:model\.|language_model\.)*"  # any nesting; vision towers have other names
_LAYER = re.compile(_LANGUAGE + r"layers\.(\d+)\.")
_HEAD = re.compile(_LANGUAGE + r"lm_head\.")


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
    checkpoint: str, config: PreTrainedConfig, dtype: torch.dtype | str, revision: str | None = None
) -> PreTrainedModel:
    """Load the backbone that `config` describes from a deeper checkpoint.

    Args:
        checkpoint: A folder or the name of a repository on the Hub, with safetensors weights.
        config: The backbone's configuration, with the language model already pruned.
        dtype: Dtype of the weights.
        revision: Branch, tag or commit on the Hub.

    Raises:
        FileNotFoundError: There are no safetensors weights, or a required shard is missing.
        ValueError: The checkpoint lacks weights of the backbone or has other sizes, so it belongs to another model; or
            a shard is damaged.
    """
    folder, shards = _find_shards(checkpoint, config.get_text_config().num_hidden_layers, revision)
    model_class: Any = AutoModel._model_mapping[type(config)]
    with ExitStack() as files:
        tensors = {}
        for shard, names in shards.items():
            try:
                file = files.enter_context(safe_open(str(folder / shard), framework="pt"))
                for name in names if names is not None else file.keys():
                    if _is_kept(name, config.get_text_config().num_hidden_layers):
                        tensors[name] = file.get_slice(name)  # read when copied into the model
            except SafetensorError as error:
                raise ValueError(f"{checkpoint!r}: {shard} is truncated or damaged: {error}") from error
        settings = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}  # checked below
        model, report = model_class.from_pretrained(None, config=config, state_dict=tensors, **settings)
    wrong = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if wrong:
        raise ValueError(
            f"{checkpoint!r} is not a checkpoint of {config.model_type!r} with these sizes: "
            f"{len(wrong)} weights are missing or of another shape, {wrong[:3]} ..."
        )
    return model


def _find_shards(checkpoint: str, depth: int, revision: str | None) -> tuple[Path, dict[str, list[str] | None]]:
    """Return the folder and its required files, each with its tensor names (None: unknown before opening)."""
    folder = fetch_small_files(checkpoint, revision)
    shards: dict[str, list[str] | None] = {SINGLE: None}
    if (folder / INDEX).is_file():
        shards = {}
        for name, shard in json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].items():
            if _is_kept(name, depth):
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
    return int(layer[1]) < depth if layer else not _HEAD.match(name)


__all__ = ["fetch_small_files", "load_pruned_backbone"]
