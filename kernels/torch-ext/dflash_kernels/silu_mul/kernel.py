"""This is the kernel of `silu_mul`, which works elementwise."""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportUnnecessaryComparison=false
# (jit functions are Triton's language: their arguments are typed by the launch, which takes options besides)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import cdiv
from ..operation import Given
from ..rotary_kernel import rounded

BLOCK = 1024


@triton.jit(do_not_specialize=["num"])
def _silu_mul_kernel(gate, up, out, num, BLOCK: tl.constexpr):
    """Computes `out = gate / (1 + exp(-gate)) * up`. The quotient is rounded to the dtype."""
    dtype: tl.constexpr = gate.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    value = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    activated = rounded(value / (1.0 + tl.exp(-value)), dtype)
    product = activated * tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, product.to(dtype), mask=inside)


def launch(given: Given) -> Tensor:
    """Returns the product in the shape and dtype of `gate`, contiguous, with one launch."""
    gate, up = given["gate"].contiguous(), given["up"].contiguous()
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _silu_mul_kernel[(cdiv(gate.numel(), BLOCK),)](
        gate, up, out, gate.numel(), BLOCK=BLOCK, num_warps=4
    )
    return out


__all__ = ["launch"]
