"""The one door to the kernels, and where they are used: nothing else of this package imports `dflash_kernels`.

By themselves kernels run on CUDA devices of compute capability 8 and more, in float16 and bfloat16, if Triton is
installed and can build them; everywhere else torch computes the same. Those that choose and count, and so are exact,
also run in float32. Triton is imported when the first one is launched. One function each says whether a kernel is to
be used: `attends`, `writes` (both that write caches), `fuses` (norms and activations), `picks` and `accepts`, which
`best`, `either` and `watched` ask by themselves. They read nothing on the host, but for what defines trees, which runs
where their kernels do not.
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
    gumbel_argmax,
    keep_path,
    norm_rope_write,
    rms_norm,
    silu_mul,
    top_tokens,
)
from dflash_kernels._dispatch import has_triton
from dflash_kernels.block_attention import covers
from dflash_kernels.build_tree import MAX_NODES, num_paths
from dflash_kernels.gumbel_argmax import ROW_BITS, exponential_noise
from dflash_kernels.rotary import norm_and_rotate
from dflash_kernels.top_tokens import MAX_NUM

logger = logging.getLogger(__name__)
# What kernels are for by themselves, where they sum or round: float32 keeps torch's own results.
HALF = (torch.float16, torch.bfloat16)


class _Setting:
    """What `kernels` has set; `None` decides by the device."""

    enabled: bool | None = None


@contextmanager
def kernels(enabled: bool | None) -> Generator[None]:
    """Uses kernels wherever they can run (`True`), nowhere (`False`), or as the device suggests (`None`).

    `True` is for tests and benchmarks: on a CPU kernels run in Triton's interpreter, which is slow and needs
    `TRITON_INTERPRET=1`; without it their references run. Holds for all threads.
    """
    before = _Setting.enabled
    _Setting.enabled = enabled
    try:
        yield
    finally:
        _Setting.enabled = before


def forced() -> bool | None:
    """Returns what [`kernels`] has set: a captured step goes on with what it was captured under."""
    return _Setting.enabled


def attends(query_BHWE: Tensor, key_BGRE: Tensor, value_BGRE: Tensor) -> bool:
    """Returns True if [`block_attention`] is to compute this attention: the one check of the decode path.

    It has no gradient, so not where one is wanted. Reads nothing on the host.
    """
    if not _uses_kernels(query_BHWE) or _wants_gradient(query_BHWE):
        return False
    if query_BHWE.device in block_attention.failures:  # torch's own attention is faster than the reference
        return False
    if _Setting.enabled:
        return query_BHWE.dtype == key_BGRE.dtype == value_BGRE.dtype
    return query_BHWE.dtype in HALF and covers(query_BHWE, key_BGRE, value_BGRE)


def writes(states: Sequence[Tensor], buffers: Sequence[Tensor]) -> bool:
    """Returns True if [`norm_rope_write`] or [`context_kv`] is to write these states into a cache's buffers.

    As [`fuses`] of all that goes in besides lengths, and keys and values have to be where that is.
    """
    return fuses(*states) and all(buffer.device == states[0].device for buffer in buffers)


def fuses(*tensors: Tensor) -> bool:
    """Returns True if [`rms_norm`], [`add_norm`] or [`silu_mul`] is to run on all that goes in, and not torch's own.

    They round where those do as long as all is of one dtype, which autocast sees to it that it is not.
    """
    first = tensors[0]
    if not _uses_kernels(first) or torch.is_autocast_enabled(first.device.type) or _wants_gradient(*tensors):
        return False
    if any(tensor.dtype != first.dtype or tensor.device != first.device for tensor in tensors):
        return False
    return bool(_Setting.enabled) or first.dtype in HALF


def shortens(tensor: Tensor) -> bool:
    """Returns True if modules with this weight are to run in fewer operations of torch's own: on a CPU."""
    is_bare = tensor.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    return _Setting.enabled is None and is_bare and not _wants_gradient(tensor)


def picks(logits: Tensor) -> bool:
    """Returns True if [`argmax`], [`gumbel_argmax`] or [`top_tokens`] is to look at these logits, in float32 too."""
    return _uses_kernels(logits) and (bool(_Setting.enabled) or logits.dtype in (*HALF, torch.float32))


def accepts(counts: Tensor) -> bool:
    """Returns True if kernels are to do a step's bookkeeping, in integers, on this tensor's device."""
    return _uses_kernels(counts)


def builds_trees(counts: Tensor) -> bool:
    """Returns True if kernels are to build and follow trees on this tensor's device, as far as is known."""
    operations = (top_tokens, build_tree, follow_tree, keep_path)
    return accepts(counts) and all(counts.device not in operation.failures for operation in operations)


def either(operation: Any, counts: Tensor) -> Any:
    """Returns an operation that ends a step, or moves a tree's path: the kernel, or torch's definition of it."""
    return operation if accepts(counts) else operation.reference


def watched(operation: Any, counts: Tensor) -> Any:
    """Returns an operation that builds or follows trees: the kernel, or its definition, which reads on the host.

    So whoever watches a step on a CPU sees one operation, as where it is a kernel.
    """
    is_watched = counts.device.type == "cpu" and torch._C._len_torch_dispatch_stack() > 0
    return operation if is_watched else either(operation, counts)


def best(logits: Tensor) -> Tensor:
    """Returns the first index of the greatest of `[..., V]` logits, `[...]` int64, by the kernel or by torch."""
    # On a CPU `argmax` says the same in three to four times the time (docs/log-archive.md).
    return argmax(logits) if picks(logits) else logits.max(dim=-1).indices


def _uses_kernels(tensor: Tensor) -> bool:
    """Returns True if kernels are to be used at all where this tensor is."""
    if _Setting.enabled is not None:
        return _Setting.enabled
    return _is_recent(tensor.device) and _can_launch(tensor.device)


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


@functools.cache
def _is_recent(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def _can_launch(device: torch.device) -> bool:
    """Once per device: starts the smallest kernel. Slim images have no C compiler, and Triton needs one.

    The first to ask is the first token's commit, long before a capture. What is wrong, the operation has said.
    """
    if not has_triton():  # on a GPU one expects the kernels
        logger.warning("decoding steps run in torch alone: Triton is not installed; pip install triton")
        return False
    try:
        argmax(torch.zeros(1, device=device))
    except Exception as error:  # whatever a Triton raises that nobody has tried
        reason = f"{type(error).__name__}: {one_line(error)}"
        logger.warning("decoding steps run in torch alone: no kernel can be launched on %s (%s)", device, reason)
        return False
    return device not in argmax.failures
