"""This module finds operations that need the host, on any device. No captured step may contain one.

Such an operation needs a tensor's value on the host, or copies a tensor from the host. Such a copy waits too, and a
replay would read the same host memory again. CUDA has its own debug mode for this, but the mode holds for all threads,
and a CPU has none. The bodies of custom operations in Python are checked too. Operations in C++ cannot be checked, so
this module lists those that are known to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Torch marks operations that return a number, or a tensor whose size depends on values, with these tags.
_MARKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# These operations have no tag, but read in C++, to check their arguments or whether they have succeeded.
_READING = {
    "_linalg_check_errors",  # `linalg.inv`, `linalg.solve`, `linalg.cholesky` and others
    "_linalg_eigh",
    "_linalg_eigvals",
    "_linalg_svd",
    "_to_sparse",
    "embedding_renorm_",
    "is_nonzero",
    "linalg_eig",
    "linalg_pinv",
    "multinomial",
    "transformers::grouped_mm_fallback",
}
# Definitions that read on the host. They replace kernels on a CPU, where a read waits for no device.
READING_ON_HOST = frozenset({"build_tree", "follow_tree"})
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_GROUPED = {"_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"}
# The major compute capabilities on which torch multiplies groups in one kernel. On others it counts them on the host.
_GROUPED_ON = (9, 10)


class HostReadError(RuntimeError):
    """An error that says which operation reads a tensor on the host, or copies a tensor from the host."""


class NoHostReads(TorchDispatchMode):
    """Raises [`HostReadError`] at the first operation that needs the host, for its result or its inputs."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # This is not an operation. Torch asks for the device of a tensor subclass in this way.
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if reads_on_host(func, args, kwargs):
            raise HostReadError(f"{func} reads a tensor on the host")
        if _copies_from_host(func, args, kwargs):
            raise HostReadError(f"{func} copies a tensor from the host")
        # Custom operations arrive here as one operation. So do composite operations in inference mode. Both are run by
        # their parts, so that the parts are checked.
        body = _body(func, args)
        if body is None:
            body = func.decompose
        with self:
            out = body(*args, **kwargs)
        if out is NotImplemented:
            return func(*args, **kwargs)
        return out


def reads_on_host(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Returns True if an ATen operation waits for the device: a read, an index by a mask, a copy to the host."""
    name = _name(func)
    overload = func._overloadname
    if name in _READING:
        return True
    if name in _INDEXING:
        return _counts_mask(name, args)
    if name == "repeat_interleave" and overload.startswith("Tensor"):
        return kwargs.get("output_size") is None
    if name in _GROUPED:
        return counts_groups(args[0], is_scaled=name != "_grouped_mm")
    if name == "isin" and overload.startswith("Tensor_Tensor"):
        # This is torch's own rule: from this number of elements on, it sorts and counts the unique ones.
        return args[1].numel() >= int(10 * args[0].numel() ** 0.145)
    if name == "normal" and overload.endswith("Tensor"):
        # The operation checks whether a standard deviation is negative.
        return True
    if name.endswith("_ex") and name.startswith("linalg_"):
        return kwargs.get("check_errors") is True
    if name == "histc":
        # Equal limits, which are the default, mean the smallest and the largest value.
        low, high = (*args[2:4], 0, 0)[:2]
        return low == high
    if name == "_to_copy":
        device = kwargs.get("device")
        return (
            device is not None and torch.device(device).type == "cpu" and not _is_on_host(args[0])
        )
    if name == "copy_":
        return _is_on_host(args[0]) and not _is_on_host(args[1])
    # The parts of composite operations are checked one by one. For example, `one_hot` reads only without a number of
    # classes.
    return not func._can_decompose() and not _MARKS.isdisjoint(func.tags)


def _counts_mask(name: str, args: Sequence[Any]) -> bool:
    """Returns True if an index operation counts the true elements of a mask."""
    masks = [
        index
        for index in args[1]
        if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
    ]
    if not masks:
        return False
    # A single number is filled in under a mask without counting its elements.
    is_filled_in = name.endswith("put_") and args[2].numel() == 1
    return not is_filled_in


def _copies_from_host(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Returns True if an operation copies a tensor from the host to a device. Indices count too.

    A single number from the host in arithmetic does not count, because it is passed with the launch.
    """
    name = _name(func)
    if name == "_to_copy":
        device = kwargs.get("device")
        given = args[:1]
    elif name == "copy_":
        device = args[0].device
        given = args[1:2]
    elif name in _INDEXING:
        device = args[0].device
        given = [*args[1], *args[2:3]]
    else:
        return False
    is_device = device is not None and torch.device(device).type not in ("cpu", "meta")
    return is_device and any(isinstance(tensor, Tensor) and _is_on_host(tensor) for tensor in given)


def _name(func: Any) -> str:
    return func._schema.name.removeprefix("aten::")


def _body(func: Any, args: Sequence[Any]) -> Any:
    """Returns the Python function that a custom operation of torch.library runs for these arguments, if it has one."""
    definition: Any = OPDEFS.get(func._schema.name)
    if definition is None:
        return None
    # Arguments may be lists of tensors, as buffers are.
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    # For tensors without values, torch runs another function, which only makes a result.
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return None
    if func._schema.name.rpartition("::")[2] in READING_ON_HOST and all(map(_is_on_host, tensors)):
        return None
    bodies: dict[str | None, Any] = getattr(definition, "_backend_fns", {})
    for_any_device = bodies.get(None)
    if not tensors:
        return for_any_device
    return bodies.get(tensors[0].device.type, for_any_device)


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def counts_groups(first: Tensor, is_scaled: bool = False) -> bool:
    """Returns True if a grouped product with this first operand copies the ends of the groups to the host.

    `is_scaled` says whether it is a scaled product.
    """
    if not first.is_cuda or not (is_scaled or first.dtype == torch.bfloat16):
        return True
    return torch.cuda.get_device_capability(first.device)[0] not in _GROUPED_ON
