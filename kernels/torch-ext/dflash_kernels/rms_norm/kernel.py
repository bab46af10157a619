"""This is the kernel of `rms_norm` and, with a sum before the norm, of `add_norm`. There is one program per row."""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportUnnecessaryComparison=false
# (jit functions are Triton's language: their arguments are typed by the launch, which takes options besides)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import power_of_two
from ..operation import Given
from ..rotary_kernel import rounded


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    states,
    update,
    weight,
    out,
    num_rows,
    eps,
    stride_weight,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Computes `out[-1] = weight * y / sqrt(mean(y^2) + eps)` row by row.

    `y = x`, or with an update `y = x + update`, which is stored in `out[0]`.
    """
    dtype: tl.constexpr = states.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    at = row * D + column
    value = tl.load(states + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        value = rounded(value + tl.load(update + at, mask=inside, other=0.0).to(tl.float32), dtype)
        tl.store(out + at, value.to(dtype), mask=inside)
        out += num_rows.to(tl.int64) * D
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / D + eps)
    normed = rounded(value * scale, dtype) * tl.load(
        weight + column * stride_weight, mask=inside, other=0.0
    ).to(tl.float32)
    tl.store(out + at, normed.to(dtype), mask=inside)


def run(states: Tensor, update: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    """Returns the `rms_norm` of states `[..., D]` or, with an update `[..., D]`, their `add_norm`, with one launch."""
    size = states.shape[-1]
    rows = states.contiguous()
    out = torch.empty(
        states.shape if update is None else (2, *states.shape),
        dtype=states.dtype,
        device=states.device,
    )
    num_rows = rows.numel() // size
    _rms_norm_kernel[(num_rows,)](
        rows,
        rows if update is None else update.contiguous(),
        weight_D,
        out,
        num_rows,
        eps,
        weight_D.stride(0),
        D=size,
        BLOCK=power_of_two(size),
        ADDS=update is not None,
        num_warps=min(max(power_of_two(size) // 512, 1), 16),
    )
    return out


def launch(given: Given) -> Tensor:
    """Returns the normed states `[..., D]` in their dtype, contiguous, with one launch."""
    return run(given["states"], None, given["weight_D"], given["eps"])


__all__ = ["launch", "run"]
