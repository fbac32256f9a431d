"""The towers of the joint encoder: pretrained models of transformers, cut to what is used."""

import copy
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel


def with_depth(config: PreTrainedConfig, depth: int) -> PreTrainedConfig:
    """Return a tower's configuration with `depth` layers: the same object, or a copy if the tower is cut."""
    if config.num_hidden_layers == depth:
        return config
    config = copy.deepcopy(config)
    config.num_hidden_layers = depth
    return config


def without_unused(tower: PreTrainedModel) -> PreTrainedModel:
    """Drop the pooling head of BERT-like towers and turn mask tokens into buffers; both are unused here."""
    if "pooler" in dict(tower.named_children()):
        tower.register_module("pooler", None)
    for path, parameter in list(tower.named_parameters()):
        owner, _, name = path.rpartition(".")
        if name == "mask_token":
            delattr(tower.get_submodule(owner), name)
            tower.get_submodule(owner).register_buffer(name, parameter.data)
    return tower


def tower_config(source: str | Path | PreTrainedModel, kind: str) -> PreTrainedConfig:
    """Return a copy of the configuration of the `kind` ("vision" or "text") tower of a checkpoint or loaded model."""
    config = (
        source.config
        if isinstance(source, PreTrainedModel)
        else AutoConfig.from_pretrained(source, trust_remote_code=False)
    )
    if f"{kind}_config" in config.sub_configs:
        config = getattr(config, f"{kind}_config")
    needed = "patch_size" if kind == "vision" else "vocab_size"
    if needed not in config.to_dict():
        raise ValueError(
            f"{type(source).__name__ if isinstance(source, PreTrainedModel) else str(source)!r} has no {kind} tower: "
            f"its {type(config).__name__} has no {needed!r}"
        )
    return copy.deepcopy(config)


def tower_class(config: PreTrainedConfig) -> Any:  # noqa: ANN401 - a model class
    """Return the model class for a tower's configuration (the auto classes do not list SigLIP's text tower)."""
    if type(config) in AutoModel._model_mapping:
        return AutoModel._model_mapping[type(config)]
    return getattr(transformers, type(config).__name__.removesuffix("Config") + "Model")


def load_tower(tower: PreTrainedModel, source: str | Path | PreTrainedModel, kind: str) -> None:
    """Copy weights of the `kind` tower into `tower`, except pooling heads and blocks that were not built."""
    loaded: Any = source
    if not isinstance(source, PreTrainedModel):
        loaded = type(tower).from_pretrained(source, config=tower.config)
    elif f"{kind}_config" in source.config.sub_configs:
        loaded = getattr(source, f"{kind}_model")
    missing = tower.load_state_dict(loaded.state_dict(), strict=False).missing_keys
    if missing:
        raise ValueError(f"{type(loaded).__name__} lacks weights of {type(tower).__name__}: {missing[:3]} ...")
