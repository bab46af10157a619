"""This module imports the kernels and decides where each of them is used. No other module imports `dflash_kernels`.

By default, kernels run on CUDA devices of compute capability 8 and more, in float16 and bfloat16, if Triton is
installed and can build them. Everywhere else torch computes the same results. Kernels that choose or count are exact,
so they also run in float32. Triton is imported when the first kernel is launched.

`use_kernel` decides for every operation. `implementation` returns the kernel or its definition in torch. Neither
function reads on the host. Of the definitions, those that build and follow trees read on the host.
"""

# The other modules reach the kernels through here:
# pyright: reportUnusedImport=false
from __future__ import annotations

import functools
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dflash_hf.errors import one_line
from dflash_kernels import (
    accept_and_prepare,
    add_norm,
    argmax,
    block_attention,
    build_tree,
    context_kv,
    follow_tree,
    gated_linear,
    gumbel_argmax,
    keep_path,
    linears,
    norm_rope_write,
    rms_norm,
    rope_angles,
    silu_mul,
    top_tokens,
)
from dflash_kernels._dispatch import has_triton
from dflash_kernels.accept_and_prepare import NUM_FIGURES
from dflash_kernels.ancestors import MAX_NODES, are_ancestors, num_words
from dflash_kernels.block_attention import covers
from dflash_kernels.build_tree import NODE_PARTS, num_paths
from dflash_kernels.gumbel_argmax import exponential_noise
from dflash_kernels.linears import MAX_ROWS
from dflash_kernels.operation import Operation
from dflash_kernels.top_tokens import MAX_NUM

logger = logging.getLogger(__name__)
# The dtypes of kernels that sum or round. In float32, torch's own results are kept.
HALF = (torch.float16, torch.bfloat16)
# These operations use only integers.
COUNTING: frozenset[Operation[..., Any]] = frozenset(
    (accept_and_prepare, build_tree, follow_tree, keep_path)
)
# These operations choose among logits, and their results are exact.
CHOOSING: frozenset[Operation[..., Any]] = frozenset((argmax, gumbel_argmax, top_tokens))


class _Setting:
    """This is the setting of [`kernels`]. With `None`, the device decides."""

    enabled: bool | None = None


@contextmanager
def kernels(enabled: bool | None) -> Generator[None]:
    """Uses kernels wherever they can run (`True`), nowhere (`False`), or on the devices that they are made for
    (`None`).

    The setting applies to all threads. `True` is for tests and benchmarks. On a CPU, kernels run in Triton's
    interpreter, which is slow and needs `TRITON_INTERPRET=1`. Without this variable their definitions run.
    """
    before = _Setting.enabled
    _Setting.enabled = enabled
    try:
        yield
    finally:
        _Setting.enabled = before


def forced() -> bool | None:
    """Returns the setting of [`kernels`]. A captured step depends on it."""
    return _Setting.enabled


def use_kernel(
    operation: Operation[..., Any], *tensors: Tensor, buffers: Sequence[Tensor] = ()
) -> bool:
    """Returns True if the kernel of an operation should compute it, and not torch. Nothing is read on the host.

    Args:
        operation (`Operation`): The operation.
        tensors (`torch.Tensor`): All float inputs of the operation. For an operation that counts, any of its tensors.
        buffers (sequence of `torch.Tensor`): The buffers of a cache that the operation writes. They may have another
            dtype.
    """
    first = tensors[0]
    if not _uses_kernels(first.device):
        return False
    if operation in COUNTING:
        return True
    if operation in CHOOSING:
        return bool(_Setting.enabled) or first.dtype in (*HALF, torch.float32)
    if operation is block_attention:
        return _use_attention(*tensors)
    if any(buffer.device != first.device for buffer in buffers):
        return False
    return _use_rounding(tensors)


def implementation(operation: Operation[..., Any], tensor: Tensor) -> Any:
    """Returns the callable that computes an operation on the device of `tensor`: its kernel, or its definition in
    torch.
    """
    # A mode that watches operations, such as the counter of launches, must see one operation on a CPU too. The
    # definition would read trees on the host.
    if operation in (build_tree, follow_tree) and _is_watched(tensor.device):
        return operation
    if use_kernel(operation, tensor):
        return operation
    return operation.reference


