"""A recipe: one YAML file that says everything about a training run, read into dataclasses."""

import dataclasses
import difflib
import re
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .arguments import RetrievalConfig
from .contrastive import ContrastiveConfig, ContrastiveTrainer
from .gcl import GclConfig, GclTrainer
from .lora import LoraArguments
from .mac import MacConfig, MacTrainer
from .self_distillation import SelfDistillationConfig, SelfDistillationTrainer
from .solar_stage1 import JointEncoderStage1Config, JointEncoderStage1Trainer
from .solar_stage2 import JointEncoderStage2Config, JointEncoderStage2Trainer
from .trainer import RetrievalTrainer

METHODS: dict[str, tuple[type[RetrievalConfig], type[RetrievalTrainer]]] = {
    "contrastive": (ContrastiveConfig, ContrastiveTrainer),
    "gcl": (GclConfig, GclTrainer),
    "mac": (MacConfig, MacTrainer),
    "self_distillation": (SelfDistillationConfig, SelfDistillationTrainer),
    "solar_stage1": (JointEncoderStage1Config, JointEncoderStage1Trainer),
    "solar_stage2": (JointEncoderStage2Config, JointEncoderStage2Trainer),
}
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


@dataclass
class ModelArguments:
    """Which model to train.

    Args:
        checkpoint: A saved model of this package to go on from; the fields on towers are then unused.
        architecture: `joint_encoder`, `score_fusion` or `token_fusion`, on two towers; or `mllm_retriever`, on `mllm`.
        vision: Vision tower: a model id or folder, or `sample` for the embedded weights.
        text: Text tower, likewise; the same checkpoint as `vision` for a two-tower one such as CLIP.
        mllm: A multimodal language model: its id or folder.
        config: Fields of the model's configuration class, such as an MLLM's `keep_layers`.
        image_size: Side of the picture in pixels, for the `sample` tower only.
        min_pixels: Smaller pictures are enlarged, for an MLLM of dynamic resolution only.
        max_pixels: Larger ones are reduced, likewise.
        max_text_length: Longest text in tokens, an MLLM's prompt with its pictures; the tokenizer's own limit when
            None.
        freeze_towers: Train only what stands on the towers; of an MLLM only adapters and, if `config` says so, [RET].
        lora: Low-rank adapters on the towers in place of training them whole.
    """

    checkpoint: str | None = None
    architecture: str = "joint_encoder"
    vision: str | None = None
    text: str | None = None
    mllm: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    image_size: int = 98
    min_pixels: int | None = None
    max_pixels: int | None = None
    max_text_length: int | None = None
    freeze_towers: bool = False
    lora: LoraArguments | None = None


@dataclass
class DataArguments:
    """Which rows to train and evaluate on.

    Args:
        format: `pairs` of image and text, as `conjoin.data.load_pairs` reads them; for PUMA `nli` (`load_nli`) or
            `mbeir` (`MbeirTraining`).
        source: A folder, a CSV, JSONL or Parquet file, webdataset shards, a dataset id, or `emoji`; a table of
            sentences; or the root of M-BEIR.
        split: Split to train on.
        eval_source: Pairs for R@k during training; the same source when None and `eval_split` is set.
        eval_split: Split to evaluate on; no evaluation when both are None.
        image_column: Guessed from common names when None, as the next two.
        text_column: The captions.
        id_column: Unique names.
        streaming: Read while training; needs `training.max_steps`.
        mined: Hard negatives of the training rows, as `conjoin mine` wrote them (stage 2 of SOLAR).
        mined_source: The pairs that they were mined from, columns as in `source`; the training rows when None.
        columns: Of `nli`: which column is the `query`, `positive` and `negative`.
        datasets: Of `mbeir`: the names of those to take; all when empty.
        hard_negatives: Of `mbeir`: negatives of each row, of those the data names.
        instructions: Of `mbeir`: whether queries have their instruction.
    """

    format: str = "pairs"
    source: str = "emoji"
    split: str = "train"
    eval_source: str | None = None
    eval_split: str | None = None
    image_column: str | None = None
    text_column: str | None = None
    id_column: str | None = None
    streaming: bool = False
    mined: str | None = None
    mined_source: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    datasets: tuple[str, ...] = ()
    hard_negatives: int = 0
    instructions: bool = True


@dataclass
class TeacherArguments:
    """Frozen teachers of stage 1 of SOLAR; without this section the student's own frozen towers teach.

    Args:
        vision: A vision model's id or folder (DINOv2 in the paper).
        text: A text model's, for tokens (BGE-m3-retromae).
        text_global: Another text model over the same tokens, for whole texts (BGE-m3); `text` when None.
        vision_hidden_layer: Which hidden state of `vision` to read; its output when None.
        max_text_length: Longest text in the text teacher's tokens; its tokenizer's own limit when None.
        cache: Folder of `conjoin teacher-cache`; the teachers run live when None.
    """

    vision: str
    text: str
    text_global: str | None = None
    vision_hidden_layer: int | None = None
    max_text_length: int | None = None
    cache: str | None = None


