"""One pass of an MLLM retriever for all views of a batch (GCL): prompts that begin alike share their tokens.

It relies on the masks of pairs of tokens that transformers accepts, which may change, so it compares its vectors with
those of the plain path before its first use. The code of an exported folder has the plain path alone.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.models.mllm_retriever.modeling_mllm_retriever import ImageFeatures, Prompts
from conjoin.models.mllm_retriever.prompt_rows import move_to_front

MASKED = ("eager", "sdpa")
"""Implementations of attention that accept a mask of pairs of tokens."""
TOLERANCE = 1e-4
"""Distance of unit vectors in the test, in float32 or better: rounding makes 2e-6 of it, a break 1e-3 or more."""


def use_shortcuts(model: nn.Module, enabled: bool = True) -> None:
    """Let an MLLM retriever read all views in one pass, or no longer; other models stay as they are."""
    if not isinstance(model, MllmRetrieverModel):
        return
    has_window = model.config.get_text_config().to_dict().get("sliding_window") is not None
    if not enabled or has_window or model.config.readout == "mean":
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
    if training:
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
        works: Whether all views are read in one pass; None tests it before the first use.
    """

    def __init__(self, works: bool | None = None) -> None:
        self.works = works

    def __call__(self, model: MllmRetrieverModel, prompts: Prompts, masks: list[Tensor]) -> Tensor:
        """Return the normed states `(V * N, D)` of V views, given the tokens `(N, T)` of each."""
        together = self._read_together(model, prompts, torch.stack(masks)) if len(masks) > 1 else None
        if together is not None:
            return together
        return torch.cat([model.read_view(prompts, mask)[0] for mask in masks])

    def _read_together(self, model: MllmRetrieverModel, prompts: Prompts, masks: Tensor) -> Tensor | None:
        """Return the states `(V * N, D)` of views `(V, N, T)` from one pass of the language model.

        None if a token of two views stands behind one that only one of them has: its states differ.
        """
        differ = (masks[:, None] != masks).cumsum(-1) > 0
        can_pack = model.text_model.config._attn_implementation in MASKED
        if not can_pack or bool((masks[:, None] & masks & differ).any()) or not self._is_right(model):
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

    def _is_right(self, model: MllmRetrieverModel) -> bool:
        """Whether the pass gives the vectors of the plain path."""
        if self.works is None:
            try:
                distance = _distance(model, Shortcuts(works=True))
                problem = "" if distance <= TOLERANCE else f"vectors change by {distance:.0e}"
            except Exception as error:  # such as a name that is no longer there
                problem = repr(error)
            self.works = not problem
            if problem:
                version = transformers.__version__
                warnings.warn(f"each view is read alone: with transformers {version}, {problem}", stacklevel=2)
        return self.works


def _at(states: Tensor, at: Tensor) -> Tensor:
    """Return the states `(N, D)` at the positions `(N,)` of `(N, T, D)`."""
    return states[torch.arange(len(at), device=at.device), at]


@torch.compiler.disable
@torch.no_grad()
def _distance(model: MllmRetrieverModel, shortcuts: Shortcuts) -> float:
    """Return how far the vectors of two short prompts are from those of the plain path."""
    attention = model.text_model.config._attn_implementation
    attention = attention if attention in MASKED else "sdpa"  # others, such as FlashAttention, compute in 16 bits
    precise = torch.autocast(model.device.type, enabled=False), _Precise()
    with evaluation_mode(model), attention_implementation(model.text_model, attention), precise[0], precise[1]:
        prompts, masks = _short_prompts(model)
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
