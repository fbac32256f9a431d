"""What models on a vision and a text tower share."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

VIEWS = ("image", "text", "fused")


@dataclass
class TowersOutput(ModelOutput):
    """Output of a model for `N` items (times the requested views).

    Args:
        embeddings: `(N, d)` float32, L2-normalised, for indexing and comparison.
        pooler_output: `(N, d)` state before normalisation, the input of losses.
        hidden_states: On request, the states of the encoder that reads both modalities, `(N, S, d)` each.
        attentions: On request, its attention weights, `(N, heads, S, S)` each.
    """

    embeddings: Tensor | None = None
    pooler_output: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class TowersModel(PreTrainedModel):
    """A vision tower, `vision_model`, and a text tower, `text_model`."""

    main_input_name = "pixel_values"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False
    _supports_sdpa = True
    _supports_flash_attn = True
    vision_model: Any
    text_model: Any

    def get_input_embeddings(self) -> nn.Module:
        """Return the text tower's token embeddings."""
        return self.text_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the text tower's token embeddings."""
        self.text_model.set_input_embeddings(value)

    def read_vision_layer(self, pixel_values: Tensor) -> tuple[Tensor, Tensor | None, int]:
        """Return the vision tower's states at `vision_hidden_layer`, its pooled state, and the number of patches.

        The states `(N, prefix + P, h)` start with CLS and register tokens if the tower has them.
        """
        from_layer = self.config.vision_hidden_layer is not None
        pixel_values = pixel_values.to(self.vision_model.dtype)
        output = self.vision_model(pixel_values=pixel_values, output_hidden_states=from_layer)
        states = output.hidden_states[-1] if from_layer else output.last_hidden_state
        patch = self.config.vision_config.patch_size
        return states, output.pooler_output, (pixel_values.shape[-2] // patch) * (pixel_values.shape[-1] // patch)


def build_tower(config: PreTrainedConfig, depth: int | None = None) -> PreTrainedModel:
    """Build an untrained tower of `depth` layers; a smaller one than `config` says has a copy of it.

    It has no BERT-like pooling head, and its mask tokens are buffers; both are unused here.
    """
    if depth not in (None, config.num_hidden_layers):
        config = copy.deepcopy(config)
        config.num_hidden_layers = depth
    known: Any = AutoModel._model_mapping  # without SigLIP's text tower
    name = type(config).__name__.removesuffix("Config") + "Model"
    tower = (known[type(config)] if type(config) in known else getattr(transformers, name))(config)
    if "pooler" in dict(tower.named_children()):
        tower.register_module("pooler", None)
    for path, parameter in list(tower.named_parameters()):
        owner, _, name = path.rpartition(".")
        if name == "mask_token":
            delattr(tower.get_submodule(owner), name)
            tower.get_submodule(owner).register_buffer(name, parameter.data)
    return tower


def on_rows(tower: Callable[..., Tensor], mask: Tensor | None, *inputs: Tensor) -> Tensor:
    """Run `tower` only on the rows where `mask` is True; the other rows of the result are zero."""
    if mask is None:
        return tower(*inputs)
    rows = mask.bool().nonzero().squeeze(1)
    features = tower(*(tensor[rows if len(rows) else slice(1)] for tensor in inputs))
    if not len(rows):  # the modality is absent; one row has run, since towers reject an empty batch
        features = features.detach()[:0]
    return features.new_zeros(len(mask), *features.shape[1:]).index_copy(0, rows, features)


def parts_of(parts: dict[str, Any], view: str) -> list[Any]:
    """Return the parts of a view, of those of a batch by modality.

    Raises:
        ValueError: The batch is empty, or the view is unknown or not in it.
    """
    if not parts:
        raise ValueError("the batch has neither images (pixel_values) nor texts (input_ids)")
    if view not in VIEWS:
        raise ValueError(f"unknown view {view!r}; expected one of {VIEWS}")
    chosen = [part for name, part in parts.items() if view in ("fused", name)]
    if not chosen:
        raise ValueError(f"view {view!r} was asked for, but no item of the batch has it")
    return chosen


def outputs_to_record(config: PreTrainedConfig, views: Sequence[str], **wanted: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return `output_attentions` and `output_hidden_states` if they are wanted, by argument or configuration.

    Raises:
        ValueError: They are wanted for several views.
    """
    wanted = {name: getattr(config, name) if value is None else value for name, value in wanted.items()}
    record = {name: value for name, value in wanted.items() if value is not False}
    if record and len(views) > 1:
        raise ValueError(f"{' and '.join(record)} need a single view, got {tuple(views)}")
    return record


__all__ = ["VIEWS", "TowersModel", "TowersOutput", "build_tower", "on_rows", "outputs_to_record", "parts_of"]
