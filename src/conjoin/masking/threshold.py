"""The threshold between intersection and difference: where two Gaussians are equally dense (SOLAR App. C.1)."""

from typing import NamedTuple

import torch
from torch import Tensor


class Threshold(NamedTuple):
    """A threshold on scores.

    Args:
        threshold: 0-d.
        fallback: 0-d bool: the densities are not equal anywhere between the means, and the threshold is the midpoint.
    """

    threshold: Tensor
    fallback: Tensor


def qda_threshold(
    positive_mean: Tensor | float,
    positive_std: Tensor | float,
    negative_mean: Tensor | float,
    negative_std: Tensor | float,
) -> Threshold:
    """The score between the means at which N(mean+, std+) and N(mean-, std-) are equally dense (SOLAR Eq. 6-10).

    Eq. 7 prints +b where the roots of its quadratic have -b. There is at most one root between the means, and it is
    the one nearer to their midpoint; it is computed without cancellation, so equal deviations are no special case.
    It falls back to the midpoint if there is no such root: the positive mean does not exceed the negative one, a
    deviation is zero, or one Gaussian is denser than the other all the way. No gradient flows. Tensors may be of any
    one shape (one threshold per entry), and nothing waits for a GPU.
    """
    values = (positive_mean, positive_std, negative_mean, negative_std)
    high, high_std, low, low_std = (
        value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64) for value in values
    )
    middle, half = (high + low) / 2, (high - low) / 2
    usable = (half > 0) & (high_std > 0) & (low_std > 0)
    # In units where the means are 1 and -1: a x^2 + 2 h x + c = 0.
    high_variance, low_variance = ((std / torch.where(usable, half, 1.0)).square() for std in (high_std, low_std))
    log_ratio = torch.where(usable, low_std / high_std, 1.0).log()
    a, h = high_variance - low_variance, high_variance + low_variance
    c = a + 2 * high_variance * low_variance * log_ratio
    root = -c / (h + (h.square() - a * c).sqrt())
    found = usable & (root.abs() <= 1)  # false for NaN, too
    return Threshold(middle + torch.where(found, root, 0.0) * half, ~found)
