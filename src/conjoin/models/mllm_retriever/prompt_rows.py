"""Prompts of a batch `(N, T)`: the tokens of a view, and the position to read."""

import torch
from torch import Tensor

VIEWS = ("image", "text", "fused")
WITHOUT_RET = ("last", "mean")
"""Readouts that need no [RET]."""


def view_mask(masks: dict[str, Tensor | None], view: str) -> Tensor:
    """Return the mask `(N, T)` of the tokens of a view.

    Raises:
        ValueError: The view is unknown or not in the batch.
    """
    if view not in masks:
        raise ValueError(f"unknown view {view!r}; expected one of {VIEWS}")
    mask = masks[view]
    if mask is None:
        raise ValueError(f"view {view!r} was asked for, but no item of the batch has it")
    return mask


def move_to_front(mask: Tensor, *tensors: Tensor) -> tuple[list[Tensor], Tensor]:
    """Move the entries where `mask` is True to the front of each row of `(N, T)` tensors, and pad with zeros.

    Returns:
        The tensors `(N, T')`, where `T'` is the longest row, and the number of entries of each row `(N,)`.
    """
    lengths = mask.sum(1)
    order = (~mask).int().argsort(dim=1, stable=True)[:, : int(lengths.max())]
    kept = mask.gather(1, order)
    return [tensor.gather(1, order).masked_fill(~kept, 0) for tensor in tensors], lengths


def mean_state(states: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean `(N, D)` of the first `lengths` `(N,)` of the states `(N, T, D)` of each row."""
    is_prompt = torch.arange(states.shape[1], device=states.device) < lengths[:, None]
    return ((states.float() * is_prompt[..., None]).sum(1) / lengths[:, None]).to(states.dtype)


def readout_positions(input_ids: Tensor, lengths: Tensor, readout: str, ret_token_id: int | None) -> Tensor:
    """Return readout positions `(N,)` in ids `(N, T)`, of which the first `lengths` `(N,)` are the prompt.

    Raises:
        ValueError: A prompt lacks [RET].
    """
    if readout == "last":
        return lengths - 1
    numbers = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)
    is_ret = (input_ids == ret_token_id) & (numbers <= lengths[:, None])
    last = (is_ret * numbers).amax(1) - 1
    without = (last < 0).nonzero().flatten().tolist()
    if without:
        raise ValueError(
            f"no [RET] (token id {ret_token_id}) in the prompts of rows {without[:5]}: "
            "was the tokenizer changed, or is the processor for another model?"
        )
    return (last - 1).clamp(min=0) if readout == "before_token" else last


__all__ = ["VIEWS", "WITHOUT_RET", "mean_state", "move_to_front", "readout_positions", "view_mask"]
