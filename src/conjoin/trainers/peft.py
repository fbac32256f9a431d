"""LoRA by peft: adapters on a model, merged for saving, and apart from their model."""

import copy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from conjoin.models.mllm_retriever import MllmRetrieverModel

TUNED = (BaseTunerLayer, ModulesToSaveWrapper)
"""What peft puts in place of a module."""
BASE_CLASS = "AutoModelForImageTextToText"
"""The class whose names of layers the saved adapters have, as vLLM wants them."""


def add_adapters(model: PreTrainedModel, config: PeftConfig) -> None:
    """Add adapters to a model in place, in float32; nothing else is trained but the parts in `modules_to_save`.

    Args:
        model: A model of this package.
        config: Of peft. `target_modules` are the last parts of names of linear layers, a regular expression of whole
            names (`"text_model.*"`), or `"all-linear"`. `modules_to_save` are parts of the model trained in full.

    Raises:
        ValueError: No layer has such a name, or the model has no such part.
    """
    settings: Any = copy.deepcopy(config)
    trained, settings.modules_to_save = list(settings.modules_to_save or ()), None
    parts = [find_part(model, name, "modules_to_save") for name in trained]
    linears = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    everything = settings.target_modules == "all-linear"
    chosen = [path for path in linears if everything or check_target_module_exists(settings, path)]
    if not chosen:
        raise ValueError(
            f"target_modules={settings.target_modules!r} names no linear layer; the model has {linears[:5]} ..."
        )
    settings.target_modules = chosen
    get_peft_model(model, settings)  # the model itself: its names stay, so what is saved is what it was
    for part in parts:
        part.requires_grad_(True)


def find_part(model: PreTrainedModel, name: str, key: str) -> Any:
    """Return the part of a model, a module or a parameter, that the value `name` of an option names."""
    part: Any = model
    for step in name.split("."):
        part = getattr(part, step, None)
    if part is None:
        parts = [part for part, _ in [*model.named_children(), *model.named_parameters(recurse=False)]]
        raise ValueError(f"{key}: {type(model).__name__} has no part {name!r}; its parts are {parts}")
    return part


def merge_lora(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the model with the adapters merged into the weights, or the model itself if it has none."""
    if not any(isinstance(module, TUNED) for module in model.modules()):
        return model
    merged = copy.deepcopy(model)
    layers: dict[str, Any] = {
        path: module for path, module in merged.named_modules() if isinstance(module, TUNED) or _is_quantized(module)
    }
    for path, layer in layers.items():
        if isinstance(layer, ModulesToSaveWrapper):
            merged.set_submodule(path, layer.modules_to_save[layer.active_adapters[0]])
        elif not path.endswith(".base_layer"):
            base = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer
            if _is_quantized(base):  # merged as what it was, not quantised again
                base = _whole_layer(base, layer)
            else:
                layer.merge()
            merged.set_submodule(path, base)
    for module in merged.modules():  # else peft would still expect the adapters, and transformers the quantisation
        for name in ("peft_config", "hf_quantizer"):
            vars(module).pop(name, None)
        config: Any = getattr(module, "config", None)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    return merged


def merge_lora_weights(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Merge the adapters of a model that is sharded over devices.

    Args:
        model: Says which layers have adapters; its own weights are not read.
        weights: Its whole weights by name.

    Returns:
        The weights of the model without adapters.

    Raises:
        ValueError: An adapted layer is quantised.
    """
    if not any("lora_" in name for name in weights):
        return weights
    merged = {name.replace(".base_layer.", "."): value for name, value in weights.items() if ".lora_" not in name}
    for path, layer in model.named_modules():
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


def _is_quantized(module: nn.Module) -> bool:
    """Whether a linear layer has its weights in 4 or 8 bits."""
    return isinstance(module, nn.Linear) and not module.weight.is_floating_point()


def _whole_layer(base: Any, layer: Any) -> nn.Linear:
    """Return a plain layer with the weights of a quantised one, plus the update of adapters on it."""
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    base.state_dict()  # restores the common weight layout if the CPU used another
    weight = dequantize_bnb_weight(base.weight, getattr(base, "state", None)).float()
    for name in layer.active_adapters if isinstance(layer, BaseTunerLayer) else ():
        weight += layer.get_delta_weight(name)
    plain = nn.Linear(base.in_features, base.out_features, base.bias is not None, device="meta")
    plain.weight = nn.Parameter(weight.to(getattr(base, "compute_dtype", None) or torch.float16), requires_grad=False)
    plain.bias = base.bias
    return plain


def save_adapter(model: MllmRetrieverModel, folder: str | Path, base: str) -> None:
    """Save the adapters of an embedder's language model for PEFT, beside the embedder that they adapt.

    `AutoPeftModel.from_pretrained(folder)` loads both; PEFT loads them on `AutoModelForImageTextToText`, and
    sentence-transformers on the same base. vLLM knows the layers by the names of this class alone, and passes over
    others. On `AutoModel`, whose layers have other names, PEFT warns of missing keys and adapts nothing.

    Args:
        model: The embedder with adapters, with all its layers.
        folder: Where to write.
        base: A folder or the name of a repository on the Hub.

    Raises:
        ValueError: The language model has no adapters.
    """
    layers = {path: module for path, module in model.text_model.named_modules() if isinstance(module, LoraLayer)}
    configs: dict[str, LoraConfig] = vars(model).get("peft_config", {})
    if not configs or not layers:
        raise ValueError("the language model has no adapters")
    (config,) = copy.deepcopy(configs).values()
    names = sorted({path.rpartition(".")[2] for path in layers})
    config.target_modules = rf".*language_model\.layers\..*\.({'|'.join(names)})"
    config.base_model_name_or_path = base
    config.auto_mapping = {"base_model_class": BASE_CLASS, "parent_library": "transformers"}
    config.save_pretrained(str(folder))
    weights = get_peft_model_state_dict(model)
    prefix, own = "base_model.model.model.language_model.", "language_model."
    tensors = {prefix + name.partition(own)[2]: value.contiguous().cpu() for name, value in weights.items()}
    save_file(tensors, Path(folder) / "adapter_model.safetensors", {"format": "pt"})
