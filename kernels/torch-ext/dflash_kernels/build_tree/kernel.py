"""This is the kernel of `build_tree`.

One program per row adds the best child that any node still has, node after node.

No list of paths is needed: every node offers its best child that is not in the tree, and the best offer becomes the
next node. The repetition in the text makes one more offer. If the draft's offers reach a node of the repetition later,
this node is opened: it offers children from then on.
"""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportUnnecessaryComparison=false
# (jit functions are Triton's language: their arguments are typed by the launch, which takes options besides)

from __future__ import annotations

import triton
import triton.language as tl

from .._dispatch import power_of_two
from ..ancestors import WORD_BITS, num_words
from ..operation import Given, run_kernel
from . import DOUBT, LEAST, LEVEL, NODE_PARTS

# Number of columns of the text that are compared at once.
BLOCK_T = 1024


@triton.jit
def _at(values, lane, index):
    """Returns `values[index]`."""
    return tl.sum(tl.where(lane == index, values, 0), axis=0)


@triton.jit
def _cost(log_probs, place, inside, LEVEL: tl.constexpr, LEAST: tl.constexpr):
    """Returns `max(log_probs[place], LEAST) - LEVEL`, or `-inf` if `inside` is False."""
    found = tl.maximum(tl.load(log_probs + place, mask=inside, other=0), LEAST) - LEVEL
    return tl.where(inside, found, float("-inf"))


@triton.jit
def _look_back(ids, last, NUM_SAME: tl.constexpr, BLOCK_T: tl.constexpr):
    """Returns `m << 32 | c`, or -1 if no column matches.

    `c < last` is the latest column that shares the most last tokens, `m`.
    """
    found = tl.full([BLOCK_T], -1, tl.int64)
    for first in range(0, last, BLOCK_T):
        column = first + tl.arange(0, BLOCK_T)
        goes_on = column < last
        num_same = tl.zeros([BLOCK_T], tl.int64)
        for back in tl.static_range(NUM_SAME):
            ending = tl.load(ids + last - back, mask=last >= back, other=-1)
            earlier = tl.load(ids + column - back, mask=goes_on & (column >= back), other=-2)
            goes_on = goes_on & (earlier == ending)
            num_same += goes_on.to(tl.int64)
        found = tl.maximum(found, tl.where(num_same > 0, (num_same << 32) | column, -1))
    return tl.max(found, axis=0)


@triton.jit
def _choice(order, candidates, position, num_states, place, inside, HAS_CANDIDATES: tl.constexpr):
    """Returns the token of a rank, `order[place]`, and the state after this token."""
    token = tl.load(order + place, mask=inside, other=0)
    state = (token * 0).to(tl.int32)
    if HAS_CANDIDATES:
        state = token.to(tl.int32)
        token = tl.load(candidates + position * num_states + token, mask=inside, other=0)
    return token, state


@triton.jit
def _doubt(
    log_probs,
    order,
    candidates,
    ids,
    last,
    first_row,
    num_first,
    num_states,
    num_ranks,
    HAS_CANDIDATES: tl.constexpr,
    LEVEL: tl.constexpr,
    LEAST: tl.constexpr,
    DOUBT: tl.constexpr,
):
    """Returns the level at which `ids[0 ... last]` leaves the draft's first choices, and `DOUBT log(1 - exp(cost))` of
    the first choice that it leaves.

    If it leaves none, the level is -1 and the second value is 0.
    """
    leaves_at, doubt, state = (
        tl.full([], -1, tl.int32),
        tl.full([], 0, tl.float32),
        tl.full([], 0, tl.int32),
    )
    for level in range(num_first):
        place = ((first_row + level) * num_states + state) * num_ranks
        token, state = _choice(
            order, candidates, first_row + level, num_states, place, num_first > 0, HAS_CANDIDATES
        )
        leaves = (leaves_at < 0) & (tl.load(ids + level, mask=level <= last, other=-1) != token)
        cost = _cost(log_probs, place, num_first > 0, LEVEL, LEAST)
        doubt = tl.where(leaves, DOUBT * tl.log(1 - tl.exp(cost)), doubt)
        leaves_at = tl.where(leaves, level, leaves_at)
    return leaves_at, doubt


