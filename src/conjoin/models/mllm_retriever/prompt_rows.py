"""Prompts of a batch `(N, T)`: the tokens of a view, the position to read, and several views in one pass."""

from collections.abc import Sequence
from typing import NamedTuple

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


class PackedViews(NamedTuple):
    """The tokens of all views of N items, in front.

    Args:
        input_ids: `(N, T)`.
        image_rows: `(N, T)` number of each image token, 0 elsewhere.
        members: `(V, N, T)` bool, the tokens of each view.
    """

    input_ids: Tensor
    image_rows: Tensor
    members: Tensor

    @property
    def visible(self) -> Tensor:
        """`(N, T, T)` bool, whether a token sees another; every token sees itself."""
        length = self.input_ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.input_ids.device).tril()
        shared = torch.stack([~view[:, :, None] | view[:, None] for view in self.members]).all(0)
        return (shared & causal) | torch.eye(length, dtype=torch.bool, device=causal.device)

    def additive_mask(self, dtype: torch.dtype) -> Tensor:
        """`(N, 1, T, T)` zero where a token sees another, else the least number of the dtype."""
        visible = self.visible[:, None]
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(
            ~visible, torch.finfo(dtype).min
        )

    def view(self, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return a view in front: ids, image rows, lengths `(N,)`, and where its tokens are, `(N, T')`."""
        indices = torch.arange(self.input_ids.shape[1], device=self.input_ids.device).expand_as(self.input_ids)
        (ids, rows, indices), lengths = move_to_front(self.members[number], self.input_ids, self.image_rows, indices)
        return ids, rows, lengths, indices

    def join(self, positions: Sequence[Tensor]) -> Tensor:
        """Join the positions `(..., N, T')` of the tokens of each view to `(..., N, T)`."""
        joined = positions[0].new_zeros(*positions[0].shape[:-1], self.input_ids.shape[1])
        for member, view_positions in zip(self.members, positions, strict=True):
            number = (member.cumsum(1) - 1).clamp(min=0).expand(*view_positions.shape[:-1], -1)
            joined = torch.where(member, view_positions.gather(-1, number), joined)
        return joined


def pack_views(input_ids: Tensor, image_rows: Tensor, masks: Sequence[Tensor]) -> PackedViews | None:
    """Pack the views of a batch; None if a shared token stands behind a token that only some of its views have.

    Such a token has another state in each view. In a prompt whose image comes first, views share a prefix only.

    Args:
        input_ids: `(N, T)`.
        image_rows: `(N, T)`.
        masks: The tokens `(N, T)` of each view.
    """
    members = torch.stack([mask.bool() for mask in masks])
    for number, view in enumerate(members):
        for other in members[number + 1 :]:
            differs = (view != other).cumsum(1) > 0
            if bool((view & other & differs).any()):
                return None
    (ids, rows, *moved), _ = move_to_front(members.any(0), input_ids, image_rows, *members)
    return PackedViews(ids, rows, torch.stack(moved))


__all__ = [
    "VIEWS",
    "WITHOUT_RET",
    "PackedViews",
    "mean_state",
    "move_to_front",
    "pack_views",
    "readout_positions",
    "view_mask",
]
