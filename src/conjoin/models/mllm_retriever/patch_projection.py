"""The first layer of a vision tower that is given patches, not pictures: a product, not a convolution."""

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn


def project_by_product(module: nn.Module) -> None:
    """Let every `Conv3d` of a vision tower whose windows do not overlap take single patches by one matrix product.

    PyTorch's convolution takes several times as long for them on a CPU, and up to thousands of times on some GPUs.
    Parameters and their names stay what they are.
    """
    for child in module.modules():
        if not isinstance(child, nn.Conv3d) or child.stride != child.kernel_size:
            continue
        if child.groups == 1 and child.padding == (0, 0, 0):
            child.forward = partial(_project, child)  # type: ignore[method-assign]


def _project(convolution: nn.Conv3d, pixels: Tensor) -> Tensor:
    """`(R, out, 1, 1, 1)` of patches `(R, in, *kernel_size)`; anything else goes through the convolution."""
    if tuple(pixels.shape[2:]) != convolution.kernel_size:
        return type(convolution).forward(convolution, pixels)
    return F.linear(pixels.flatten(1), convolution.weight.flatten(1), convolution.bias)[..., None, None, None]


__all__ = ["project_by_product"]
