"""The patch projection of a vision tower as a matrix product instead of a convolution."""

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn


def project_by_product(module: nn.Module) -> None:
    """Make every non-overlapping `Conv3d` of a vision tower project single patches by one matrix product.

    PyTorch's convolution of patches is several times slower on a CPU, and up to thousands of times on some GPUs.
    Parameters and their names do not change.
    """
    for child in module.modules():
        if not isinstance(child, nn.Conv3d) or child.stride != child.kernel_size:
            continue
        if child.groups == 1 and child.padding == (0, 0, 0):
            child.forward = partial(_project, child)  # type: ignore[method-assign]


def _project(convolution: nn.Conv3d, pixels: Tensor) -> Tensor:
    """Project patches `(R, in, *kernel_size)` to `(R, out, 1, 1, 1)`; convolve inputs of any other shape."""
    if tuple(pixels.shape[2:]) != convolution.kernel_size:
        return type(convolution).forward(convolution, pixels)
    return F.linear(pixels.flatten(1), convolution.weight.flatten(1), convolution.bias)[..., None, None, None]


__all__ = ["project_by_product"]
