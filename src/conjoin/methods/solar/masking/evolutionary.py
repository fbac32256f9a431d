"""The evolutionary mask, which changes from no mask to a hard mask in training (SOLAR Sec. 4.1.2)."""

import math

from torch import Tensor

from conjoin.models.joint_encoder.intersection import above

SCHEDULES = ("linear", "cosine")


def mask_schedule(
    progress: float, schedule: str = "linear", mask_warmup_ratio: float = 0.5, mask_start_ratio: float = 0.0
) -> float:
    """Return rho of the evolutionary mask: 1 until `mask_start_ratio`, then down to 0 at `mask_warmup_ratio`.

    Args:
        progress: Completed share of training, in [0, 1].
        schedule: `"linear"` (the paper's) or `"cosine"`.
        mask_warmup_ratio: Progress at which rho reaches 0, in [0, 1]; 0 gives the hard mask from the start (Table 3).
        mask_start_ratio: Progress at which rho begins to decay, at most `mask_warmup_ratio`.

    Raises:
        ValueError: An argument is out of range or the schedule is unknown.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; expected one of {SCHEDULES}")
    if not 0.0 <= progress <= 1.0:
        raise ValueError(f"progress={progress} must lie in [0, 1]")
    if not 0.0 <= mask_warmup_ratio <= 1.0:
        raise ValueError(f"mask_warmup_ratio={mask_warmup_ratio} must lie in [0, 1]")
    if not 0.0 <= mask_start_ratio <= mask_warmup_ratio:
        raise ValueError(f"mask_start_ratio={mask_start_ratio} must lie in [0, mask_warmup_ratio={mask_warmup_ratio}]")
    if progress >= mask_warmup_ratio:
        return 0.0
    if progress <= mask_start_ratio:
        return 1.0
    done = (progress - mask_start_ratio) / (mask_warmup_ratio - mask_start_ratio)
    return 1.0 - done if schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2


def evolutionary_mask(scores: Tensor, exists: Tensor, threshold: Tensor | float, rho: float) -> Tensor:
    """Return `M = rho + (1 - rho) M^`, the weights of local tokens in E_VL, without gradient; `M^ = [S > threshold]`.

    A row without a score above the threshold keeps its best token: otherwise all such rows would share one embedding.

    Args:
        scores: `(N, T)`.
        exists: `(N, T)` bool, True for tokens that exist.
        threshold: 0-d threshold from `qda_threshold`.
        rho: Value in [0, 1] from `mask_schedule`; 0 gives the hard mask.

    Raises:
        ValueError: Rho is outside [0, 1].
    """
    if not 0.0 <= rho <= 1.0:
        raise ValueError(f"rho={rho} must lie in [0, 1]")
    return rho + (1.0 - rho) * above(scores, exists, threshold).to(scores.dtype)
