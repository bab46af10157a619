"""This is the kernel of `follow_tree`, with one program per row and one lane per node."""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportUnnecessaryComparison=false
# (jit functions are Triton's language: their arguments are typed by the launch, which takes options besides)

from __future__ import annotations

import triton
import triton.language as tl

from .._dispatch import power_of_two
from ..ancestors import WORD_BITS, num_words
from ..operation import Given, run_kernel


@triton.jit(do_not_specialize=["num"])
def _follow_tree_kernel(
    parents,
    depths,
    ancestors,
    block,
    tokens,
    node_ids,
    path,
    stride_parents_b,
    stride_depths_b,
    stride_ancestors_b,
    stride_ancestors_n,
    stride_ancestors_a,
    stride_block_b,
    stride_tokens_b,
    stride_node_ids_b,
    stride_node_ids_n,
    stride_path_b,
    stride_path_n,
    num,
    WORDS: tl.constexpr,
    WORD_BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes `stands[n] = ancestors[n] within {0} + {m : block[m] = tokens[parents[m]]}`.

    The node at depth `d` that stands goes to column `d`. These are the first columns up to the deepest node, and one
    lane writes each of them.
    """
    row, node = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_N)
    inside = node < num
    parent = tl.load(parents + row * stride_parents_b + node, mask=inside, other=0)
    depth = tl.load(depths + row * stride_depths_b + node, mask=inside, other=0)
    ancestors += row * stride_ancestors_b + node * stride_ancestors_n
    block += row * stride_block_b
    tokens += row * stride_tokens_b
    proposed = tl.load(block + node, mask=inside, other=-1)
    said = tl.load(tokens + node, mask=inside, other=-1)
    before = tl.load(tokens + parent, mask=inside, other=-1)
    after_anchor = tl.load(tokens)

    matches = inside & ((node == 0) | (proposed == before))
    bit = matches.to(tl.int64) << (node % WORD_BITS).to(tl.int64)
    stands = inside
    for word in tl.static_range(WORDS):
        matched = tl.sum(tl.where(node // WORD_BITS == word, bit, 0), axis=0)
        on_way = tl.load(ancestors + word * stride_ancestors_a, mask=inside, other=0)
        stands = stands & ((on_way & matched) == on_way)
    is_behind = inside & (node > tl.max(tl.where(stands, depth, 0), axis=0))
    # With one warp, every lane has loaded its values before one of them stores.
    tl.store(node_ids + row * stride_node_ids_b + node * stride_node_ids_n, proposed, mask=inside)
    path += row * stride_path_b
    tl.store(path + depth * stride_path_n, node.to(tl.int64), mask=stands)
    tl.store(path + node * stride_path_n, (node * 0).to(tl.int64), mask=is_behind)
    tl.store(tokens + depth, said, mask=stands)
    tl.store(tokens + node, after_anchor, mask=is_behind)
    tl.store(block + depth, proposed, mask=stands)
    tl.store(block + node, (node * 0 - 1).to(tl.int64), mask=is_behind)


def launch(given: Given) -> None:
    """Launches the kernel, one program per row."""
    batch, num = given["block_BN"].shape
    run_kernel(
        _follow_tree_kernel,
        (batch,),
        given,
        num=num,
        WORDS=num_words(num),
        WORD_BITS=WORD_BITS,
        BLOCK_N=power_of_two(num),
        num_warps=1,
    )


__all__ = ["launch"]
