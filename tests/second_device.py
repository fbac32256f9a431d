"""A second device that computes on the CPU and refuses what a GPU refuses: one operation on tensors of two devices.

Torch has a device name to spare for backends in Python. Its tensors wrap one of the CPU; every operator runs on what
they wrap. A tensor of the CPU beside one of this device is an error unless it is a scalar, an index or copied.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree, backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

aten = torch.ops.aten
NAME = "second"
COPIES = (aten.to, aten._to_copy, aten.copy_)
INDEXED = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
IN_PLACE = (aten.copy_, aten.index_put_, aten._index_put_impl_)


class SecondDeviceTensor(torch.Tensor):
    """Wraps a tensor of the CPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner):
        options = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), device=f"{NAME}:0", **options)

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return f"on the second device: {self.inner}"

    def tolist(self):
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Constructors(TorchFunctionMode):
    """`torch.tensor` and its like build a tensor without an operator that a mode sees."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.new_tensor:
            like, *args = args
            func, kwargs = torch.tensor, {"dtype": like.dtype, "device": like.device} | kwargs
        if func not in (torch.tensor, torch.as_tensor) or kwargs.get("device") is None:
            return func(*args, **kwargs)
        device = kwargs.pop("device")
        return func(*args, **kwargs).to(device)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    asked = [leaf.type == NAME for leaf in leaves if isinstance(leaf, torch.device)]
    ours = [isinstance(tensor, SecondDeviceTensor) for tensor in tensors]
    first_is_ours = bool(ours) and ours[0]
    strangers = any(tensor.dim() > 0 and not is_ours for tensor, is_ours in zip(tensors, ours, strict=True))
    if any(ours) and strangers and func.overloadpacket not in COPIES:
        if not (func.overloadpacket in INDEXED and first_is_ours):
            shapes = [f"{tuple(tensor.shape)} on {tensor.device}" for tensor in tensors]
            raise RuntimeError(f"{func}: tensors on two devices: {', '.join(shapes)}")
    there, options = pytree.tree_map_only(SecondDeviceTensor, lambda tensor: tensor.inner, (args, kwargs))
    there, options = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), (there, options))
    out = func(*there, **options)
    is_ours = asked[0] if asked else first_is_ours if func.overloadpacket in IN_PLACE else any(ours)
    if not is_ours:
        return out
    wrapped = pytree.tree_map_only(torch.Tensor, SecondDeviceTensor, out)
    return wrapped if asked else return_and_correct_aliasing(func, args, kwargs, wrapped)


class _Hooks(backend_registration._DummyPrivateUse1Hook):
    def is_available(self):
        return False  # else it were the default accelerator


class _Module(backend_registration._DummyBackendModule):
    def is_available(self):
        return False

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]


# Before the first backward pass of the process: autograd makes its queues for the devices there are then.
backend_registration._setup_privateuseone_for_python_backend(NAME, _Module(), _Hooks())


@contextmanager
def second_device() -> Iterator[torch.device]:
    """Let all operators know the device; gives it."""
    with _Constructors(), _Operators():
        yield torch.device(NAME)


def move(module: nn.Module) -> nn.Module:
    """Move a module to the device, in place; `Module.to` cannot exchange the class of its tensors."""
    moved: dict[int, Any] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    there = tensor.detach().to(NAME)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    there = nn.Parameter(there, requires_grad=tensor.requires_grad) if is_parameter else there
                    moved[id(tensor)] = there, tensor
                tensors[name] = moved[id(tensor)][0]
    return module
