"""Shortcuts of MLLM retrievers: one readout in the last layer, and one pass for all views.

They rely on parts of transformers that may change, so each compares its vectors with those of the plain path before it
is used. The code of an exported folder has the plain path alone.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.models.mllm_retriever.modeling_mllm_retriever import DEEPSTACK_INPUTS, ImageFeatures, Prompts
from conjoin.models.mllm_retriever.prompt_rows import move_to_front

LAST_LAYER, VIEWS = "last layer for the readout alone", "all views in one pass"
LANGUAGE_MODELS = ("llama", "mistral", "qwen2", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3", "qwen3_vl_text")
"""Their layers are alike: norm, attention with rotary heads, norm, feed-forward."""
MASKED = ("eager", "sdpa")
"""Implementations of attention that accept a mask of pairs of tokens."""
LEAST_SAVED_TOKENS = 256
"""What fewer tokens cost is not worth the test."""
GROUP_TOKENS = 1024
"""About how many tokens of prompts a CPU trains on at once."""
TOLERANCE = 1e-4
"""Distance of unit vectors in the test, in float32 or better: rounding makes 2e-6 of it, a break 1e-3 or more."""


def use_shortcuts(model: nn.Module, enabled: bool = True) -> None:
    """Let an MLLM retriever use its shortcuts, or no longer; other models stay as they are."""
    if not isinstance(model, MllmRetrieverModel):
        return
    language: Any = model.config.get_text_config()
    is_known = language.model_type in LANGUAGE_MODELS and language.to_dict().get("sliding_window") is None
    if not enabled or not is_known or model.config.readout == "mean":
        model.shortcuts = None
    elif model.shortcuts is None:
        model.shortcuts = Shortcuts()


@contextmanager
def without_shortcuts(model: MllmRetrieverModel) -> Iterator[None]:
    """Run all tokens through all layers, for hooks that need their states."""
    shortcuts, model.shortcuts = model.shortcuts, None
    try:
        yield
    finally:
        model.shortcuts = shortcuts


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, undone module by module afterwards (some parts may be frozen in evaluation mode)."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Use an implementation of attention, such as `"eager"`, which returns its weights."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class Shortcuts:
    """Computes the states of an MLLM retriever at the readout positions; `use_shortcuts` gives each model its own.

    Args:
        works: Whether to use a shortcut. The others are tested before their first use.
        least_saved_tokens: Run the last layer for the readout alone if this saves as many tokens.
    """

    def __init__(self, works: dict[str, bool] | None = None, least_saved_tokens: int = LEAST_SAVED_TOKENS) -> None:
        self.works = dict(works or {})
        self.least_saved_tokens = least_saved_tokens

    def __call__(self, model: MllmRetrieverModel, prompts: Prompts, masks: list[Tensor]) -> Tensor:
        """Return the normed states `(V * N, D)` of V views, given the tokens `(N, T)` of each."""
        together = self._read_together(model, prompts, torch.stack(masks)) if len(masks) > 1 else None
        if together is not None:
            return together
        return torch.cat([self._read_view(model, *prompts.only(mask)) for mask in masks])

    def _read_view(self, model: MllmRetrieverModel, view: Prompts, lengths: Tensor) -> Tensor:
        """Return the states `(N, D)` of one view; in training on a CPU, prompts of similar lengths run together."""
        at = model.readout_positions(view, lengths)
        if not _needs_gradient(model) or at.device.type != "cpu":
            return self._read(model, view, at)
        order = lengths.argsort()
        groups = order.split(max(1, GROUP_TOKENS // view.input_ids.shape[1]))
        parts = [(_rows(view, rows, int(lengths[rows[-1]])), at[rows]) for rows in groups]
        return torch.cat([self._read(model, *part) for part in parts])[order.argsort()]

    def _read(self, model: MllmRetrieverModel, view: Prompts, at: Tensor) -> Tensor:
        """Return the states `(N, D)` of prompts at the positions `at` `(N,)`."""
        language: Any = model.text_model
        inputs = model.language_inputs(view)
        saves = view.input_ids.numel() - len(at) >= self.least_saved_tokens
        images_end = len(inputs.get(DEEPSTACK_INPUTS[1], ()))  # layers that image features follow
        is_last_alone = saves and images_end < len(language.layers) and self._is_right(LAST_LAYER, model)
        if is_last_alone:
            make_readable(language.layers[-1])
            return model.norm(language(**inputs, readout=at).last_hidden_state[:, 0])
        return model.norm(_at(language(**inputs).last_hidden_state, at))

    def _read_together(self, model: MllmRetrieverModel, prompts: Prompts, masks: Tensor) -> Tensor | None:
        """Return the states `(V * N, D)` of views `(V, N, T)` from one pass of the language model.

        None if a token of two views stands behind one that only one of them has: its states differ.
        """
        differ = (masks[:, None] != masks).cumsum(-1) > 0
        can_pack = model.text_model.config._attn_implementation in MASKED
        if not can_pack or bool((masks[:, None] & masks & differ).any()) or not self._is_right(VIEWS, model):
            return None
        (ids, rows, *views), _ = move_to_front(masks.any(0), prompts.input_ids, prompts.image_rows, *masks)
        packed = prompts._replace(input_ids=ids, image_rows=rows)
        positions, readouts = torch.zeros_like(ids), []
        for view in views:
            alone, lengths = packed.only(view)
            own, count = model.positions(alone), view.cumsum(1)
            spread = own.gather(-1, (count - 1).clamp(min=0).expand(*own.shape[:-1], -1))
            positions = torch.where(view, spread, positions)
            readouts.append((count > model.readout_positions(alone, lengths)[:, None]).int().argmax(1))
        members = torch.stack(views)
        seen = (~members[..., None] | members[:, :, None]).all(0).tril()
        seen.diagonal(dim1=1, dim2=2).fill_(True)  # so that padding sees something
        inputs = model.language_inputs(packed, positions)
        mask = torch.zeros_like(seen, dtype=inputs["inputs_embeds"].dtype)
        mask = mask.masked_fill(~seen, torch.finfo(mask.dtype).min)[:, None]
        states = model.text_model(**inputs, attention_mask=mask).last_hidden_state
        return model.norm(torch.cat([_at(states, at) for at in readouts]))

    def _is_right(self, name: str, model: MllmRetrieverModel) -> bool:
        """Whether a shortcut gives the vectors of the plain path, together with those that are in use already."""
        if name not in self.works:
            trial = Shortcuts(dict.fromkeys((LAST_LAYER, VIEWS), False) | self.works | {name: True}, 1)
            try:
                distance = _distance(model, trial, all_views=name == VIEWS)
                problem = "" if distance <= TOLERANCE else f"vectors change by {distance:.0e}"
            except Exception as error:  # such as a name that is no longer there
                problem = repr(error)
            self.works[name] = not problem
            if problem:
                version = transformers.__version__
                warnings.warn(f"shortcut off, {name}: with transformers {version}, {problem}", stacklevel=2)
        return self.works[name]


def make_readable(layer: nn.Module) -> None:
    """Let a decoder layer accept `readout`, positions `(N,)`, and return the states there, `(N, 1, D)`.

    Without `readout` the layer works as before. Its parameters and their names do not change.
    """
    if not isinstance(layer.forward, partial):
        layer.forward = partial(_read_last_layer, layer, layer.forward)


def _read_last_layer(layer: Any, forward: Any, hidden_states: Tensor, readout: Any = None, **kwargs: Any) -> Tensor:  # noqa: ANN401
    """Run a decoder layer on `(N, T, D)`, at one position per row if given: all keys and values, one query."""
    if readout is None:
        return forward(hidden_states, **kwargs)
    attention = layer.self_attn
    parts = dict(attention.named_children())  # Qwen3 normalises its heads
    angles = [table.expand(len(readout), -1, -1) for table in kwargs["position_embeddings"]]
    normed = layer.input_layernorm(hidden_states)

    def heads(name: str, states: Tensor) -> Tensor:
        """Project `states` to heads `(N, heads, tokens, d)`."""
        split = parts[f"{name}_proj"](states).unflatten(-1, (-1, attention.head_dim))
        return parts.get(f"{name}_norm", nn.Identity())(split).transpose(1, 2)

    normed_there, *angles_there = (_at(table, readout)[:, None] for table in (normed, *angles))
    query = _rotate(heads("q", normed_there), *angles_there)
    key, value = _rotate(heads("k", normed), *angles), heads("v", normed)
    seen = torch.arange(key.shape[2], device=readout.device) <= readout[:, None, None, None]
    grouped = query.reshape(len(readout), key.shape[1], -1, attention.head_dim)  # group the heads that share keys
    attended = F.scaled_dot_product_attention(grouped, key, value, attn_mask=seen, scale=attention.scaling)
    states = _at(hidden_states, readout) + attention.o_proj(attended.flatten(1))
    return (states + layer.mlp(layer.post_attention_layernorm(states)))[:, None]


def _rows(view: Prompts, rows: Tensor, end: int) -> Prompts:
    """Return the first tokens of some prompts."""
    grids = None if view.grids is None else view.grids[rows]
    return Prompts(view.input_ids[rows, :end], view.image_rows[rows, :end], view.features, grids)


def _needs_gradient(model: nn.Module) -> bool:
    return model.training or torch.is_grad_enabled()


def _at(states: Tensor, at: Tensor) -> Tensor:
    """Return the states `(N, D)` at the positions `(N,)` of `(N, T, D)`."""
    return states[torch.arange(len(at), device=at.device), at]


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to `(N, heads, T, d)`, by angles `(N, T, d)`."""
    first, second = states.chunk(2, dim=-1)
    return states * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


