"""This module computes norm and RoPE of a head in Triton, rounded as in the draft's own modules.

Two operations use it.
"""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportUnnecessaryComparison=false
# (jit functions are Triton's language: their arguments are typed by the launch, which takes options besides)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Returns `x` rounded to `dtype`, as float32."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def norm_and_rotate(
    states,
    weight,
    cos,
    sin,
    stride_e,
    stride_w,
    stride_c,
    stride_s,
    eps,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes `y = weight * x / sqrt(mean(x^2) + eps)` and rotates it. Where `weight` is `None`, `y = x`.

    Returns the halves `y1 * cos1 - y2 * sin1` and `y2 * cos2 + y1 * sin2` in float32, in `BLOCK >= E / 2` lanes each.
    `states`, `weight`, `cos` and `sin` point at `E` values each.
    """
    HALF: tl.constexpr = E // 2
    dtype: tl.constexpr = states.dtype.element_ty
    lane = tl.arange(0, BLOCK)
    inside = lane < HALF
    first = tl.load(states + lane * stride_e, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(states + (lane + HALF) * stride_e, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(first * first + second * second, axis=0) / E + eps)
        weight1 = tl.load(weight + lane * stride_w, mask=inside, other=0.0).to(tl.float32)
        weight2 = tl.load(weight + (lane + HALF) * stride_w, mask=inside, other=0.0).to(tl.float32)
        first = rounded(rounded(first * scale, dtype) * weight1, dtype)
        second = rounded(rounded(second * scale, dtype) * weight2, dtype)
    cos1 = tl.load(cos + lane * stride_c, mask=inside, other=0.0).to(tl.float32)
    cos2 = tl.load(cos + (lane + HALF) * stride_c, mask=inside, other=0.0).to(tl.float32)
    sin1 = tl.load(sin + lane * stride_s, mask=inside, other=0.0).to(tl.float32)
    sin2 = tl.load(sin + (lane + HALF) * stride_s, mask=inside, other=0.0).to(tl.float32)
    rotated1 = rounded(first * cos1, dtype) - rounded(second * sin1, dtype)
    rotated2 = rounded(second * cos2, dtype) + rounded(first * sin2, dtype)
    return rotated1, rotated2


__all__ = ["norm_and_rotate", "rounded"]
