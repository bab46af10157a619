"""Choosing tokens: logits processors over a block, noise that is keyed by what it is for, rejection of proposals.

Warpers that look at nothing but the scores run once over all positions. Everything else (processors that read the
prefix, unknown ones, stateful ones) is applied position by position, see `accept`.

Random numbers follow from (seed, row, position, stream), not from how many were drawn before. That is what makes a
sampled text the same at every block size: the token at a position is drawn with the same noise whether the position is
verified alone or as the ninth of a block.

Shapes: `B` rows, `W` verified tokens (anchor first), `V` vocabulary; of trees `N` nodes, `D` positions that propose.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from dflash_hf import ops
from dflash_hf.generation.state import DecodeState
from dflash_hf.tree import DraftTree, TreeBuilder, along

STATELESS = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitNormalization,
    InfNanRemoveLogitsProcessor,
)
# Streams of keyed noise: what the target samples with (and, under shared_noise, the draft), what a draft that samples
# on its own draws with, and what a rejection test and the redraw after it use.
TARGET_STREAM, DRAFT_STREAM, REJECT_STREAM, RESIDUAL_STREAM = 0, 1, 2, 3
# How much of a draft's distribution its most likely token takes over from the others, where trees are to branch by it.
TRUST = 0.2
# Tokens that equal the k-th may all be drawn: so many of them are looked for.
MAX_TIES = 8
# Below this float32 has no room for a ratio.
TINY = 1e-30


class Draw(NamedTuple):
    """What a temperature, a top-k, a top-p and a min-p are set to, applied in this order; the defaults do nothing."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def leaves_out(self) -> bool:
        """Whether there are tokens that may not be drawn."""
        return self.top_k is not None or self.min_p > 0.0

    def num_values(self, vocab_size: int) -> int:
        """Returns how many of the greatest logits of a position say which tokens may be drawn."""
        return 1 if self.top_k is None else min(self.top_k + MAX_TIES, vocab_size)

    def least(self, values_BKC: Tensor) -> Tensor:
        """Returns the lowest logit `[B, K]` that may be drawn: all that equal it may be, too.

        Of tokens that equal the k-th, those beyond `MAX_TIES` are left out of the sum that a top-p is a share of.
        `values_BKC` are the greatest [`num_values`] logits of each position, falling, float32. No host sync.
        """
        least = torch.full_like(values_BKC[..., 0], -math.inf)
        if self.top_k is not None:
            least = values_BKC[..., min(self.top_k, values_BKC.shape[-1]) - 1]
            if self.top_p < 1.0:
                among = values_BKC.masked_fill(values_BKC < least[..., None], -math.inf)
                probs = torch.softmax(among / self.temperature, dim=-1)
                likelier = probs.cumsum(dim=-1) - probs
                # Of falling values the first ones are kept, and the very first always.
                num_kept = (likelier < self.top_p).sum(dim=-1, keepdim=True).clamp_min(1)
                least = torch.maximum(least, values_BKC.gather(-1, num_kept - 1)[..., 0])
        if self.min_p > 0.0:
            least = torch.maximum(least, values_BKC[..., 0] + self.temperature * math.log(self.min_p))
        return least


def _draw_of(warpers: LogitsProcessorList) -> Draw | None:
    """Returns what the warpers are set to where they are of [`Draw`], in its order, else `None`.

    A top-p without a top-k before it looks at the whole vocabulary. That, and warpers that fill in another value than
    -inf or keep more than one token in any case, are none of these.
    """
    rest: list[Any] = list(warpers)

    def taken(kind: type) -> Any:
        is_next = bool(rest) and type(rest[0]) is kind
        return rest.pop(0) if is_next else None

    temperature, top_k = taken(TemperatureLogitsWarper), taken(TopKLogitsWarper)
    top_p, min_p = taken(TopPLogitsWarper), taken(MinPLogitsWarper)
    filters = [warper for warper in (top_k, top_p, min_p) if warper is not None]
    is_usual = all(warper.filter_value == -math.inf and warper.min_tokens_to_keep == 1 for warper in filters)
    if rest or not is_usual or (top_p is not None and top_k is None):
        return None
    return Draw(
        temperature=1.0 if temperature is None else float(temperature.temperature),
        top_k=None if top_k is None else int(top_k.top_k),
        top_p=1.0 if top_p is None else float(top_p.top_p),
        min_p=0.0 if min_p is None else float(min_p.min_p),
    )


