"""The device and its precision: bfloat16 where it computes faster than float32."""

import logging
from functools import cache
from time import perf_counter

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)


def choose_device(device: str | torch.device | None = None) -> torch.device:
    """Return `device`; if None, a GPU if there is one, else the CPU.

    Raises:
        ValueError: Torch does not know the device, or does not see the GPU.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{device!r} is not a device; expected cpu, cuda, cuda:1, ...") from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if chosen.type == "cuda" and (chosen.index or 0) >= count:
        seen = f"{count} GPUs, counted from 0" if count else "no GPU; use --device cpu"
        raise ValueError(f"{chosen} was asked for, but torch sees {seen}")
    return chosen


def choose_bf16(device: str | torch.device | None = None) -> bool:
    """Return whether a device should compute in bfloat16; the first call of a process logs a line that says why.

    A GPU should if it has instructions for it; a CPU if that is faster in a test of about 50 ms; other devices not.

    Args:
        device: As for `choose_device`.

    Raises:
        ValueError: There is no such device.
    """
    return _is_bf16_faster(choose_device(device).type)


def choose_dtype(dtype: torch.dtype | str | None, device: str | torch.device | None = None) -> torch.dtype | None:
    """Return the type to compute in beside float32, or None for float32.

    Args:
        dtype: A type of torch or its name, as in transformers; `"auto"` asks `choose_bf16`; None is float32.
        device: As for `choose_device`.

    Raises:
        ValueError: There is no such type.
    """
    if dtype == "auto":
        return torch.bfloat16 if choose_bf16(device) else None
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if named not in (None, torch.float32, torch.bfloat16, torch.float16) or (named is None and dtype is not None):
        raise ValueError(f"dtype={dtype!r}; expected 'float32', 'bfloat16', 'float16' or 'auto'")
    return None if named == torch.float32 else named


@cache
def _is_bf16_faster(kind: str) -> bool:
    faster, reason = False, f"bfloat16 is not chosen on {kind}"
    if kind == "cuda":
        faster = torch.cuda.is_bf16_supported(including_emulation=False)
        reason = f"this GPU has {'' if faster else 'no '}bfloat16 instructions"
    elif kind == "cpu":
        full, half = _time_cpu(torch.float32), _time_cpu(torch.bfloat16)
        faster, ratio = half < full, max(full, half) / min(full, half)
        reason = f"bfloat16 is {ratio:.1f} times as {'fast' if faster else 'slow'} as float32 on this CPU"
    logger.warning("computing in %s: %s", "bfloat16" if faster else "float32", reason)
    return faster


def _time_cpu(dtype: torch.dtype) -> float:
    """Return the seconds of a linear layer and a layer norm on one CPU thread, the fastest of several rounds."""
    from torch.utils.benchmark import Timer

    rows, weight = torch.ones(128, 384), torch.ones(1536, 384)

    def compute() -> None:
        with torch.inference_mode(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            F.layer_norm(F.linear(rows, weight), (len(weight),))

    timer = Timer("compute()", globals={"compute": compute}, num_threads=1, timer=perf_counter)
    return min(timer.timeit(1).mean for _ in range(10))
