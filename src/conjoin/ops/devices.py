"""The device: its choice, its precision (bfloat16 where it computes faster than float32), and gathering from all."""

import logging
import time
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from conjoin.constants import AUTO

logger = logging.getLogger(__name__)
_ROUNDS, _MOST_ROUNDS = 5, 30
_CLEAR = 1.4
"""How many times as fast one type is when a few rounds settle the choice; a busy machine needs more."""


def choose_bf16(bf16: bool | str, device: str | torch.device | None = None) -> bool:
    """Return whether to compute in bfloat16.

    Args:
        bf16: True or False is the answer; `"auto"` asks the device, once per process, and logs a line that says what
            was chosen and why. A GPU computes in bfloat16 if it has instructions for it; a CPU if that is faster in a
            test of about 50 ms; other devices do not.
        device: As for `choose_device`.

    Raises:
        ValueError: `bf16` is something else, or there is no such device.
    """
    if isinstance(bf16, bool):
        return bf16
    if bf16 != AUTO:
        raise ValueError(f"bf16 is {bf16!r}; expected true, false or {AUTO!r}")
    return _is_bf16_faster(choose_device(device).type)


@cache
def _is_bf16_faster(kind: str) -> bool:
    if kind == "cuda":
        faster = torch.cuda.is_bf16_supported(including_emulation=False)
        reason = f"this GPU has {'' if faster else 'no '}bfloat16 instructions"
    elif kind == "cpu":
        full, half = time_cpu()
        faster = half < full
        ratio = max(full, half) / min(full, half)
        reason = f"bfloat16 is {ratio:.1f} times as {'fast' if faster else 'slow'} as float32 on this CPU"
    else:
        faster, reason = False, f"bfloat16 is not chosen on {kind}"
    logger.warning("computing in %s: %s", "bfloat16" if faster else "float32", reason)
    return faster


def time_cpu() -> tuple[float, float]:
    """Time a linear layer and a layer norm on one thread of the CPU; returns the seconds in float32 and bfloat16.

    The clock counts what the thread computes, not what it waits for other programs, where the system has such a clock.
    """
    clock = time.thread_time if time.get_clock_info("thread_time").resolution < 1e-4 else time.perf_counter
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(size, 384, generator=generator) for size in (128, 1536))
    seconds = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, several threads wait for one another
    try:
        for number in range(_MOST_ROUNDS):
            if number >= _ROUNDS and max(seconds.values()) > _CLEAR * min(seconds.values()):
                break
            for dtype in seconds:
                with torch.inference_mode(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                    start = clock()
                    F.layer_norm(F.linear(rows, weight), (len(weight),))
                seconds[dtype] = min(seconds[dtype], clock() - start)
    finally:
        torch.set_num_threads(threads)
    return seconds[torch.float32], seconds[torch.bfloat16]


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
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{chosen} was asked for, but torch sees no GPU; use --device cpu")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{chosen} was asked for, but torch sees {torch.cuda.device_count()} GPUs, counted from 0")
    return chosen


def is_distributed() -> bool:
    """Whether several ranks train together."""
    return world_size() > 1


def world_size() -> int:
    """Return the number of ranks, 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather_with_gradient(tensor: Tensor) -> Tensor:
    """Concatenate `tensor` `(N, ...)` of all ranks along dimension 0, in rank order, with gradient to every rank.

    With a loss of local rows against gathered columns, DDP's average over ranks then has exactly the gradient of
    the full batch on one device. Without a process group this is the identity. Every rank must hold the same shape.
    """
    if not is_distributed():
        return tensor
    gathered: Tensor = _Gather.apply(tensor)
    return gathered


class _Gather(torch.autograd.Function):
    """Concatenation over ranks; backward, the sum over ranks of the gradients of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # noqa: ANN401
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(world_size())]
        dist.all_gather(parts, tensor)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
        if dist.get_backend() == dist.Backend.NCCL:
            local = torch.empty_like(gradient.chunk(world_size())[0])
            dist.reduce_scatter_tensor(local, gradient.contiguous())
            return local
        total = gradient.clone(memory_format=torch.contiguous_format)  # gloo reduces whole tensors only
        dist.all_reduce(total)
        return total.chunk(world_size())[dist.get_rank()]


class Gathered(NamedTuple):
    """The rows of all devices, as columns for the local rows.

    Attributes:
        vectors: One or several matrices `(M, D)`.
        positions: `(N,)` index of each local row among them.
        ids: `(M,)` integers naming what each row shows; rows of one id are not each other's negatives.
        present: Which of them count, `(M, ...)` bool as the loss says: its mean over devices is then that over all.
    """

    vectors: tuple[Tensor, ...]
    positions: Tensor
    ids: Tensor | None = None
    present: Tensor | None = None


def gather_rows(*vectors: Tensor, ids: Tensor | None = None, present: Tensor | None = None) -> Gathered | None:
    """Gather rows `(N, D)`, their ids `(N,)` and which of them count `(N, ...)`; None without other devices."""
    if not is_distributed():
        return None
    return Gathered(
        tuple(gather_with_gradient(matrix) for matrix in vectors),
        local_positions(len(vectors[0]), vectors[0].device),
        None if ids is None else gather_with_gradient(ids),
        None if present is None else gather_with_gradient(present),
    )


def local_positions(count: int, device: torch.device) -> Tensor:
    """The indices of this rank's `count` rows in a gathered tensor, `(count,)`."""
    rank = dist.get_rank() if is_distributed() else 0
    return torch.arange(rank * count, (rank + 1) * count, device=device)