class BlockProcessors:
    """A run's processors, split by whether they can be applied to a block at once."""

    def __init__(self, processors: LogitsProcessorList, pad_id: int = 0) -> None:
        self.processors: Any = processors
        self.pad_id = pad_id  # what stands where a row has no token yet
        # Exact types: a subclass may look at anything.
        self.warpers: Any = LogitsProcessorList([p for p in processors if type(p) in STATELESS])
        self.is_stateless = len(self.warpers) == len(processors)
        # Where there are no others than those of `Draw`.
        self.draw = _draw_of(self.warpers) if self.is_stateless else None

    def settings(self) -> tuple[object, ...]:
        """Returns the kinds and numbers of the stateless warpers: what a captured step has of them. Reads tensors."""
        return tuple(
            (type(warper), name, str(value.tolist()) if isinstance(value, Tensor) else value)
            for warper in self.warpers
            for name, value in [("", None), *sorted(vars(warper).items())]
        )

    def at(self, ids: Tensor, scores: Tensor, rows: Tensor) -> Tensor:
        """Applies all processors to one position; a prefix function is asked about the given rows `[B]` only."""
        for processor in self.processors:
            if type(processor) is PrefixConstrainedLogitsProcessor:
                # It may know nothing about the prefixes that rows standing elsewhere are shown with. It is told the
                # row's number in the whole batch.
                numbers, ask = rows.nonzero()[:, 0].tolist(), processor._prefix_allowed_tokens_fn

                def allowed(row: int, prefix: Tensor, ask: Any = ask, numbers: list[int] = numbers) -> list[int]:
                    return ask(numbers[row], prefix)

                one: Any = PrefixConstrainedLogitsProcessor(allowed, 1)
                scores[rows] = one(ids[rows], scores[rows])
            else:
                scores = processor(ids, scores)
        return scores

    def warp(self, logits_BKV: Tensor) -> Tensor:
        """Applies the stateless warpers to every position of `[B, K, V]` logits; returns float32 scores.

        Float32 because that is what Transformers hands to processors, so that ties fall the same way.
        """
        scores = logits_BKV.to(torch.float32)
        if not self.warpers:
            return scores
        flat = scores.flatten(0, 1)
        return self.warpers(flat.new_empty(flat.shape[0], 0, dtype=torch.long), flat).view_as(scores)


def gumbel_noise(key: Tensor, positions_BK: Tensor, tokens: Tensor, stream: int = TARGET_STREAM) -> Tensor:
    """Draws Gumbel noise `[B, K, N]`, float32, as `ops.exponential_noise`: scores plus it have a sample as argmax."""
    return -torch.log(ops.exponential_noise(key, positions_BK, tokens, stream))


def with_noise(
    scores: Tensor, key: Tensor, positions_BK: Tensor, candidates: Tensor | None = None, stream: int = TARGET_STREAM
) -> Tensor:
    """Adds noise to scores of all tokens `[B, K, V]`, or of candidates `[B, K, C]` behind each other `[B, K, C, C]`.

    That of a token at a position is the same behind every predecessor.
    """
    if candidates is None:
        return scores + gumbel_noise(key, positions_BK, torch.arange(scores.shape[-1], device=scores.device), stream)
    return scores + gumbel_noise(key, positions_BK, candidates, stream)[:, :, None]


def new_key(device: torch.device) -> Tensor:
    """Draws a run's seed from torch's global generator, so that `torch.manual_seed` makes a run repeatable."""
    return torch.randint(-(2**62), 2**62, (), dtype=torch.int64, device="cpu").to(device)


def choose(scores_BKV: Tensor, key: Tensor | None, positions_BK: Tensor, stream: int = TARGET_STREAM) -> Tensor:
    """Chooses tokens `[B, K]`, int64, from processed scores (log-probabilities up to a constant).

    The argmax, or a sample by keyed Gumbel noise: `key` is the run's seed, where `None` is greedy; `positions_BK` are
    the indices of the tokens; for `stream` see `ops.exponential_noise`.
    """
    return ops.best(scores_BKV if key is None else with_noise(scores_BKV, key, positions_BK, stream=stream))


def likeliest_from_logits(logits_BKV: Tensor, processors: BlockProcessors) -> Tensor:
    """Chooses the tokens `[B, K]` with the greatest scores that stateless processors make of logits."""
    # As float32 a half's scores are in the same order, those of a double need not be.
    is_plain = not processors.warpers and logits_BKV.dtype.itemsize <= 4
    return ops.best(logits_BKV if is_plain else processors.warp(logits_BKV))