@dataclass
class DeepTeacherArguments:
    """The un-pruned teacher of stage 1 of PUMA; without this section it is `model.mllm`, and runs live.

    Args:
        mllm: The model; `model.mllm` when None.
        cache: Folder of its states of the training rows: computed once if they are not there; then the teacher is not
            loaded.
    """

    mllm: str | None = None
    cache: str | None = None


@dataclass
class FeatureArguments:
    """Run the frozen towers once, before training (small data only).

    Args:
        folder: Where the cache lies; a later run with the same model and data reads it.
        copies: Versions stored of each training image, the first as it is.
        augment: Vary the other copies with `conjoin.data.ImageAugmentation`.
        batch_size: Images per forward.
        seed: Seed of the augmentation.
        bf16: Compute in bfloat16; by default where that is measured to be faster.
    """

    folder: str = "runs/features"
    copies: int = 3
    augment: bool = True
    batch_size: int = 64
    seed: int = 0
    bf16: bool | None = None


@dataclass
class Recipe:
    """A training run: `method` names the objective, `training` its configuration class's fields."""

    method: str
    model: ModelArguments
    training: RetrievalConfig
    data: DataArguments = field(default_factory=DataArguments)
    features: FeatureArguments | None = None
    teacher: TeacherArguments | DeepTeacherArguments | None = None


def load_recipe(path: str | Path, overrides: dict[str, str] | None = None) -> Recipe:
    """Read a recipe and apply `overrides` such as `{"training.learning_rate": "1e-4"}` (values are read as YAML).

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: Not YAML, not a mapping, an unknown key (the message suggests the nearest), a value of another type
            than its field, or an unknown method.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no recipe at {str(path)!r}")
    values = _parse(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(values, dict):
        raise ValueError(f"{path}: a recipe is a mapping of sections, got {type(values).__name__}")
    for key, text in (overrides or {}).items():
        _assign(values, key, _parse(text, f"override --{key}"))
    training = values.get("training")
    for key in ("eval_strategy", "save_strategy", "logging_strategy"):
        if isinstance(training, dict) and training.get(key) is False:  # YAML 1.1 reads a bare no as false
            training[key] = "no"
    method = values.get("method")
    if method not in METHODS:
        raise ValueError(f"{path}: method {method!r}; expected one of {sorted(METHODS)}")
    teacher = DeepTeacherArguments if method == "self_distillation" else TeacherArguments
    return _build(Recipe, _numbers(values), str(path), {"training": METHODS[method][0], "teacher": teacher})


def _parse(text: str, where: str) -> Any:  # noqa: ANN401 - any YAML value
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error


def _assign(values: dict[str, Any], key: str, value: Any) -> None:  # noqa: ANN401 - any YAML value
    *sections, name = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ValueError(f"override --{key}: {section!r} is not a section")
    values[name] = value


def _build(cls: type[Any], values: dict[str, Any], where: str, classes: dict[str, type[Any]] | None = None) -> Any:  # noqa: ANN401
    """Construct dataclass `cls` from a mapping, sections recursively; `classes` overrides the class of a section."""
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {sorted(fields)}"
            raise ValueError(f"{where}: unknown key {key!r}; {hint}")
        section = (classes or {}).get(key) or _section_class(hints[key])
        if section is not None and not (value is None and type(None) in typing.get_args(hints[key])):
            if not isinstance(value or {}, dict):
                raise ValueError(f"{where}: {key} is a section with keys of its own, got {value!r}")
            value = _build(section, value or {}, f"{where}: {key}")
        elif not _fits(value, hints[key]):
            wanted = " or ".join(option.__name__ for option in typing.get_args(hints[key]) or (hints[key],))
            raise ValueError(f"{where}: {key} is {value!r}; expected {wanted.replace('NoneType', 'null')}")
        arguments[key] = tuple(value) if isinstance(value, list) else value
    missing = [
        name
        for name, f in fields.items()
        if name not in arguments and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{where}: missing {', '.join(missing)}")
    return cls(**arguments)


def _fits(value: Any, hint: Any) -> bool:  # noqa: ANN401 - any YAML value, a type hint
    """Whether a value is of the plain types of a hint; hints of other types take anything."""
    options = typing.get_args(hint) or (hint,)
    of_others = typing.get_origin(hint) not in (None, types.UnionType, typing.Union)
    if of_others or not {str, int, float, bool, types.NoneType}.issuperset(options):
        return True
    if isinstance(value, bool):
        return bool in options
    whole = isinstance(value, float) and value.is_integer() and int in options  # 1e3
    return whole or isinstance(value, (*options, int) if float in options else options)


def _section_class(hint: Any) -> type[Any] | None:  # noqa: ANN401 - a type hint
    """The dataclass in a hint such as `LoraArguments | None`, if any."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) else (hint,)
    return next((option for option in options if isinstance(option, type) and dataclasses.is_dataclass(option)), None)


def _numbers(value: Any) -> Any:  # noqa: ANN401 - any YAML value
    """YAML 1.1 reads 1e-5 as a string; everyone means the number."""
    if isinstance(value, dict):
        return {key: _numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_numbers(entry) for entry in value]
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
