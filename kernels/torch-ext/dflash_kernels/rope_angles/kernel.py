"""This is the kernel of `rope_angles`, with one program per position."""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportUnnecessaryComparison=false
# (jit functions are Triton's language: their arguments are typed by the launch, which takes options besides)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import power_of_two
from ..operation import Given, run_kernel

# The number of lanes of a warp. They share the frequencies of a position.
LANES_PER_WARP = 32
MOST_WARPS = 4


@triton.jit(do_not_specialize=["num_rows", "width"])
def _rope_angles_kernel(
    positions,
    inv_freq,
    out,
    num_rows,
    width,
    scaling,
    stride_positions_b,
    stride_positions_w,
    stride_inv_freq_f,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes `out[0, row] = cos(position * inv_freq) * scaling`, twice side by side, and the
    sines in `out[1, row]`.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < F
    at = row // width * stride_positions_b + row % width * stride_positions_w
    position = tl.load(positions + at).to(tl.float32)
    inv_freqs = tl.load(inv_freq + lane * stride_inv_freq_f, mask=inside, other=0.0)
    # The angle is computed in float32, as in torch, because half precision cannot distinguish neighbouring positions
    # in a long text.
    angle = position * inv_freqs.to(tl.float32)
    # These are CUDA's `cosf` and `sinf`, which torch calls too. The fast versions are wrong for large angles.
    cos = (tl.cos(angle) * scaling).to(dtype)
    sin = (tl.sin(angle) * scaling).to(dtype)
    cos_row = out + row * (2 * F)
    sin_row = cos_row + num_rows.to(tl.int64) * (2 * F)
    tl.store(cos_row + lane, cos, mask=inside)
    tl.store(cos_row + F + lane, cos, mask=inside)
    tl.store(sin_row + lane, sin, mask=inside)
    tl.store(sin_row + F + lane, sin, mask=inside)


def launch(given: Given) -> Tensor:
    """Returns the cosines, then the sines, `[2, B, W, 2 F]` in the given dtype. There is one program per position."""
    positions = given["positions_BW"]
    num_freqs = len(given["inv_freq_F"])
    shape = (2, *positions.shape, 2 * num_freqs)
    out = torch.empty(shape, dtype=given["dtype"], device=positions.device)
    num_rows = positions.numel()
    block = power_of_two(num_freqs)
    num_warps = min(max(block // LANES_PER_WARP, 1), MOST_WARPS)
    run_kernel(
        _rope_angles_kernel,
        (num_rows,),
        given,
        out=out,
        num_rows=num_rows,
        width=positions.shape[1],
        F=num_freqs,
        BLOCK=block,
        num_warps=num_warps,
    )
    return out


__all__ = ["launch"]