def first_argmax(logits: Tensor) -> Tensor:
    """Returns the first index of the greatest logit of `[..., V]`, as `[...]` int64."""
    if use_kernel(argmax, logits):
        return argmax(logits)
    # On a CPU, `torch.argmax` returns the same index but takes three to four times as long (docs/log-archive.md).
    return logits.max(dim=-1).indices


def use_tree_kernels(tensor: Tensor) -> bool:
    """Returns True if kernels should build and follow trees on the device of `tensor`, and none has failed there."""
    operations = (top_tokens, build_tree, follow_tree, keep_path)
    return _uses_kernels(tensor.device) and all(
        tensor.device not in operation.failures for operation in operations
    )


def use_short_forwards(weight: Tensor) -> bool:
    """Returns True if modules with this weight should run in fewer operations of torch, which is so only on a CPU."""
    if _Setting.enabled is not None or weight.device.type != "cpu":
        return False
    return not torch.is_autocast_enabled("cpu") and not _wants_gradient(weight)


def _use_attention(query_BHWE: Tensor, key_BGRE: Tensor, value_BGRE: Tensor) -> bool:
    """Returns True if [`block_attention`] covers these tensors. The kernel has no gradient."""
    if _wants_gradient(query_BHWE):
        return False
    # If the kernel has failed, SDPA is faster than the kernel's definition.
    if query_BHWE.device in block_attention.failures:
        return False
    if _Setting.enabled:
        return query_BHWE.dtype == key_BGRE.dtype == value_BGRE.dtype
    return query_BHWE.dtype in HALF and covers(query_BHWE, key_BGRE, value_BGRE)


def _use_rounding(tensors: Sequence[Tensor]) -> bool:
    """Returns True if kernels that round cover these tensors. These kernels have no gradient."""
    first = tensors[0]
    # Kernels round in the same way as torch's modules if all tensors have one dtype. Under autocast the modules mix
    # dtypes.
    if torch.is_autocast_enabled(first.device.type) or _wants_gradient(*tensors):
        return False
    if any(tensor.dtype != first.dtype or tensor.device != first.device for tensor in tensors):
        return False
    return bool(_Setting.enabled) or first.dtype in HALF


def _uses_kernels(device: torch.device) -> bool:
    """Returns True if any kernels should be used on this device."""
    if _Setting.enabled is not None:
        return _Setting.enabled
    return _is_recent(device) and _can_launch(device)


def _is_watched(device: torch.device) -> bool:
    """Returns True if a mode of torch sees the operations on a CPU."""
    return device.type == "cpu" and torch._C._len_torch_dispatch_stack() > 0


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


@functools.cache
def _is_recent(device: torch.device) -> bool:
    """Returns True for a CUDA device of compute capability 8 and more. It logs a warning for a device of ROCm."""
    if device.type != "cuda":
        return False
    # Devices of ROCm have the type `cuda` too, and their capabilities begin at 9.
    if torch.version.hip is not None:
        logger.warning(
            "decoding steps run in torch alone: %s is a device of ROCm, and the kernels are for CUDA",
            device,
        )
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def _can_launch(device: torch.device) -> bool:
    """Returns True if the smallest kernel can be launched on a device. This is tried once, and a failure is logged.

    Triton needs a C compiler, which slim images do not have. The commit of the first token calls this function first,
    long before a capture. During a capture, nothing could be tried. If the device has no memory left, the error of
    torch or Triton is raised.
    """
    if not has_triton():
        logger.warning(
            "decoding steps run in torch alone: Triton is not installed; pip install triton"
        )
        return False
    try:
        argmax(torch.zeros(1, device=device))
    except Exception as error:  # untested releases of Triton may raise anything
        # Memory may be free at the next call, so the error is raised and not cached as a result.
        if "out of memory" in str(error):
            raise
        reason = f"{type(error).__name__}: {one_line(error)}"
        logger.warning(
            "decoding steps run in torch alone: no kernel can be launched on %s (%s)",
            device,
            reason,
        )
        return False
    # An error that the operation itself has caught is in its list of failures and in the log.
    return device not in argmax.failures
