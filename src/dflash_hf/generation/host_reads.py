"""Finding operations that need a tensor's value on the host, on any device: what no captured step may contain.

CUDA has a debug mode of its own for that, but it is one for all threads, and there is none on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# The size of what they return, or a number that they return, follows from values.
_READING = {
    "_local_scalar_dense",
    "_unique2",
    "allclose",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}


class HostReadError(RuntimeError):
    """An operation reads a tensor on the host."""


class NoHostReads(TorchDispatchMode):
    """Raises [`HostReadError`] at the first operation whose result has to be known on the host."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if reads_on_host(func, args, kwargs):
            raise HostReadError(f"{func} reads a tensor on the host")
        # Under inference mode an operation that is made of others arrives here whole.
        with self:
            out = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if out is NotImplemented else out


def reads_on_host(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Says whether an ATen operation waits for the device: a read, an index by a mask, a copy to the host.

    Args:
        func (`torch._ops.OpOverload`): The operation.
        args, kwargs: What it is called with.
    """
    name = func._schema.name.removeprefix("aten::")
    if name in _READING:
        return True
    if name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"):
        masks = [i for i in args[1] if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)]
        # One number put under a mask is filled in, without counting where.
        return bool(masks) and not (name.endswith("put_") and args[2].numel() == 1)
    if name == "repeat_interleave" and func._overloadname.startswith("Tensor"):
        return kwargs.get("output_size") is None
    if name == "_to_copy":
        device = kwargs.get("device")
        return device is not None and torch.device(device).type == "cpu" and args[0].device.type != "cpu"
    if name == "copy_":
        return args[0].device.type == "cpu" and args[1].device.type != "cpu"
    return False


__all__ = ["HostReadError", "NoHostReads", "reads_on_host"]