def draw_from_logits(logits_BKV: Tensor, processors: BlockProcessors, key: Tensor, positions_BK: Tensor) -> Tensor:
    """Draws tokens as [`choose`] does from the scores that stateless processors make of logits.

    Where the processors are those of [`Draw`], neither scores nor noise are made of the whole vocabulary: the kernel
    makes none, and without it they are made of the tokens that a top-k leaves.
    """
    draw = processors.draw
    if draw is None:
        return choose(processors.warp(logits_BKV), key, positions_BK)
    if ops.picks(logits_BKV):
        least = None
        if draw.leaves_out:
            least = draw.least(_greatest(logits_BKV, draw.num_values(logits_BKV.shape[-1]))[0])
        return ops.gumbel_argmax(logits_BKV, key, positions_BK, least, draw.temperature, TARGET_STREAM)
    # In half precision more tokens may equal the k-th than are looked for.
    has_few_ties = logits_BKV.dtype.itemsize >= 4
    if draw.top_k is None or not has_few_ties:
        return choose(processors.warp(logits_BKV), key, positions_BK)
    values, tokens = _greatest(logits_BKV, draw.num_values(logits_BKV.shape[-1]))
    is_left_out = values < draw.least(values)[..., None]
    scores = (values / draw.temperature).masked_fill(is_left_out, -math.inf)
    noisy = scores + gumbel_noise(key, positions_BK, tokens)
    return tokens.gather(-1, noisy.argmax(dim=-1, keepdim=True))[..., 0]


