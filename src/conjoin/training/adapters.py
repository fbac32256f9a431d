"""From low-rank adapters on disk, as peft or a training run wrote them, to a model without them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from transformers import AutoModel, AutoProcessor, PreTrainedModel, ProcessorMixin

from .lora import merge_lora
from .recipes import Recipe
from .run import build_model

ADAPTER_FILE, CHECKPOINT_FILE = "adapter_config.json", "model.safetensors"
ENCODER = "encoder."
"""What the names of the encoder's weights begin with in a checkpoint of a training run."""


def load_adapted(folder: str | Path, base: str | None = None) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Load a model with the adapters of a peft folder merged into its weights, and its processor.

    Args:
        folder: Where `adapter_config.json` and the adapters lie.
        base: The model of this package that they adapt; the one that the folder names when None.

    Raises:
        FileNotFoundError: There are no adapters in the folder.
        ImportError: peft is not installed.
        ValueError: No base is known, it is no model of this package, or the adapters are another model's.
    """
    folder = Path(folder)
    if not (folder / ADAPTER_FILE).is_file():
        raise FileNotFoundError(
            f"no {ADAPTER_FILE} in {str(folder)!r}: expected a folder that peft wrote; for the checkpoint of a "
            "training run give its recipe"
        )
    try:
        from peft import PeftConfig, get_peft_model, load_peft_weights, set_peft_model_state_dict
    except ImportError as error:
        raise ImportError('adapters need peft: pip install "conjoin[train]"') from error
    named = json.loads((folder / ADAPTER_FILE).read_text(encoding="utf-8")).get("base_model_name_or_path")
    base = base or named
    if base is None:
        raise ValueError(f"the adapters in {str(folder)!r} do not name the model that they adapt; give the base")
    model = AutoModel.from_pretrained(base, trust_remote_code=True)
    if model._auto_class is None:
        raise ValueError(f"{base!r} is a {model.config.model_type}; expected a model of this package")
    try:
        adapted: Any = get_peft_model(model, PeftConfig.from_pretrained(str(folder)))
        report: Any = set_peft_model_state_dict(adapted, load_peft_weights(str(folder), device="cpu"))
    except (RuntimeError, ValueError) as error:  # of other sizes, or for layers that are not there
        reason = str(error).strip().splitlines()[-1].strip()
        raise ValueError(f"the adapters in {str(folder)!r} are not for {base!r}: {reason}") from error
    _refuse(folder, base, [name for name in report.missing_keys if "lora_" in name], report.unexpected_keys)
    return adapted.merge_and_unload(), AutoProcessor.from_pretrained(base, trust_remote_code=True)


def load_checkpoint(folder: str | Path, recipe: Recipe) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Load the model of a training run's checkpoint, its adapters merged, and its processor.

    Args:
        folder: A `checkpoint-N` folder.
        recipe: What was run.

    Raises:
        FileNotFoundError: There are no weights in the folder.
        ValueError: The weights are not those of the recipe's model.
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
    model.load_state_dict(stored, strict=False)  # of layers in four bits their scales, which are not read again
    return merge_lora(model), processor


def _refuse(folder: str | Path, base: str, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    missing, unexpected = sorted(missing), sorted(unexpected)
    if missing or unexpected:
        raise ValueError(
            f"what is in {str(folder)!r} is not for {base!r}: {len(missing)} weights are missing or of another shape "
            f"and {len(unexpected)} are left over, such as {[*missing, *unexpected][0]!r}"
        )
