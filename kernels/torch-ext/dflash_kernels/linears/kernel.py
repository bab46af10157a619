"""This module holds the kernels of `linears` and `gated_linear`.

A program reads some rows of a weight once, for all rows of the states.
"""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportUnnecessaryComparison=false
# (jit functions are Triton's language: their arguments are typed by the launch, which takes options besides)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import cdiv, interprets
from ..operation import Given
from ..rotary_kernel import rounded

# The number of rows of a weight per program. With fewer rows there are more programs. With more rows the states are
# read less often.
BLOCK_N = 32
# The number of bytes of a row that are read at a time.
BLOCK_BYTES = 256
# The number of these pieces that are read at once. They hide the latency of the memory.
NUM_STAGES = 4
NUM_WARPS = 4


@triton.jit
def _piece(tensor, line, is_line, inner, K: tl.constexpr, UPCAST: tl.constexpr):
    """Returns columns `inner` of rows `line` of a matrix `[.., K]`, with 0 outside of the matrix."""
    inside = is_line[:, None] & (inner < K)[None]
    piece = tl.load(tensor + line.to(tl.int64)[:, None] * K + inner[None], mask=inside, other=0.0)
    # The interpreter's tl.dot does not support bfloat16.
    return piece.to(tl.float32) if UPCAST else piece


@triton.jit
def _write_product(
    states,
    weight,
    bias,
    residual,
    out,
    block,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Computes `out[:, n] = rounded(states @ weight[n]^T + bias[n])`, plus the residual, for `BLOCK_N` rows of a
    weight.
    """
    dtype: tl.constexpr = states.dtype.element_ty
    row = tl.arange(0, BLOCK_M)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = row < num_rows
    is_column = column < N
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        left = _piece(states, row, is_row, inner, K, UPCAST)
        right = _piece(weight, column, is_column, inner, K, UPCAST)
        total = tl.dot(left, right.T, total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None]
    at = row[:, None] * N + column[None]
    inside = is_row[:, None] & is_column[None]
    if residual is not None:
        before = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        total = before + rounded(total, dtype)
    tl.store(out + at, total.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _linears_kernel(
    states,
    weight0,
    weight1,
    weight2,
    bias0,
    bias1,
    bias2,
    residual,
    out0,
    out1,
    out2,
    num_rows,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Multiplies by up to three weights.

    The first programs belong to the first weight. A missing weight has `N = 0`.
    """
    block = tl.program_id(0)
    FIRST1: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    FIRST2: tl.constexpr = FIRST1 + (N1 + BLOCK_N - 1) // BLOCK_N
    # There is a branch for each weight, because the alignment of a pointer that is chosen at run time would not be
    # known.
    if block < FIRST1:
        _write_product(
            states,
            weight0,
            bias0,
            residual,
            out0,
            block,
            num_rows,
            N0,
            K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            UPCAST,
        )
    if weight1 is not None:  # noqa: SIM102 - one condition is known to the compiler, and the other is not
        if (block >= FIRST1) & (block < FIRST2):
            _write_product(
                states,
                weight1,
                bias1,
                None,
                out1,
                block - FIRST1,
                num_rows,
                N1,
                K,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                UPCAST,
            )
    if weight2 is not None:  # noqa: SIM102 - one condition is known to the compiler, and the other is not
        if block >= FIRST2:
            _write_product(
                states,
                weight2,
                bias2,
                None,
                out2,
                block - FIRST2,
                num_rows,
                N2,
                K,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                UPCAST,
            )


@triton.jit(do_not_specialize=["num_rows"])
def _gated_linear_kernel(
    states,
    gate_weight,
    up_weight,
    out,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Computes `out[:, n] = silu(gate[:, n]) * up[:, n]` from two products.

    Each product and the activation are rounded.
    """
    dtype: tl.constexpr = states.dtype.element_ty
    row = tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = row < num_rows
    is_column = column < N
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        left = _piece(states, row, is_row, inner, K, UPCAST)
        gate_piece = _piece(gate_weight, column, is_column, inner, K, UPCAST)
        up_piece = _piece(up_weight, column, is_column, inner, K, UPCAST)
        gate = tl.dot(left, gate_piece.T, gate, input_precision="ieee")
        up = tl.dot(left, up_piece.T, up, input_precision="ieee")
    # The results are rounded in the same way as in the modules: both products, then the activation.
    value = rounded(gate, dtype)
    activated = rounded(value / (1.0 + tl.exp(-value)), dtype)
    inside = is_row[:, None] & is_column[None]
    gated = activated * rounded(up, dtype)
    tl.store(out + row[:, None] * N + column[None], gated.to(dtype), mask=inside)


def launch(given: Given) -> list[Tensor]:
    """Returns the products `[..., N_i]` in the dtype of `states`. One program handles `BLOCK_N` rows of a weight."""
    weights: list[Tensor] = list(given["weights"])
    states: Tensor = given["states"].contiguous()
    arguments: dict[str, Any] = {"residual": given["residual"]}
    outs: list[Tensor] = []
    num_programs = 0
    for index in range(3):
        is_there = index < len(weights)
        has_bias = is_there and len(given["biases"]) > 0
        arguments[f"weight{index}"] = weights[index] if is_there else None
        arguments[f"bias{index}"] = given["biases"][index] if has_bias else None
        arguments[f"N{index}"] = weights[index].shape[0] if is_there else 0
        arguments[f"out{index}"] = None
        if is_there:
            outs.append(new_out(states, weights[index]))
            arguments[f"out{index}"] = outs[index]
            num_programs += cdiv(weights[index].shape[0], BLOCK_N)
    _linears_kernel[(num_programs,)](states, **arguments, **settings(states))
    return outs


def launch_gated(given: Given) -> Tensor:
    """Returns the gated product `[..., N]` in the dtype of `states`. The programs are as in [`launch`]."""
    states: Tensor = given["states"].contiguous()
    gate_weight: Tensor = given["gate_weight_NK"]
    out = new_out(states, gate_weight)
    sizes: dict[str, Any] = {"N": gate_weight.shape[0], **settings(states)}
    grid = (cdiv(gate_weight.shape[0], BLOCK_N),)
    _gated_linear_kernel[grid](states, gate_weight, given["up_weight_NK"], out, **sizes)
    return out


def new_out(states: Tensor, weight: Tensor) -> Tensor:
    """Returns an empty tensor for the product `[..., N]` of states `[..., K]` and a weight `[N, K]`, in the states'
    dtype.
    """
    shape = (*states.shape[:-1], weight.shape[0])
    return torch.empty(shape, dtype=states.dtype, device=states.device)


def settings(states: Tensor) -> dict[str, Any]:
    """Returns the arguments with which both kernels are launched. They follow from the states alone."""
    size = states.shape[-1]
    num_rows = states.numel() // size
    return {
        "num_rows": num_rows,
        "K": size,
        # Tensor cores multiply 16 rows at a time.
        "BLOCK_M": 16 if num_rows <= 16 else 32,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": BLOCK_BYTES // states.element_size(),
        "UPCAST": interprets() and states.dtype == torch.bfloat16,
        "num_warps": NUM_WARPS,
        "num_stages": NUM_STAGES,
    }


__all__ = ["launch", "launch_gated"]
