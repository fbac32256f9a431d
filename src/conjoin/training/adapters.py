"""Low-rank adapters apart from their model: merged into it, or saved for peft."""

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from peft import (
    LoraConfig,
    PeftConfig,
    get_peft_model,
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, ProcessorMixin

from conjoin.hub import load_model
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.storage import write_text
from conjoin.training.lora import merge_lora
from conjoin.training.models import build_model
from conjoin.training.recipe import Recipe

ADAPTER_FILE, CHECKPOINT_FILE = "adapter_config.json", "model.safetensors"
BASE_CLASS = "AutoModelForImageTextToText"
"""The class whose names of layers the saved adapters have, as vLLM wants them."""
CARD = """\
---
library_name: peft
base_model: {base}
---
`peft.AutoPeftModel.from_pretrained(FOLDER)` loads these adapters with their base. `peft.PeftModel.from_pretrained`
needs the base as `transformers.{kind}`; on `AutoModel` it warns of missing keys and adapts nothing.
"""
ENCODER = "encoder."
"""Prefix of the encoder's weight names in a training checkpoint."""


def load_adapted(folder: str | Path, base: str | None = None) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Load a model and its processor, and merge the adapters of a peft folder into the weights.

    Args:
        folder: Contains `adapter_config.json` and the adapters.
        base: The adapted model, a model of this package; None for the one that the folder names, if that is a folder
            of this machine.

    Raises:
        FileNotFoundError: The folder contains no adapters.
        ValueError: The base is unknown or not a model of this package, or the adapters do not fit it.
    """
    folder = Path(folder)
    if not (folder / ADAPTER_FILE).is_file():
        raise FileNotFoundError(
            f"no {ADAPTER_FILE} in {str(folder)!r}: expected a folder that peft wrote; for the checkpoint of a "
            "training run give its recipe"
        )
    named = json.loads((folder / ADAPTER_FILE).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if base is None and named is not None and not Path(named).is_dir():
        raise ValueError(
            f"the adapters in {str(folder)!r} are for {named!r}, no folder here: give the base, --base {named}"
        )
    base = base or named
    if base is None:
        raise ValueError(f"the adapters in {str(folder)!r} do not name the model that they adapt; give the base")
    model, processor = load_model(base)
    try:
        adapted: Any = get_peft_model(model, PeftConfig.from_pretrained(str(folder)))
        report: Any = set_peft_model_state_dict(adapted, load_peft_weights(str(folder), device="cpu"))
    except (RuntimeError, ValueError) as error:  # wrong sizes or missing layers
        reason = str(error).strip().splitlines()[-1].strip()
        raise ValueError(f"the adapters in {str(folder)!r} are not for {base!r}: {reason}") from error
    _refuse(folder, base, [name for name in report.missing_keys if "lora_" in name], report.unexpected_keys)
    return adapted.merge_and_unload(), processor


def save_adapter(encoder: MllmRetrieverModel, folder: str | Path, base: str) -> None:
    """Save the adapters of an embedder's language model for PEFT, beside the embedder that they adapt.

    `AutoPeftModel.from_pretrained(folder)` loads both; PEFT loads them on `AutoModelForImageTextToText`, and
    sentence-transformers on the same base. vLLM knows the layers by the names of this class alone, and passes over
    others. On `AutoModel`, whose layers have other names, PEFT warns of missing keys; the card in the folder says so.

    Args:
        encoder: The embedder with adapters, with all its layers.
        folder: Where to write.
        base: A folder or the name of a repository on the Hub.

    Raises:
        ValueError: The language model has no adapters.
    """
    text_model: Any = encoder.text_model
    configs: dict[str, LoraConfig] = vars(text_model).get("peft_config", {})
    if not configs:
        raise ValueError("the language model has no adapters")
    (config,) = copy.deepcopy(configs).values()
    names = sorted({str(path).rpartition(".")[2] for path in config.target_modules or ()})
    config.target_modules = rf".*language_model\.layers\..*\.({'|'.join(names)})"
    config.base_model_name_or_path = base
    config.auto_mapping = {"base_model_class": BASE_CLASS, "parent_library": "transformers"}
    config.save_pretrained(str(folder))
    weights = get_peft_model_state_dict(text_model)
    prefix = "base_model.model.model.language_model."
    tensors = {prefix + name: value.contiguous().cpu() for name, value in weights.items()}
    save_file(tensors, Path(folder) / "adapter_model.safetensors", {"format": "pt"})
    write_text(Path(folder) / "README.md", CARD.format(base=base, kind=BASE_CLASS))


def load_checkpoint(folder: str | Path, recipe: Recipe) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Load the model and processor of a training checkpoint, and merge the adapters.

    Args:
        folder: A `checkpoint-N` folder.
        recipe: The recipe of the run.

    Raises:
        FileNotFoundError: The folder contains no weights.
        ValueError: The weights do not fit the recipe's model.
    """
    path = Path(folder) / CHECKPOINT_FILE
    if not path.is_file():
        raise FileNotFoundError(f"no {CHECKPOINT_FILE} in {str(folder)!r}; expected a checkpoint-N of a training run")
    model, processor = build_model(recipe.model)
    stored = {
        name.removeprefix(ENCODER): tensor for name, tensor in load_file(path).items() if name.startswith(ENCODER)
    }
    expected = model.state_dict()
    differing = {name for name in expected.keys() & stored.keys() if expected[name].shape != stored[name].shape}
    missing = (expected.keys() - stored.keys()) | differing
    _refuse(folder, "the recipe's model", missing, (stored.keys() - expected.keys()) | differing)
    model.load_state_dict(stored, strict=False)  # skips the scales of 4-bit layers, which are not reloaded
    return merge_lora(model), processor


def _refuse(folder: str | Path, base: str, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    missing, unexpected = sorted(missing), sorted(unexpected)
    if missing or unexpected:
        raise ValueError(
            f"the weights in {str(folder)!r} do not fit {base!r}: {len(missing)} weights are missing or of another "
            f"shape and {len(unexpected)} are left over, such as {[*missing, *unexpected][0]!r}"
        )
