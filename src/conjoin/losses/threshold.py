"""The threshold between two populations of scores (SOLAR App. C.1)."""

from typing import NamedTuple

import torch
from torch import Tensor


class Threshold(NamedTuple):
    """A threshold on scores.

    Args:
        threshold: 0-d threshold.
        fallback: 0-d bool: True if the densities are equal nowhere between the means; the threshold is the midpoint.
    """

    threshold: Tensor
    fallback: Tensor


def qda_threshold(
    positive_mean: Tensor | float,
    positive_std: Tensor | float,
    negative_mean: Tensor | float,
    negative_std: Tensor | float,
) -> Threshold:
    """Return the score between the means where N(mean+, std+) and N(mean-, std-) have equal density (SOLAR Eq. 6-10).

    Eq. 7 prints +b, but the roots of its quadratic have -b. At most one root is between the means, and it is the root
    nearer to their midpoint. Its formula avoids cancellation, so equal deviations need no special case. The result
    falls back to the midpoint if there is no such root: the positive mean is not above the negative mean, a deviation
    is zero, or one Gaussian is denser everywhere between the means. No gradient flows. All tensors have one shape
    (one threshold per entry). The computation does not synchronise with a GPU.
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
    is_inside = usable & (root.abs() <= 1)  # also False for NaN
    return Threshold(middle + torch.where(is_inside, root, 0.0) * half, ~is_inside)
