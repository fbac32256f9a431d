"""The mask that hardens over training (SOLAR Sec. 4.1.2)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SCHEDULES = ("linear", "cosine")


def local_scores(global_tokens: Tensor, local_tokens: Tensor) -> Tensor:
    """How each local token agrees with its own sample's global token of the other modality (S of SOLAR).

    M_V is made of `local_scores(l_cls, V')`, M_L of `local_scores(v_cls, L')`. In stage 1 `alignment_terms` has them.

    Args:
        global_tokens: `(N, D)`, raw.
        local_tokens: `(N, T, D)`, raw.

    Returns:
        Cosines `(N, T)`, without gradient; what padding holds is scored too, a zero vector as 0.

    Raises:
        ValueError: Shapes do not fit.
    """
    if local_tokens.ndim != 3 or global_tokens.shape != (len(local_tokens), local_tokens.shape[2]):
        raise ValueError(
            f"global and local tokens have shapes {tuple(global_tokens.shape)} and {tuple(local_tokens.shape)}, "
            "expected (N, D) and (N, T, D)"
        )
    dtype = torch.promote_types(local_tokens.dtype, torch.float32)
    return F.cosine_similarity(global_tokens.detach()[:, None].to(dtype), local_tokens.detach().to(dtype), dim=-1)


def mask_schedule(progress: float, schedule: str = "linear", mask_warmup_ratio: float = 0.5) -> float:
    """Rho of the evolutionary mask: from 1 at the start to 0 at a share `mask_warmup_ratio` of training, then 0.

    Args:
        progress: Share of training done, in [0, 1].
        schedule: `"linear"` (the paper's) or `"cosine"`.
        mask_warmup_ratio: Where rho reaches 0, in [0, 1]; 0 gives the hard mask from the first step (Table 3).

    Raises:
        ValueError: An argument is out of range or the schedule is unknown.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; expected one of {SCHEDULES}")
    if not 0.0 <= progress <= 1.0:
        raise ValueError(f"progress={progress} must lie in [0, 1]")
    if not 0.0 <= mask_warmup_ratio <= 1.0:
        raise ValueError(f"mask_warmup_ratio={mask_warmup_ratio} must lie in [0, 1]")
    if progress >= mask_warmup_ratio:
        return 0.0
    done = progress / mask_warmup_ratio
    return 1.0 - done if schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2


def evolutionary_mask(scores: Tensor, threshold: Tensor | float, rho: float) -> Tensor:
    """`M = rho + (1 - rho) [S > threshold]`: the weights of local tokens in E_VL, without gradient.

    Args:
        scores: `(N, T)`; what padding holds does not matter, the model gives it no weight.
        threshold: 0-d, of `qda_threshold`.
        rho: In [0, 1], of `mask_schedule`; 0 gives the hard mask.

    Raises:
        ValueError: Rho lies outside [0, 1].
    """
    if not 0.0 <= rho <= 1.0:
        raise ValueError(f"rho={rho} must lie in [0, 1]")
    return rho + (1.0 - rho) * (scores > threshold).to(scores.dtype)
