"""LoRA on the towers of an encoder."""

import copy
from dataclasses import dataclass
from typing import Any

from accelerate import PartialState
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass
class LoraArguments:
    """Low-rank adaptation of the towers.

    Args:
        r: Rank.
        alpha: Scale: the update is multiplied by `alpha / r`.
        dropout: Dropout rate on the adapter's input.
        towers: Sub-modules of the encoder that get adapters.
        target_modules: Name suffixes of the linear layers to adapt; empty for all linear layers of the towers.
        quantize: Store the adapted layers in 4 bits (QLoRA); needs bitsandbytes.
    """

    r: int = 16
    alpha: int = 32
    dropout: float = 0.0
    towers: tuple[str, ...] = ("vision_model", "text_model")
    target_modules: tuple[str, ...] = ()
    quantize: bool = False


def add_lora(encoder: PreTrainedModel, arguments: LoraArguments) -> PreTrainedModel:
    """Freeze the towers and add float32 LoRA adapters to their linear layers, in place.

    Raises:
        ImportError: `quantize` is set and bitsandbytes is not installed.
        ValueError: A tower or target does not exist.
    """
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
        if arguments.quantize:
            _quantize(tower, chosen)
        inject_adapter_in_model(
            LoraConfig(
                r=arguments.r, lora_alpha=arguments.alpha, lora_dropout=arguments.dropout, target_modules=chosen
            ),
            tower,
        )
        for parameter in tower.parameters():
            if parameter.requires_grad:  # bfloat16 would round small updates away
                parameter.data = parameter.data.float()
    return encoder


def merge_lora(encoder: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the encoder with the adapters merged into the weights, or the encoder itself if it has none."""
    if not any("lora_" in name for name, _ in encoder.named_parameters()):
        return encoder
    merged = copy.deepcopy(encoder)
    layers: list[tuple[str, Any]] = [
        (path, module) for path, module in merged.named_modules() if isinstance(module, LoraLayer)
    ]
    for path, layer in layers:
        base = layer.get_base_layer()
        if base.weight.is_floating_point():
            layer.merge()
        else:
            base = _merge_quantized(layer, base)
        merged.set_submodule(path, base)
    for module in merged.modules():  # else peft would still expect the adapters
        vars(module).pop("peft_config", None)
    return merged


def merge_lora_weights(encoder: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Merge the adapters of an encoder that is sharded over devices.

    Args:
        encoder: Says which layers have adapters; its own weights are not read.
        weights: Its whole weights by name.

    Returns:
        The weights of the encoder without adapters.

    Raises:
        ValueError: An adapted layer is quantised.
    """
    if not any("lora_" in name for name in weights):
        return weights
    merged = {name.replace(".base_layer.", "."): value for name, value in weights.items() if ".lora_" not in name}
    for path, layer in encoder.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        base = merged[f"{path}.weight"]
        if not base.is_floating_point():
            raise ValueError(f"{path}: the adapters of a quantised layer cannot be merged when weights are sharded")
        for name in layer.active_adapters:
            down, up = (weights[f"{path}.lora_{side}.{name}.weight"].float() for side in "AB")
            merged[f"{path}.weight"] = (merged[f"{path}.weight"].float() + layer.scaling[name] * (up @ down)).to(
                base.dtype
            )
    return merged


def _quantize(tower: Any, paths: list[str]) -> None:  # noqa: ANN401 - gets an attribute
    """Quantise the weights of linear layers to 4 bits (NF4)."""
    try:
        from bitsandbytes.nn import Linear4bit, Params4bit
    except ImportError as error:
        raise ImportError("lora.quantize needs bitsandbytes: pip install bitsandbytes") from error
    device = PartialState().device
    for path in paths:
        linear: Any = tower.get_submodule(path)
        settings = {"compute_dtype": linear.weight.dtype, "quant_type": "nf4", "device": "meta"}
        small = Linear4bit(linear.in_features, linear.out_features, linear.bias is not None, **settings)
        small.weight = Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", module=small)
        small.bias = linear.bias
        tower.set_submodule(path, small.to(device))
    tower.is_loaded_in_4bit = True  # read by peft


def _merge_quantized(layer: Any, base: Any) -> nn.Linear:  # noqa: ANN401 - peft's and bitsandbytes' layers
    """Return a plain layer with the dequantised weights plus the update, not quantised again."""
    from bitsandbytes.functional import dequantize_4bit

    base.state_dict()  # restores the common weight layout if the CPU used another
    weight = dequantize_4bit(base.weight.data, base.weight.quant_state)
    plain = nn.Linear(base.in_features, base.out_features, base.bias is not None, device="meta")
    updates = [layer.get_delta_weight(name) for name in layer.active_adapters]
    plain.weight = nn.Parameter((weight.float() + sum(updates)).to(base.compute_dtype), requires_grad=False)
    plain.bias = base.bias
    return plain
