"""Dataclasses out of plain mappings, as YAML and JSON give them, with errors that name the key."""

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Mapping
from typing import Any

import yaml

PLAIN = {str, int, float, bool, types.NoneType}
SYNONYMS = {
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
    "bs": "per_device_train_batch_size",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "steps": "max_steps",
    "wd": "weight_decay",
    "accumulation_steps": "gradient_accumulation_steps",
    "output": "output_dir",
    "out": "output_dir",
    "rank": "r",
}
"""Names that users know from elsewhere, and the keys here."""
LISTED = 20
"""How many keys an error lists at most."""
MAX_ALIASES = 10
"""More references to an anchor (`*name`) are refused: a few lines of them can stand for gigabytes."""
MAX_NESTING = 50
"""Deeper values are refused."""


def option(default: Any, flag: str, **settings: Any) -> Any:  # noqa: ANN401 - a field of any type
    """A field of a dataclass that is also an option of the program.

    Args:
        default: Of both.
        flag: The option's name, such as `--batch-size`.
        settings: Further arguments of `argparse.ArgumentParser.add_argument`: `help`, `type`, `choices`, `metavar` ...
    """
    return dataclasses.field(default=default, metadata={"flag": flag, **settings})


def parse_yaml(text: str, where: str) -> Any:  # noqa: ANN401 - any YAML value
    """Parse YAML.

    Args:
        text: The YAML.
        where: Its file, for messages.

    Raises:
        ValueError: It is not YAML, has more than `MAX_ALIASES` aliases, is deeper than `MAX_NESTING`, or contains
            itself.
    """
    try:
        _check_bounds(text)
        value = yaml.safe_load(text)
        json.dumps(value, default=str, skipkeys=True)  # an error if it contains itself
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error
    return value


def _check_bounds(text: str) -> None:
    aliases = depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        aliases += isinstance(event, yaml.AliasEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if aliases > MAX_ALIASES:
            raise ValueError(f"more than {MAX_ALIASES} aliases")
        if depth > MAX_NESTING:
            raise ValueError(f"deeper than {MAX_NESTING}")


def build(kind: Any, value: Any, where: str, sections: Mapping[str, type[Any]] | None = None) -> Any:  # noqa: ANN401
    """Turn a plain value into what a type hint says.

    Dataclasses are built from mappings, recursively, also inside unions, lists, tuples and dicts. A value of a plain
    type (`str`, `int`, `float`, `bool`, None) must fit its hint; other hints take any value.

    Args:
        kind: The hint; a dataclass in most calls.
        value: The plain value.
        where: Names the value in errors.
        sections: Classes that replace the hints of some fields of `kind`.

    Raises:
        ValueError: An unknown key (the message suggests the nearest), a missing key, or a value of another type.
    """
    options = typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)
    dataclass = next((option for option in options if dataclasses.is_dataclass(option)), None)
    if dataclass is not None:
        plain = tuple(option for option in options if option is not dataclass)
        is_plain = plain and _fits(value, plain)
        return value if is_plain else _build_dataclass(dataclass, value, where, sections or {})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is dict and isinstance(value, Mapping):
        return {key: build(arguments[1], entry, f"{where}.{key}") for key, entry in value.items()}
    if origin in (list, tuple) and isinstance(value, list | tuple):
        return origin(build(arguments[0], entry, f"{where}[{index}]") for index, entry in enumerate(value))
    if origin in (dict, list) or not _fits(value, options):
        wanted = "a mapping" if origin is dict else "a list" if origin is list else _names(options)
        raise ValueError(f"{where} is {value!r:.80}; expected {wanted}")
    return value


def _build_dataclass(kind: Any, value: Any, where: str, sections: Mapping[str, type[Any]]) -> Any:  # noqa: ANN401
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is a section with keys of its own, got {value!r:.80}")
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    hints = typing.get_type_hints(kind) | dict(sections)
    for key in value:
        if key not in fields:
            known = {name: hints[name] for name in fields}
            raise ValueError(f"{where}: unknown key {key!r}; {_suggest(str(key), known)}")
    unset = dataclasses.MISSING
    missing = [n for n, f in fields.items() if n not in value and f.default is unset and f.default_factory is unset]
    if missing:
        raise ValueError(f"{where}: missing {', '.join(missing)}")
    return kind(**{key: build(hints[key], entry, f"{where}: {key}") for key, entry in value.items()})


def _suggest(key: str, hints: Mapping[str, Any]) -> str:
    """Name the keys that are like an unknown one, also those of sections; if there are none, list the keys."""
    paths = {name: name for name in hints}
    for section, hint in hints.items():
        for option in typing.get_args(hint) or (hint,):
            fields = dataclasses.fields(option) if dataclasses.is_dataclass(option) else ()
            paths = {field.name: f"{section}.{field.name}" for field in fields if field.init} | paths
    near = difflib.get_close_matches(SYNONYMS.get(key, key), paths, n=1)
    near = near or sorted(name for name in paths if key in name.split("_"))[:5]
    if near:
        return f"did you mean {' or '.join(repr(paths[name]) for name in near)}?"
    return f"expected one of {sorted(hints)}" if len(hints) <= LISTED else f"none of the {len(hints)} keys is like it"


def _fits(value: Any, options: tuple[Any, ...]) -> bool:  # noqa: ANN401
    """Whether a value is of the plain types of a hint; hints of other types take anything."""
    if not PLAIN.issuperset(options):
        return True
    if isinstance(value, bool):
        return bool in options
    is_whole = isinstance(value, float) and value.is_integer() and int in options  # 1e3
    return is_whole or isinstance(value, (*options, int) if float in options else options)


def _names(options: tuple[Any, ...]) -> str:
    return " or ".join(option.__name__ for option in options).replace("NoneType", "null")
