"""The language head of an MLLM, which its retriever drops: the output embeddings of Coral's language decoder."""

import json
from pathlib import Path
from typing import Any, cast

from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from conjoin.models.mllm_retriever.pruned_checkpoint import INDEX, SINGLE, fetch_small_files
from conjoin.training import Run

from .trainer import CoralConfig

HEAD = "lm_head.weight"


def prepare_coral(run: Run) -> dict[str, Any]:
    """Return the language head for the trainer if the model has all layers of an MLLM with a head of its own.

    A pruned model, one whose head is tied, and one whose MLLM the recipe does not name use the input embeddings.
    """
    checkpoint = run.recipe.model.mllm
    if checkpoint is None or "language" not in cast(CoralConfig, run.recipe.training).reconstruct:
        return {}
    revision = run.recipe.model.config.get("revision")
    config = AutoConfig.from_pretrained(fetch_small_files(checkpoint, revision), trust_remote_code=False)
    if config.get_text_config().num_hidden_layers > run.model.config.keep_layers:
        return {}
    return {"language_head": load_language_head(checkpoint, revision)}


def load_language_head(checkpoint: str | Path, revision: str | None = None) -> Tensor | None:
    """Read the head `(V, D)` of an MLLM; None if its config ties the head to the input embeddings.

    `tie_word_embeddings` counts where `config.json` has it, the MLLM's own before its language model's: the classes
    of transformers have other defaults for MLLMs than for language models (InternVL). Only the file that holds the
    head is downloaded and opened.

    Args:
        checkpoint: A folder or the name of a repository on the Hub, with safetensors weights.
        revision: Branch, tag or commit on the Hub.

    Raises:
        ValueError: The config does not tie the head, and no file has it.
    """
    checkpoint = str(checkpoint)
    folder, shard = fetch_small_files(checkpoint, revision), SINGLE
    if _is_tied(folder):
        return None
    if (folder / INDEX).is_file():
        files = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        shard = next((file for name, file in files.items() if name.endswith(HEAD)), "")
    if shard and not Path(checkpoint).is_dir():
        folder = Path(snapshot_download(checkpoint, revision=revision, allow_patterns=[shard]))
    if shard:
        with safe_open(str(folder / shard), framework="pt") as file:
            name = next((name for name in file.keys() if name.endswith(HEAD)), None)
            if name is not None:
                head: Tensor = file.get_tensor(name)
                return head
    raise ValueError(f"{checkpoint}: its config has tie_word_embeddings=false, but no file has '{HEAD}'")


def _is_tied(folder: Path) -> bool:
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for config in (stored, stored.get("text_config") or {}):
        if "tie_word_embeddings" in config:
            return bool(config["tie_word_embeddings"])
    return bool(AutoConfig.from_pretrained(folder, trust_remote_code=False).tie_word_embeddings)