# Arguments that differ from run to run must not make the kernel compile again.
@triton.jit(do_not_specialize=["stride_ids_b", "num_levels", "num_states", "num_ranks", "num"])
def _build_tree_kernel(
    log_probs,
    order,
    nodes,
    block,
    candidates,
    ids,
    cursor,
    follows,
    stride_nodes_x,
    stride_nodes_b,
    stride_block_b,
    stride_ids_b,
    stride_follows_f,
    num_levels,
    num_states,
    num_ranks,
    num,
    HAS_CANDIDATES: tl.constexpr,
    NUM_SAME: tl.constexpr,
    LEVEL: tl.constexpr,
    LEAST: tl.constexpr,
    DOUBT: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_BITS: tl.constexpr,
    NODE_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Takes the greatest of all offers as the next node. Node `i` offers its best child that is not in the tree, which
    has rank `rank[i]`: `offer[i] = total[i] + cost[depth[i], state[i], rank[i]]`.
    """
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK_N)
    # The repetition in the text: where it begins, where the text ends, and its totals.
    start, last = tl.full([], 1, tl.int32), tl.full([], 0, tl.int32)
    its_first, its_further = 0.0, 0.0
    leaves_at, doubt = tl.full([], 0, tl.int32), tl.full([], 0, tl.float32)
    first_row = row * num_levels
    if NUM_SAME > 0:
        ids += row.to(tl.int64) * stride_ids_b
        last = tl.load(cursor + row).to(tl.int32) - 1
        found = _look_back(ids, last, NUM_SAME, BLOCK_T)
        start = tl.where(found < 0, last, found & 0x7FFFFFFF).to(tl.int32) + 1
        its_first = tl.load(follows + (found >> 32), mask=found >= 0, other=0)
        its_further = tl.load(follows + stride_follows_f + (found >> 32), mask=found >= 0, other=0)
        leaves_at, doubt = _doubt(
            log_probs, order, candidates, ids + start, last - start, first_row, tl.minimum(num_levels, num - 1),
            num_states, num_ranks, HAS_CANDIDATES, LEVEL, LEAST, DOUBT
        )  # fmt: skip

    parents, depth, state, rank = lane * 0, lane * 0, lane * 0, lane * 0
    # The number of paths whose ranks are nowhere greater than those of a node's path: of its length, and shorter ones.
    alike, before = lane * 0 + 1, lane * 0
    # The words of the ancestors of all nodes, one node after the other. The anchor is its own ancestor.
    cell = tl.arange(0, BLOCK_N * BLOCK_A)
    ancestors = (cell == 0).to(tl.int64)
    tokens = (lane * 0).to(tl.int64)
    sources = lane * 0
    is_text = lane == 0
    total = (lane * 0).to(tl.float32)
    offer = _cost(log_probs, first_row * num_states * num_ranks, num > 1, LEVEL, LEAST)
    offer = tl.where(lane == 0, offer, float("-inf"))
    placed, tries = tl.full([], 1, tl.int32), tl.full([], 0, tl.int32)
    # Every try adds a node or opens one.
    while (placed < num) & (tries < 2 * num):
        tries += 1
        best = tl.max(offer, axis=0)
        parent = tl.minimum(tl.min(tl.where(offer == best, lane, BLOCK_N), axis=0), placed - 1)
        # The length of the repetition's part that is in the tree
        reach = tl.max(tl.where(is_text, depth, 0), axis=0)
        is_guess = placed < 0
        if NUM_SAME > 0:
            its_total = (
                its_first + its_further * reach.to(tl.float32) - LEVEL * (reach + 1).to(tl.float32)
            )
            its_total += tl.where(reach >= leaves_at, doubt, 0)
            is_guess = (reach < num_levels) & (start + reach <= last) & (its_total > best)
            parent = tl.where(
                is_guess, tl.max(tl.where(is_text & (depth == reach), lane, 0), axis=0), parent
            )
        level = _at(depth, lane, parent)
        its_rank, its_alike = _at(rank, lane, parent), _at(alike, lane, parent)
        its_before = _at(before, lane, parent)
        place = ((first_row + level) * num_states + _at(state, lane, parent)) * num_ranks + its_rank
        drafted = (is_guess == 0) & (level < num_levels)
        token, choice = _choice(
            order, candidates, first_row + level, num_states, place, drafted, HAS_CANDIDATES
        )
        continues = is_guess
        if NUM_SAME > 0:
            said = tl.load(ids + start + level, mask=start + level <= last, other=-1)
            token = tl.where(is_guess, said, token)
            continues = (token == said) & (_at(is_text.to(tl.int32), lane, parent) > 0)
        is_there = continues & (level < reach)
        node = tl.where(
            is_there, tl.max(tl.where(is_text & (depth == level + 1), lane, 0), axis=0), placed
        )

        # The parent offers its next child, and the node offers its first child.
        is_parent, is_node = (lane == parent) & drafted, (lane == node) & drafted
        its_alike_now = its_alike * (its_rank + 1)
        goes_on = (
            drafted & (its_rank + 1 < num_ranks) & (its_before + its_alike_now + its_alike < num)
        )
        following = _at(total, lane, parent) + _cost(log_probs, place + 1, goes_on, LEVEL, LEAST)
        deepens = drafted & (level + 1 < num_levels) & (its_before + 2 * its_alike_now < num)
        below = ((first_row + level + 1) * num_states + choice) * num_ranks
        child = best + _cost(log_probs, below, deepens, LEVEL, LEAST)
        offer = tl.where(is_node, child, tl.where(is_parent, following, offer))
        rank = tl.where(is_parent, its_rank + 1, rank)
        total, state = tl.where(is_node, best, total), tl.where(is_node, choice, state)
        alike = tl.where(is_node, its_alike_now, alike)
        before = tl.where(is_node, its_before + its_alike_now, before)

        is_new = (lane == node) & (is_there == 0)
        parents, depth = tl.where(is_new, parent, parents), tl.where(is_new, level + 1, depth)
        tokens = tl.where(is_new, token, tokens)
        bit = tl.full([], 1, tl.int64) << (node % WORD_BITS).to(tl.int64)
        for word in tl.static_range(WORDS):
            bits = _at(ancestors, cell, parent * BLOCK_A + word)
            bits |= tl.where(node // WORD_BITS == word, bit, 0)
            is_its_word = (cell == node * BLOCK_A + word) & (is_there == 0)
            ancestors = tl.where(is_its_word, bits, ancestors)
        sources = tl.where(is_new & is_guess, 1, sources)
        is_text = is_text | (is_new & continues)
        placed += tl.where(is_there, 0, 1)

    inside = lane < num
    nodes += row.to(tl.int64) * stride_nodes_b
    tl.store(nodes + lane, parents.to(tl.int64), mask=inside)
    tl.store(nodes + stride_nodes_x + lane, sources.to(tl.int64), mask=inside)
    tl.store(nodes + 2 * stride_nodes_x + lane, depth.to(tl.int64), mask=inside)
    its_node, word = cell // BLOCK_A, cell % BLOCK_A
    words = nodes + (NODE_PARTS + word) * stride_nodes_x + its_node
    tl.store(words, ancestors, mask=(its_node < num) & (word < WORDS))
    tl.store(block + row.to(tl.int64) * stride_block_b + lane, tokens, mask=inside & (lane > 0))


def launch(given: Given) -> None:
    """Launches the kernel, one program per row."""
    batch, num_levels, num_states, num_ranks = given["log_probs_BDSR"].shape
    num = given["block_BN"].shape[1]
    words = num_words(num)
    run_kernel(
        _build_tree_kernel,
        (batch,),
        given,
        num_levels=num_levels,
        num_states=num_states,
        num_ranks=num_ranks,
        num=num,
        HAS_CANDIDATES=given["candidates_BDC"] is not None,
        NUM_SAME=0 if given["ids_BT"] is None else given["follows_FM"].shape[1] - 1,
        LEVEL=LEVEL,
        LEAST=LEAST,
        DOUBT=DOUBT,
        WORDS=words,
        WORD_BITS=WORD_BITS,
        NODE_PARTS=NODE_PARTS,
        BLOCK_N=power_of_two(num),
        BLOCK_A=power_of_two(words),
        BLOCK_T=BLOCK_T,
        num_warps=4,
    )


__all__ = ["launch"]
