"""Patch grids of the images of a batch."""

from torch import Tensor

PATCHES_AT_ONCE = 2048
"""Patches per pass of the vision tower on a CPU; an image with more is processed alone."""


def images_at_once(num_patches: list[int]) -> list[int]:
    """Return the sizes of consecutive groups of images to run together, given each image's patch count."""
    groups, taken = [0], 0
    for patches in num_patches:
        if groups[-1] and taken + patches > PATCHES_AT_ONCE:
            groups.append(0)
            taken = 0
        groups[-1] += 1
        taken += patches
    return groups


def existing_grids(grid: Tensor) -> Tensor:
    """Return the grids `(I, 3)` of existing images in the padded `(N, I', 3)`."""
    grid = grid.flatten(0, 1)
    return grid[grid.prod(1) > 0]


__all__ = ["existing_grids", "images_at_once"]