@torch.compiler.disable
@torch.no_grad()
def _distance(model: MllmRetrieverModel, shortcuts: Shortcuts, all_views: bool) -> float:
    """Return how far the vectors of two short prompts are from those of the plain path."""
    attention = model.text_model.config._attn_implementation
    attention = attention if attention in MASKED else "sdpa"  # others, such as FlashAttention, compute in 16 bits
    precise = torch.autocast(model.device.type, enabled=False), _Precise()
    with evaluation_mode(model), attention_implementation(model.text_model, attention), precise[0], precise[1]:
        prompts, masks = _short_prompts(model)
        masks = masks if all_views else masks[2:]
        plain = torch.cat([model.read_view(prompts, mask)[0] for mask in masks])
        difference = F.normalize(shortcuts(model, prompts, masks)) - F.normalize(plain)
        return float(difference.norm(dim=1).max())


class _Precise(TorchFunctionMode):
    """Computes in float32, whatever the type of the weights; on a GPU, where that may be TF32, in float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if function is not F.embedding:  # its table is large
            args, kwargs = self._convert(args), {name: self._convert(each) for name, each in (kwargs or {}).items()}
        return function(*args, **(kwargs or {}))

    def _convert(self, value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, list | tuple):
            return type(value)(map(self._convert, value))
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.to(torch.float64 if value.is_cuda or value.dtype == torch.float64 else torch.float32)


def _short_prompts(model: MllmRetrieverModel) -> tuple[Prompts, list[Tensor]]:
    """Return two prompts of different lengths that begin alike, each with an image, and the tokens of its views."""
    config: Any = model.config.backbone_config
    image, ret = config.image_token_id, model.config.ret_token_id
    words = [token for token in range(20) if token not in (image, ret)]
    end = words[0] if ret is None else ret
    rows = [[*words[:4], *[image] * 4, end, *text, end, *text, end] for text in (words[4:6], words[6:8])]
    masks = [torch.tensor([[part in view for part in "aaaabbbbitttfff"]] * 2) for view in ("abi", "at", "abf")]
    for mask in masks:
        mask[0, 3] = False
    input_ids = torch.tensor(rows)
    is_image = input_ids == image
    image_rows = is_image.flatten().cumsum(0).view_as(input_ids).masked_fill(~is_image, 0)
    features = model.get_input_embeddings()(torch.tensor(words[8:16], device=model.device))
    levels = min(2, config.get_text_config().num_hidden_layers - 1) if config.model_type == "qwen3_vl" else 0
    side = 2 * config.vision_config.spatial_merge_size if config.model_type.startswith("qwen") else 0
    grids = torch.tensor([[[1, side, side]]] * 2, device=model.device) if side else None
    input_ids, image_rows, *masks = (each.to(model.device) for each in (input_ids, image_rows, *masks))
    return Prompts(input_ids, image_rows, ImageFeatures(features, [features] * levels), grids), masks


__all__ = ["Shortcuts", "attention_implementation", "evaluation_mode", "use_shortcuts", "without_shortcuts"]
