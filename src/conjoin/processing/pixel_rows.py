"""The images of a batch as pixel rows: patches in Qwen-VL, pictures or tiles elsewhere."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


class Pictures(NamedTuple):
    """The images of a batch: the pixel rows of all images, and the number of rows and of tokens of each image."""

    tensors: dict[str, Tensor]
    rows: list[int]
    tokens: list[int]


def pad_pixels(pictures: Pictures, counts: list[int], num_tokens: int) -> dict[str, Tensor]:
    """Return the pixel rows of each item as one row of a batch, given each item's number of images.

    The names and shapes are such that sentence-transformers' gradient cache cuts the batch along its items. It takes
    `image_grid_thw` for the grids of a flat list of images, and dimension 1 of every tensor for tokens if its size is
    `num_tokens`, the length of the prompts.

    Returns:
        `pixel_values` `(N, P, ...)`, `pixel_attention_mask` `(N, P)` and, for Qwen, `image_grids` `(N, I, 3)`; nothing
        if there are no images.
    """
    if not pictures.rows:
        return {}
    rows = iter(pictures.rows)
    lengths = torch.tensor([sum(next(rows) for _ in range(count)) for count in counts])
    pixels = pad_sequence(pictures.tensors["pixel_values"].split(lengths.tolist()), batch_first=True)
    if pixels.shape[1] == num_tokens:
        pixels = torch.cat([pixels, torch.zeros_like(pixels[:, :1])], dim=1)
    batch = {"pixel_values": pixels, "pixel_attention_mask": torch.arange(pixels.shape[1]) < lengths[:, None]}
    if "image_grid_thw" in pictures.tensors:
        batch["image_grids"] = pad_sequence(pictures.tensors["image_grid_thw"].split(counts), batch_first=True)
    return batch


__all__ = ["Pictures", "pad_pixels"]
