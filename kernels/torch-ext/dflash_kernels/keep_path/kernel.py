"""This is the kernel of `keep_path`. One program per row, buffer and share of a slot follows the path."""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportUnnecessaryComparison=false
# (jit functions are Triton's language: their arguments are typed by the launch, which takes options besides)

from __future__ import annotations

import triton
import triton.language as tl

from .._dispatch import cdiv, power_of_two, split_rings
from ..operation import Given, run_kernel

# Number of buffers per launch. A longer list of buffers takes long to compile.
MAX_BUFFERS = 32
MAX_BLOCK = 1024


@triton.jit(do_not_specialize=["longest", "num"])
def _keep_path_kernel(
    path,
    lengths,
    buffers,
    longest,
    shorter,
    sizes,
    num,
    stride_path_b,
    stride_path_n,
    stride_lengths_b,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Moves the slots of a path one depth after the other, without a copy.

    A node's index is never below its depth, and the nodes of a path rise. So a slot that is written at one depth is
    never the source of a deeper one.
    """
    row, which, share = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    dtype: tl.constexpr = buffers[0].dtype.element_ty
    address, ring, size = buffers[0].to(tl.int64), longest, sizes[0] + 0
    for index in tl.static_range(N):
        is_it = which == index
        address = tl.where(is_it, buffers[index].to(tl.int64), address)
        size = tl.where(is_it, sizes[index], size)
        if shorter[index] is not None:
            ring = tl.where(is_it, shorter[index], ring)
    lane = share * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lengths + row * stride_lengths_b)
    slots = address.to(tl.pointer_type(dtype)) + row * ring * size  # pyright: ignore[reportArgumentType]
    for depth in range(1, num):
        node = tl.load(path + row * stride_path_b + depth * stride_path_n)
        source, target = (length + node) % ring, (length + depth) % ring
        inside = (lane < size) & (node > depth)
        states = tl.load(slots + source * size + lane, mask=inside)
        tl.store(slots + target * size + lane, states, mask=inside)


def launch(given: Given) -> None:
    """Launches the kernel over groups of buffers with the same dtype."""
    batch, num = given["path_BN"].shape
    of_dtype: dict[object, list[object]] = {}
    for buffer in given["buffers"]:
        of_dtype.setdefault(buffer.dtype, []).append(buffer)
    for alike in of_dtype.values():
        for start in range(0, len(alike), MAX_BUFFERS):
            _launch_some(given, batch, num, tuple(alike[start : start + MAX_BUFFERS]))


def _launch_some(given: Given, batch: int, num: int, buffers: tuple[object, ...]) -> None:
    sizes: tuple[int, ...] = tuple(buffer.shape[2] * buffer.shape[3] for buffer in buffers)  # pyright: ignore
    longest, shorter = split_rings([buffer.shape[1] for buffer in buffers])  # pyright: ignore
    block = min(power_of_two(max(sizes)), MAX_BLOCK)
    run_kernel(
        _keep_path_kernel,
        (batch, len(buffers), cdiv(max(sizes), block)),
        given | {"buffers": buffers},
        longest=longest,
        shorter=shorter,
        sizes=sizes,
        num=num,
        N=len(buffers),
        BLOCK=block,
        num_warps=4,
    )


__all__ = ["launch"]
