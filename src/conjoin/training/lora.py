"""LoRA on the towers of an encoder (extra `train`)."""

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel


@dataclass
class LoraArguments:
    """Low-rank adaptation of the towers (SOLAR App. D: r=16, alpha=32 on both).

    Args:
        r: Rank.
        alpha: Scale; the update is multiplied by `alpha / r`.
        dropout: Dropout on the adapter's input.
        towers: Sub-modules of the encoder that get adapters.
        target_modules: Suffixes of the linear layers to adapt; every linear layer of the towers when empty.
    """

    r: int = 16
    alpha: int = 32
    dropout: float = 0.0
    towers: tuple[str, ...] = ("vision_model", "text_model")
    target_modules: tuple[str, ...] = ()


def add_lora(encoder: PreTrainedModel, arguments: LoraArguments) -> PreTrainedModel:
    """Freeze the towers and put LoRA adapters into their linear layers, in place.

    Raises:
        ImportError: peft is not installed.
        ValueError: A tower or target does not exist.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ImportError('LoRA needs peft: pip install "conjoin[train]"') from error
    for name in arguments.towers:
        try:
            tower = encoder.get_submodule(name)
        except AttributeError as error:
            raise ValueError(f"{type(encoder).__name__} has no tower {name!r}") from error
        tower.requires_grad_(False)
        linears = [path for path, module in tower.named_modules() if isinstance(module, nn.Linear)]
        chosen = [path for path in linears if not arguments.target_modules or path.endswith(arguments.target_modules)]
        if not chosen:
            raise ValueError(f"{name}: no linear layer ends in {arguments.target_modules}; it has {linears[:5]} ...")
        inject_adapter_in_model(
            LoraConfig(
                r=arguments.r, lora_alpha=arguments.alpha, lora_dropout=arguments.dropout, target_modules=chosen
            ),
            tower,
        )
    return encoder


def merge_lora(encoder: PreTrainedModel) -> PreTrainedModel:
    """Return the encoder with its adapters folded into the weights: itself if it has none, else a copy."""
    if not any("lora_" in name for name, _ in encoder.named_parameters()):
        return encoder
    from peft.tuners.lora import LoraLayer

    merged = copy.deepcopy(encoder)
    layers: list[tuple[str, Any]] = [
        (path, module) for path, module in merged.named_modules() if isinstance(module, LoraLayer)
    ]
    for path, layer in layers:
        layer.merge()
        parent, _, name = path.rpartition(".")
        setattr(merged.get_submodule(parent), name, layer.get_base_layer())
    return merged
