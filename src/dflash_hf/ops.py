"""The one door to the kernels, and where they are used: nothing else of this package imports `dflash_kernels`.

By themselves kernels run on CUDA devices of compute capability 8 and more, in float16 and bfloat16, if Triton is
installed; everywhere else torch computes the same. Triton is imported when the first one is launched.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from dflash_kernels import accept_and_prepare, argmax, block_attention, context_kv, norm_rope_write
from dflash_kernels._dispatch import has_triton
from dflash_kernels.block_attention import covers

logger = logging.getLogger(__name__)


class _Setting:
    """What `kernels` has set; `None` decides by the device."""

    enabled: bool | None = None


@contextmanager
def kernels(enabled: bool | None) -> Generator[None]:
    """Uses kernels wherever they can run (`True`), nowhere (`False`), or as the device suggests (`None`).

    `True` is for tests and benchmarks: on a CPU kernels run in Triton's interpreter, which is slow and needs
    `TRITON_INTERPRET=1`; without it their references run. Holds for all threads.

    Args:
        enabled (`bool`, *optional*): As above.
    """
    before, _Setting.enabled = _Setting.enabled, enabled
    try:
        yield
    finally:
        _Setting.enabled = before


def attends(query_BHWE: Tensor, key_BGRE: Tensor, value_BGRE: Tensor) -> bool:
    """Whether [`block_attention`] is to compute this attention: the one check of the decode path.

    It has no gradient, so not where one is wanted. Reads nothing on the host.
    """
    if _Setting.enabled is False or (torch.is_grad_enabled() and query_BHWE.requires_grad):
        return False
    if _Setting.enabled:
        return query_BHWE.dtype == key_BGRE.dtype == value_BGRE.dtype
    if not query_BHWE.is_cuda or query_BHWE.dtype == torch.float32 or not _is_recent(query_BHWE.device):
        return False
    if not has_triton():
        _say_triton_is_missing()
        return False
    return covers(query_BHWE, key_BGRE, value_BGRE)


@functools.cache
def _is_recent(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def _say_triton_is_missing() -> None:
    """Once: on a GPU one expects the kernels."""
    logger.warning("attention over the ragged cache runs in torch: Triton is not installed; pip install triton")


__all__ = [
    "accept_and_prepare",
    "argmax",
    "attends",
    "block_attention",
    "context_kv",
    "kernels",
    "norm_rope_write",
]
