"""The images of a batch as pixel rows: patches in Qwen-VL, pictures or tiles elsewhere."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


class Picture(NamedTuple):
    """An image: its pixel rows `(P, ...)`, for Qwen its patch grid `(1, 3)`, and its number of tokens."""

    pixels: Tensor
    grid: Tensor | None
    tokens: int


def pad_pixels(images: Sequence[Sequence[Picture]], num_tokens: int) -> dict[str, Tensor]:
    """Return the pixel rows of each item as one row of a batch, given the images of each item.

    The names and shapes are such that sentence-transformers' gradient cache cuts the batch along its items. It takes
    `image_grid_thw` for the grids of a flat list of images, and dimension 1 of every tensor for tokens if its size is
    `num_tokens`, the length of the prompts.

    Returns:
        `pixel_values` `(N, P, ...)`, `pixel_attention_mask` `(N, P)` and, for Qwen, `image_grids` `(N, I, 3)`; nothing
        if there are no images.
    """
    first = next((image for some in images for image in some), None)
    if first is None:
        return {}
    rows = [torch.cat([first.pixels[:0], *(image.pixels for image in some)]) for some in images]
    lengths = torch.tensor([len(each) for each in rows])
    pixels = pad_sequence(rows, batch_first=True)
    if pixels.shape[1] == num_tokens:
        pixels = torch.cat([pixels, torch.zeros_like(pixels[:, :1])], dim=1)
    batch = {"pixel_values": pixels, "pixel_attention_mask": torch.arange(pixels.shape[1]) < lengths[:, None]}
    if first.grid is not None:
        none = first.grid[:0]
        grids = [torch.cat([none, *(image.grid for image in some if image.grid is not None)]) for some in images]
        batch["image_grids"] = pad_sequence(grids, batch_first=True)
    return batch


__all__ = ["Picture", "pad_pixels"]
