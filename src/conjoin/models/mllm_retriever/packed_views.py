"""Several views of each item in one pass of the language model: the tokens that views share run once.

The tokens of an item's views lie in one row. A token sees the earlier tokens of its own views, as in that view alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .prompt_rows import move_to_front


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
        places = torch.arange(self.input_ids.shape[1], device=self.input_ids.device).expand_as(self.input_ids)
        (ids, rows, places), lengths = move_to_front(self.members[number], self.input_ids, self.image_rows, places)
        return ids, rows, lengths, places

    def join(self, positions: Sequence[Tensor]) -> Tensor:
        """Join the positions `(..., N, T')` of the tokens of each view to `(..., N, T)`."""
        joined = positions[0].new_zeros(*positions[0].shape[:-1], self.input_ids.shape[1])
        for member, own in zip(self.members, positions, strict=True):
            number = (member.cumsum(1) - 1).clamp(min=0).expand(*own.shape[:-1], -1)
            joined = torch.where(member, own.gather(-1, number), joined)
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
    (ids, rows, *found), _ = move_to_front(members.any(0), input_ids, image_rows, *members)
    return PackedViews(ids, rows, torch.stack(found))


__all__ = ["PackedViews", "pack_views"]