def _greatest(logits_BKV: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Returns the greatest logits of each position, falling, and their tokens: `[B, K, num]`, float32 and int64."""
    if num > ops.MAX_NUM or not ops.picks(logits_BKV):
        values, tokens = logits_BKV.topk(num, dim=-1)
        return values.float(), tokens
    _, tokens = ops.top_tokens(logits_BKV[:, :, None], num)
    tokens = tokens[:, :, 0]
    return logits_BKV.gather(-1, tokens).float(), tokens


def accept_rejection(
    proposals: Tensor, target_scores_BWV: Tensor, draft_probs: Tensor, key: Tensor, positions_BW: Tensor
) -> tuple[Tensor, Tensor]:
    """Keeps each proposal with probability `min(1, p / q)`; on the first refusal redraws from `max(p - q, 0)`.

    The proposals `[B, W - 1]` were drawn from `q`, `draft_probs` `[B, W - 1, V]`; the target's scores are processed;
    each position is the index of the token that it decides. Returns the number accepted `[B]`, and tokens `[B, W]`:
    the proposals, with the redrawn or bonus token standing at index `num_accepted`.

    Source: Leviathan et al., arXiv 2211.17192, algorithm 1.
    """
    probs = torch.softmax(target_scores_BWV, dim=-1, dtype=torch.float32)
    chosen = proposals[..., None]
    p = probs[:, :-1].gather(-1, chosen)[..., 0]
    q = draft_probs.gather(-1, chosen)[..., 0]
    num_accepted = (_uniform(key, positions_BW[:, :-1], torch.zeros_like(chosen)) * q < p).cumprod(dim=1).sum(dim=1)
    padded = torch.cat([draft_probs, torch.zeros_like(draft_probs[:, :1])], dim=1)
    residual = _residual(probs, padded, num_accepted, torch.ones_like(p[:, 0]))
    redrawn = _redraw(residual, probs, num_accepted, key, positions_BW)
    return num_accepted, torch.cat([proposals, redrawn], dim=1).scatter(1, num_accepted[:, None], redrawn)


def _uniform(key: Tensor, positions_BK: Tensor, draws_BK1: Tensor) -> Tensor:
    """Uniform numbers `u` that tell `u < p / q`, `[B, K]`: of an exponential one, `1 - exp(-e)`."""
    return -torch.expm1(-ops.exponential_noise(key, positions_BK, draws_BK1, REJECT_STREAM)[..., 0])


def _residual(probs_BWV: Tensor, draft_probs_BWV: Tensor, at_B: Tensor, weight_B: Tensor) -> Tensor:
    """What refusals leave of the target's distribution at an index: `max(p - weight * q, 0)`, `[B, V]`."""
    rows = torch.arange(len(at_B), device=at_B.device)
    p, q = probs_BWV[rows, at_B], draft_probs_BWV[rows, at_B]
    return torch.addcmul(p, q, weight_B[:, None], value=-1).clamp_min_(0)


def _redraw(residual_BV: Tensor, probs_BWV: Tensor, at_B: Tensor, key: Tensor, positions_BW: Tensor) -> Tensor:
    """Draws the token behind what stands, `[B, 1]`: from what is left there, or from all where that is nothing."""
    at = at_B[:, None]
    left = torch.where(residual_BV.sum(dim=-1, keepdim=True) > 0, residual_BV, along(at, probs_BWV)[:, 0])
    return choose(torch.log(left)[:, None], key, positions_BW.gather(1, at), RESIDUAL_STREAM)


def ends_row(tokens: Tensor, eos_ids: Tensor) -> Tensor:
    """Says which tokens, of any shape, are among the end-of-sequence ids `[N]`.

    Not `torch.isin`: with many ids it sorts, and reads how many different ones there are on the host.
    """
    return (tokens[..., None] == eos_ids).any(dim=-1)


# ---- trees whose tokens are drawn from the draft
#
# The children of a node are drawn one after the other without putting back, and the target tests them in that order:
# each is kept with probability `min(1, p / q)`, and behind one that is refused `p` is what is left of `p - q`, `q`
# what is left of `q`. With one child per node that is a chain's rejection, with the same noise.
#
# How a tree branches must not follow from what was drawn: which draws are tested would then depend on the draws, and
# the text would have another distribution. So the shape is that of the tree of the draft's most likely tokens, and the
# tokens that are drawn take the nodes' places. Draws of a position are the same behind every node; only one is walked.


def draw_tree(
    trees: TreeBuilder,
    state: DecodeState,
    scores: Tensor,
    positions_BD: Tensor,
    vocab_size: int,
    candidates_BDC: Tensor | None = None,
) -> None:
    """Proposes a tree of tokens drawn from `softmax(scores)`: the state's `nodes`, `proposals` and `draft_probs`.

    Scores, processed and float32, and candidates are as [`TreeBuilder.build`] takes them; `positions_BD`, int64, the
    index in its row of each token that is drawn. No host sync.
    """
    assert state.key is not None
    probs, num, num_ranks = torch.softmax(scores, dim=-1), scores.shape[-1], trees.num_ranks
    tree = _branched(trees, state, probs, candidates_BDC)
    noisy = with_noise(scores, state.key, positions_BD, candidates_BDC, DRAFT_STREAM)
    draws, slots = noisy.topk(num_ranks, dim=-1).indices.flatten(1), (tree.depths - 1).clamp_min(0)
    # Behind the deepest nodes nothing is drawn, and no matter what stands there.
    behind = tree.depths.clamp_max(probs.shape[1] - 1)
    if candidates_BDC is None:
        at = draws.gather(1, slots * num_ranks + tree.ranks())
        state.draft_probs = along(behind, probs)
    else:
        first, at = slots * (num * num_ranks) + tree.ranks(), torch.zeros_like(slots)
        for _ in range(probs.shape[1]):  # which candidate each node is: right one level deeper every time
            drawn = draws.gather(1, first + at.gather(1, tree.parents) * num_ranks)
            at = drawn.masked_fill(tree.depths == 0, 0)
        probs = along(behind * num + at, probs.flatten(1, 2))
        scattered = probs.new_zeros(*at.shape, vocab_size)
        state.draft_probs = scattered.scatter_(-1, along(behind, candidates_BDC), probs)
        at = candidates_BDC.flatten(1).gather(1, slots * num + at)
    state.proposals.copy_(at[:, 1:])


def _branched(trees: TreeBuilder, state: DecodeState, probs: Tensor, candidates: Tensor | None = None) -> DraftTree:
    """Builds a tree of the most likely tokens of a draft's distributions `[..., V]`; writes `state.nodes`.

    A draw is accepted more often than its token is likely: always, where the target has the draft's distribution. So
    what branches as the tokens' probabilities say would be too wide where the draft is right about what is open.
    """
    assert state.nodes is not None
    best, others = probs.argmax(dim=-1, keepdim=True), (1 - TRUST) * probs
    trusted = torch.log(others.scatter_(-1, best, others.gather(-1, best) + TRUST))
    trees.build(trusted, state.nodes, state.whole_block, candidates)
    assert state.tree is not None
    return state.tree


def accept_drawn(state: DecodeState, tree: DraftTree, target_scores_BNV: Tensor, may_read: bool = False) -> Tensor:
    """Decides what of a drawn tree stands, by the target's processed scores behind each node. No host sync.

    Path, block and tokens are written as by [`DecodeState.follow`]. `may_read` is that of [`walk`], only where that
    waits for no device. Returns the number accepted `[B]`.
    """
    assert state.draft_probs is not None
    assert state.key is not None
    positions, probs = state.positions_behind(tree), torch.softmax(target_scores_BNV, dim=-1, dtype=torch.float32)
    may_read = may_read and positions.device.type == "cpu"
    stands, token = walk(tree, state.block, probs, state.draft_probs, state.key, positions, may_read)
    # What stands is what is said after its parent.
    said = torch.where(stands & (tree.depths > 0), state.block, -1)
    state.tokens.fill_(-1).scatter_reduce_(1, tree.parents, said, "amax")
    state.follow(tree)
    assert state.path is not None
    num_accepted = (state.path > 0).sum(dim=1)
    # Behind the path's end there is nothing.
    state.tokens[:, :-1] = state.proposals.clamp_min(0)
    state.tokens.scatter_(1, num_accepted[:, None], token)
    return num_accepted


def walk(
    tree: DraftTree,
    block_BN: Tensor,
    probs_BNV: Tensor,
    draft_probs_BNV: Tensor,
    key: Tensor,
    positions_BN: Tensor,
    may_read: bool = False,
) -> tuple[Tensor, Tensor]:
    """Goes from the anchor to the first child that is kept, until none is; then draws from what is left.

    Behind the refusals of some children `p` is `max(p - weight * q, 0)` over its sum: each adds, to the weight, that
    sum over what `q` still had. So two numbers a row are all that goes from one test to the next.

    Siblings of the tree differ, and stand in the order of their draws. The distributions, float32, are the target's
    behind each node, and the one that the node's children were drawn from, without putting back; `positions_BN` the
    index in its row of the token behind each node. With `may_read`, what tests no row is left out, by a look on the
    host. Returns the nodes that stand `[B, N]`, bool, and the token behind them `[B, 1]`.

    Source: Leviathan et al., arXiv 2211.17192; without putting back, Jeon et al., arXiv 2402.14160.
    """
    ranks, size = tree.ranks(), probs_BNV.shape[-1]
    pair = tree.parents * size + block_BN
    p, q = (values.flatten(1).gather(1, pair) for values in (probs_BNV, draft_probs_BNV))
    left = _left(tree, pair, q, draft_probs_BNV).masked_fill_((ranks == 0) | (q == 0), 1)
    share = _uniform(key, positions_BN - 1, ranks[..., None]) * q / left
    # What could not be drawn is not tested.
    parents = tree.parents.masked_fill(q == 0, -1)
    node, weight, mass = torch.zeros_like(block_BN[:, 0]), torch.zeros_like(q[:, 0]), torch.ones_like(q[:, 0])
    kept = torch.zeros_like(block_BN, dtype=torch.bool)
    kept[:, 0] = True
    for index in range(1, block_BN.shape[1]):
        is_tested = parents[:, index] == node
        if may_read and not bool(is_tested.any()):
            continue
        is_kept = is_tested & (share[:, index] * mass + weight * q[:, index] < p[:, index])
        is_refused = is_tested ^ is_kept
        kept[:, index] = is_kept
        node = node.masked_fill(is_kept, index)
        weight = (weight + is_refused * (mass / left[:, index])).masked_fill(is_kept, 0)
        if may_read and not bool(is_refused.any()):
            mass = mass.masked_fill(is_kept, 1)
            continue
        mass = torch.where(weight > 0, _residual(probs_BNV, draft_probs_BNV, node, weight).sum(dim=-1), 1)
    residual = _residual(probs_BNV, draft_probs_BNV, node, weight)
    return kept, _redraw(residual, probs_BNV, node, key, positions_BN)


def _left(tree: DraftTree, pair_BN: Tensor, q_BN: Tensor, draft_probs_BNV: Tensor) -> Tensor:
    """What the draft's distribution still had before each node was drawn `[B, N]`: all but its earlier siblings.

    Summed, not subtracted from one: it may be less than float32 has digits for.
    """
    nodes = torch.arange(pair_BN.shape[1], device=pair_BN.device)
    others = draft_probs_BNV.flatten(1).scatter(1, pair_BN[:, 1:], 0).view_as(draft_probs_BNV).sum(dim=-1)
    is_later = (tree.parents[:, :, None] == tree.parents[:, None]) & (nodes >= nodes[:, None]) & (nodes > 0)
    return (others.gather(1, tree.parents) + (is_later * q_BN[:, None]).sum(dim=-1)).clamp_min_(TINY)
