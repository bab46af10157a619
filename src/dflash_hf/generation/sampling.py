"""This module chooses tokens: logits processors over a block, noise that depends on the position, and rejection.

Warpers that look only at the scores run once over all positions. The same applies to processors before them that hide
tokens by the length of the text. All other processors read the prefix, keep state or are unknown. They are applied
position by position; see `accept`.

Random numbers follow from (seed, row, position, stream), and not from the number of earlier draws. So a sampled text
is the same at every block size. The token at a position is drawn with the same noise if the position is verified alone
or, for example, as the ninth of a block.

Shapes: `B` rows, `W` verified tokens (anchor first), `V` vocabulary.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from dflash_hf import ops
from dflash_hf.block.tree import along
from dflash_hf.errors import require
from dflash_hf.generation.draw import Draw, draw_of

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
# Streams of noise: for the target's samples (and under shared_noise for the draft's), for a draft that samples with
# its own noise, for rejection tests, and for the new draw after a rejection.
TARGET_STREAM = 0
DRAFT_STREAM = 1
REJECT_STREAM = 2
RESIDUAL_STREAM = 3


class HiddenTokens(NamedTuple):
    """Tokens that may not be chosen after a text of `first` to `end - 1` columns, whatever the text is."""

    tokens: Tensor  # [N], int64
    first: int
    end: int

    def hide(self, logits_BKV: Tensor, columns_BK: Tensor) -> None:
        """Writes -inf into these tokens' logits, in place, after texts of such a number of columns; no host sync."""
        is_hidden = (columns_BK >= self.first) & (columns_BK < self.end)
        tokens = self.tokens.to(logits_BKV.device)
        # An id that the target does not have must hide nothing.
        is_known = (tokens >= 0) & (tokens < logits_BKV.shape[-1])
        tokens = torch.where(is_known, tokens, 0)
        hides = is_hidden[..., None] & is_known
        # The minimum of logit and bound is taken, because token 0 takes the place of an unknown id.
        bounds = torch.where(hides, -math.inf, math.inf).to(logits_BKV.dtype)
        logits_BKV.scatter_reduce_(-1, tokens.expand_as(bounds), bounds, reduce="amin")


def _hidden_by(processor: Any) -> HiddenTokens | None:
    """Returns the tokens that a processor hides only by the length of the text; `None` for any other processor."""
    # Only exact classes count, because a subclass may look at anything.
    kind = type(processor)
    # A caller may have passed one end token as a tensor without dimensions.
    if kind is MinLengthLogitsProcessor:
        return HiddenTokens(processor.eos_token_id.reshape(-1), 0, processor.min_length)
    if kind is MinNewTokensLengthLogitsProcessor:
        end = processor.prompt_length_to_skip + processor.min_new_tokens
        return HiddenTokens(processor.eos_token_id.reshape(-1), 0, end)
    if kind is SuppressTokensLogitsProcessor:
        return HiddenTokens(processor.suppress_tokens, 0, sys.maxsize)
    if kind is SuppressTokensAtBeginLogitsProcessor:
        begin = processor.begin_index
        return HiddenTokens(processor.begin_suppress_tokens, begin, begin + 1)
    return None


class BlockProcessors:
    """The processors of a run, split into those that can be applied to a whole block at once and the others.

    Args:
        processors (`LogitsProcessorList`): All processors, in order.
        pad_id (`int`): The id for places where a row has no token yet.
    """

    def __init__(self, processors: LogitsProcessorList, pad_id: int = 0) -> None:
        self.processors: Any = processors
        self.pad_id = pad_id
        # The processors at the beginning of the list, before any processor that changes scores.
        self.hidden: list[HiddenTokens] = []
        for processor in processors:
            hidden = _hidden_by(processor)
            if hidden is None:
                break
            self.hidden.append(hidden)
        self.hides = bool(self.hidden)
        # Only exact classes count, because a subclass may look at anything.
        self.warpers: Any = LogitsProcessorList([p for p in processors if type(p) in STATELESS])
        # Processors that improve proposals by knowledge that the draft does not have; see `shaped_proposals.py`.
        self.shaping = [p for p in processors if getattr(p, "shapes_proposals", False)]
        # Whether no processor needs the prefix, so that all positions of a block are processed at once.
        self.is_stateless = len(self.hidden) + len(self.warpers) == len(processors)
        # The values of the warpers, if there are no other processors and a kernel knows these warpers.
        self.draw: Draw | None = None
        if self.is_stateless:
            self.draw = draw_of(self.warpers)

    def shapes(self, row: int) -> bool:
        """Returns True if there are processors that shape the proposals of a row."""
        return bool(self.shaping)

    def shape(self, row: int, ids: Tensor, scores: Tensor) -> Tensor:
        """Returns the draft's scores `[1, V]` after the ids `[1, T]` of a row, as the processors change them."""
        for processor in self.shaping:
            scores = processor(ids, scores)
        return scores

    def settings(self) -> tuple[object, ...]:
        """Returns the values of the stateless processors, which a captured step contains; reads on the host."""
        found: list[object] = []
        for tokens, first, end in self.hidden:
            found.append((tuple(tokens.tolist()), first, end))
        for warper in self.warpers:
            found.append(type(warper))
            for name, value in sorted(vars(warper).items()):
                if isinstance(value, Tensor):
                    value = str(value.tolist())
                found.append((name, value))
        return tuple(found)

    def at(self, ids: Tensor, scores: Tensor, rows: Tensor) -> Tensor:
        """Applies all processors to one position. A prefix function is called only for the given rows `[B]`."""
        for processor in self.processors:
            if type(processor) is PrefixConstrainedLogitsProcessor:
                # Other rows have a prefix of another position here. The function may not know such a prefix.
                numbers: list[int] = rows.nonzero()[:, 0].tolist()
                asked = _asked_about(processor, numbers)
                scores[rows] = asked(ids[rows], scores[rows])
            else:
                scores = processor(ids, scores)
        return scores

    def check_drawable(self, scores_BKV: Tensor, is_drawn_BK: Tensor) -> None:
        """Refuses processed scores of the drawn tokens as [`check_drawable`] does; reads on the host."""
        check_drawable(scores_BKV[is_drawn_BK])

    def hide(self, logits_BKV: Tensor, columns_BK: Tensor) -> Tensor:
        """Returns logits without the tokens in `hidden`. Only called if [`hides`] is true.

        `columns_BK`, int64, is the number of columns of the text before each token.
        """
        # The logits are copied, because the call may ask for the target's own logits.
        logits_BKV = logits_BKV.clone()
        for hidden in self.hidden:
            hidden.hide(logits_BKV, columns_BK)
        return logits_BKV

    def warp(self, logits_BKV: Tensor) -> Tensor:
        """Applies the stateless warpers to every position of `[B, K, V]` logits; returns float32 scores.

        The scores are float32 because Transformers passes float32 to processors, so that ties end in the same way.
        """
        scores = logits_BKV.to(torch.float32)
        if not self.warpers:
            return scores
        flat = scores.flatten(0, 1)
        # Stateless warpers get a prefix, but do not read it.
        no_ids = flat.new_empty(flat.shape[0], 0, dtype=torch.long)
        return self.warpers(no_ids, flat).view_as(scores)


def of_vocabulary(scores: Tensor, num_rows: int, vocab_size: int) -> Tensor:
    """Returns the scores of processors as `[num_rows, vocab_size]`, with -inf for tokens that they left out.

    A processor may return only the scores of the first tokens, and -inf for tokens that the target does not have. Such
    a token has no embedding, so raises `ValueError` for any other score of it. Also raises `ValueError` for scores of
    another shape.
    """
    got: Any = getattr(scores, "shape", type(scores).__name__)
    is_table = len(got) == 2 and got[0] == num_rows and got[1] > 0
    what = f"scores of {num_rows} rows and at least one token from logits processors"
    require(is_table, what, got, "return scores for each row of ids")
    num_given = scores.shape[1]
    if num_given > vocab_size:
        has_none = bool(scores[:, vocab_size:].isneginf().all())
        what = f"scores of at most {vocab_size} tokens from logits processors, all others -inf"
        action = "return no scores of tokens that the target does not have"
        require(has_none, what, num_given, action)
        return scores[:, :vocab_size]
    if num_given == vocab_size:
        return scores
    return nn.functional.pad(scores, (0, vocab_size - num_given), value=-math.inf)


def check_drawable(scores_NV: Tensor) -> None:
    """Raises `ValueError` for processed scores `[N, V]` from which no token can be drawn, as torch's own draw does.

    There are no probabilities if all scores are -inf, or if one is inf or NaN. Reads on the host.
    """
    greatest = scores_NV.amax(dim=-1)
    is_drawable = greatest.isfinite()
    if bool(is_drawable.all()):
        return
    raise ValueError(
        f"expected scores that a token can be drawn from, got {float(greatest[~is_drawable][0])} as the greatest of "
        "them; leave a token that no processor hides, or look for NaN in the target's logits"
    )


class RowProcessors(BlockProcessors):
    """The processors of a batch in which every row has its own processors, as if the row was alone.

    Args:
        rows (sequence of `BlockProcessors`): The processors of each row.
        is_sampled (sequence of `bool`): Whether the tokens of each row are sampled. If at least one row is sampled,
            the scores of a greedy row are -inf for all tokens except the likeliest, so that any noise draws this
            token.
    """

    def __init__(self, rows: Sequence[BlockProcessors], is_sampled: Sequence[bool]) -> None:
        every = [processor for row in rows for processor in row.processors]
        super().__init__(LogitsProcessorList(every))
        # These properties of the combined list say nothing about a single row.
        self.draw = None
        self.hidden = []
        self.hides = any(row.hides for row in rows)
        self.is_stateless = all(row.is_stateless for row in rows)
        self.rows = list(rows)
        self.is_sampled = list(is_sampled)
        # Errors that the processors of a row have raised. The text of this row cannot continue, but the others can.
        self.failed: dict[int, Exception] = {}

    def settings(self) -> tuple[object, ...]:
        """Returns the values of each row's stateless processors, and whether it is sampled; reads on the host."""
        of_rows = [row.settings() for row in self.rows]
        return tuple(zip(of_rows, self.is_sampled, strict=True))

    def at(self, ids: Tensor, scores: Tensor, rows: Tensor) -> Tensor:
        """Applies each row's own processors to one position of this row, for the given rows `[B]` only."""
        is_alone = torch.ones(1, dtype=torch.bool, device=rows.device)
        numbers: list[int] = rows.nonzero()[:, 0].tolist()
        processed = scores
        for row in numbers:
            one = slice(row, row + 1)
            own = functools.partial(self.rows[row].at, rows=is_alone)
            found = self._unless_failed(row, own, ids[one], scores[one])
            found = self._noise_proof(row, found)
            # A user's processor may return float64 scores for float32 scores.
            processed = processed.to(torch.promote_types(processed.dtype, found.dtype))
            processed[one] = found
        return processed

    def check_drawable(self, scores_BKV: Tensor, is_drawn_BK: Tensor) -> None:
        """Stores an error for each row that has a token that cannot be drawn; reads on the host."""
        for row, is_drawn in enumerate(is_drawn_BK):
            try:
                check_drawable(scores_BKV[row, is_drawn])
            except ValueError as error:
                self.failed.setdefault(row, error)

    def shapes(self, row: int) -> bool:
        """Returns True if a row has processors of its own that shape its proposals."""
        return self.rows[row].shapes(0)

    def shape(self, row: int, ids: Tensor, scores: Tensor) -> Tensor:
        """Returns the draft's scores `[1, V]` after the ids `[1, T]` of a row, as its own processors change them."""
        own = functools.partial(self.rows[row].shape, 0)
        return self._unless_failed(row, own, ids, scores)

    def _unless_failed(
        self, row: int, own: Callable[[Tensor, Tensor], Tensor], ids: Tensor, scores: Tensor
    ) -> Tensor:
        """Returns a row's scores `[1, V]` after its own processors; unchanged scores once one of these has failed."""
        if row in self.failed:
            return scores
        try:
            found: Any = own(ids, scores)
            got = getattr(found, "shape", type(found).__name__)
            what = f"scores of shape {tuple(scores.shape)} of a row's logits processors"
            require(got == scores.shape, what, got, "return what they were given, changed")
        except Exception as error:
            self.failed[row] = error
            return scores
        return found

    def hide(self, logits_BKV: Tensor, columns_BK: Tensor) -> Tensor:
        """Returns logits without the tokens that each row's own processors hide; see [`BlockProcessors.hide`]."""
        found: list[Tensor] = []
        for row, own in enumerate(self.rows):
            one = slice(row, row + 1)
            found.append(own.hide(logits_BKV[one], columns_BK[one]))
        return torch.cat(found)

    def warp(self, logits_BKV: Tensor) -> Tensor:
        """Applies each row's stateless warpers to every position of this row; see [`BlockProcessors.warp`]."""
        found: list[Tensor] = []
        for row, own in enumerate(self.rows):
            # A slice keeps the dimension of rows, which warpers expect.
            scores = own.warp(logits_BKV[row : row + 1])
            found.append(self._noise_proof(row, scores))
        return torch.cat(found)

    def draw_tokens(self, logits_BKV: Tensor, key: NoiseKey, positions_BK: Tensor) -> Tensor:
        """Draws or chooses the tokens of each row `[B, K]`; see [`draw_from_logits`]."""
        found: list[Tensor] = []
        for row, own in enumerate(self.rows):
            one = slice(row, row + 1)
            logits = logits_BKV[one]
            # A greedy row beside sampled rows is chosen without noise.
            if self.is_sampled[row]:
                tokens = draw_from_logits(logits, own, key.of_rows(one), positions_BK[one])
            else:
                tokens = likeliest_from_logits(logits, own)
            found.append(tokens)
        return torch.cat(found)

    def _noise_proof(self, row: int, scores: Tensor) -> Tensor:
        """Returns scores `[..., V]` of a row; only the likeliest token if this token must win against any noise."""
        if self.is_sampled[row] or not any(self.is_sampled):
            return scores
        likeliest = ops.first_argmax(scores)[..., None]
        alone = torch.full_like(scores, -math.inf)
        return alone.scatter_(-1, likeliest, 0.0)


def _asked_about(processor: Any, numbers: list[int]) -> Any:
    """Returns a prefix-constrained processor for some rows. Its function gets the numbers of their prompts."""
    ask = processor._prefix_allowed_tokens_fn
    # Under `num_return_sequences` several rows have one prompt.
    rows_per_prompt: int = processor._num_beams

    def allowed(row: int, prefix: Tensor) -> list[int]:
        return ask(numbers[row] // rows_per_prompt, prefix)

    return PrefixConstrainedLogitsProcessor(allowed, 1)


class NoiseKey(NamedTuple):
    """The part of a run's noise that does not depend on positions: the seed, and the numbers of the rows."""

    seed: Tensor  # [], or [B, 1] if every row has its own seed, int64
    # [B], int64: the number of each row in the request. By this number, a row keeps its noise when it moves.
    rows: Tensor

    @classmethod
    def of(cls, seed: Tensor, num_rows: int) -> NoiseKey:
        """Returns the key of a seed `[]` or `[B, 1]`, int64, for rows that are still at their first places."""
        return cls(seed, torch.arange(num_rows, device=seed.device))

    def of_rows(self, rows: slice) -> NoiseKey:
        """Returns the key for some of the rows."""
        seed = self.seed
        if seed.dim() > 0:
            seed = seed[rows]
        return NoiseKey(seed, self.rows[rows])

    def exponential(self, positions_BK: Tensor, tokens: Tensor, stream: int) -> Tensor:
        """Draws `ops.exponential_noise` `[B, K, N]` for tokens at these positions."""
        return ops.exponential_noise(self.seed, positions_BK, tokens, stream, self.rows)


def gumbel_noise(
    key: NoiseKey, positions_BK: Tensor, tokens: Tensor, stream: int = TARGET_STREAM
) -> Tensor:
    """Draws Gumbel noise `[B, K, N]`, float32, as `ops.exponential_noise`. The argmax of noisy scores is a sample."""
    return -torch.log(key.exponential(positions_BK, tokens, stream))


def with_noise(
    scores: Tensor,
    key: NoiseKey,
    positions_BK: Tensor,
    candidates: Tensor | None = None,
    stream: int = TARGET_STREAM,
) -> Tensor:
    """Adds noise to scores of all tokens `[B, K, V]`, or of candidates `[B, K, C, C]`, each after each predecessor.

    Args:
        scores (`torch.Tensor`): The scores.
        key (`NoiseKey`): The key of the run.
        positions_BK (`torch.Tensor`): Indices of the tokens, int64.
        candidates (`torch.Tensor` of shape `[B, K, C]`, *optional*): Ids of the candidates. The noise of a token at a
            position is the same after every predecessor.
        stream (`int`): The stream of the noise; see `ops.exponential_noise`.
    """
    if candidates is None:
        vocab_size = scores.shape[-1]
        tokens = torch.arange(vocab_size, device=scores.device)
        return scores + gumbel_noise(key, positions_BK, tokens, stream)
    # The noise gets a dimension for the predecessors, because it is the same for all of them.
    noise = gumbel_noise(key, positions_BK, candidates, stream)
    return scores + noise[:, :, None]


def new_seed(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Draws a run's seed `[]`, int64, from torch's global generator, so that `torch.manual_seed` repeats a run.

    `generator`, a generator of the CPU, takes the place of the global one.
    """
    # The CPU's generator is used for every device, so that a run on a GPU draws the same seed as a run on a CPU.
    seed = torch.randint(-(2**62), 2**62, (), generator=generator, dtype=torch.int64, device="cpu")
    return seed.to(device)


def choose(
    scores_BKV: Tensor, key: NoiseKey | None, positions_BK: Tensor, stream: int = TARGET_STREAM
) -> Tensor:
    """Chooses tokens `[B, K]`, int64, from processed scores (log-probabilities up to a constant).

    The token is the argmax or, with a `key`, a sample by Gumbel noise. `positions_BK` are the indices of the tokens.
    For `stream` see `ops.exponential_noise`.
    """
    # The argmax of scores with Gumbel noise is a sample of their softmax.
    if key is not None:
        scores_BKV = with_noise(scores_BKV, key, positions_BK, stream=stream)
    return ops.first_argmax(scores_BKV)


def likeliest_from_logits(logits_BKV: Tensor, processors: BlockProcessors) -> Tensor:
    """Chooses the tokens `[B, K]` with the greatest scores, after stateless processors are applied to the logits."""
    # Logits in half precision keep their order in float32, but two different logits in float64 may become equal.
    keeps_order = logits_BKV.dtype.itemsize <= 4
    if not processors.warpers and keeps_order:
        return ops.first_argmax(logits_BKV)
    return ops.first_argmax(processors.warp(logits_BKV))


def draw_from_logits(
    logits_BKV: Tensor, processors: BlockProcessors, key: NoiseKey, positions_BK: Tensor
) -> Tensor:
    """Draws tokens from logits after stateless processors, as [`choose`] does.

    If the processors are those of [`Draw`], neither scores nor noise of the whole vocabulary are stored. The kernel
    stores none. Without the kernel, only those of the tokens within a top-k are stored.
    """
    if isinstance(processors, RowProcessors):
        return processors.draw_tokens(logits_BKV, key, positions_BK)
    draw = processors.draw
    if draw is None:
        return choose(processors.warp(logits_BKV), key, positions_BK)
    # The kernel reads every logit once. Bounds for each position say which tokens may not be drawn.
    if ops.use_kernel(ops.gumbel_argmax, logits_BKV):
        least: Tensor | None = None
        first: Tensor | None = None
        if draw.leaves_out:
            least, first = draw.bounds(*draw.greatest(logits_BKV))
        return ops.gumbel_argmax(
            logits_BKV,
            key.seed,
            positions_BK,
            least,
            draw.temperature,
            TARGET_STREAM,
            key.rows,
            first,
        )
    # In half precision, more tokens than `draw.greatest` returns may be equal to the k-th token.
    has_few_ties = logits_BKV.dtype.itemsize >= 4
    if draw.top_k == 0 or not has_few_ties:
        return choose(processors.warp(logits_BKV), key, positions_BK)
    values, tokens = draw.greatest(logits_BKV)
    scores = values / draw.temperature
    scores = scores.masked_fill(~draw.are_kept(values), -math.inf)
    # Each token has its own noise, so the result is the same as from the whole vocabulary.
    noisy = scores + gumbel_noise(key, positions_BK, tokens)
    best = noisy.argmax(dim=-1, keepdim=True)
    return tokens.gather(-1, best)[..., 0]


def accept_rejection(
    proposals: Tensor,
    target_scores_BWV: Tensor,
    draft_probs: Tensor,
    key: NoiseKey,
    positions_BW: Tensor,
) -> tuple[Tensor, Tensor]:
    """Keeps each proposal with probability `min(1, p / q)`; at the first rejection, draws again from `max(p - q, 0)`.

    The proposals `[B, W - 1]` were drawn from `q`, which is `draft_probs` `[B, W - 1, V]`. The target's scores are
    processed. Each position is the index of the token that is decided there. Returns the numbers of accepted proposals
    `[B]`, and tokens `[B, W]`: the proposals, with the new or bonus token at index `num_accepted`.

    Source: Leviathan et al., arXiv 2211.17192, algorithm 1.
    """
    probs = torch.softmax(target_scores_BWV, dim=-1, dtype=torch.float32)
    chosen = proposals[..., None]
    # The bonus token after the last proposal needs no test.
    p = probs[:, :-1].gather(-1, chosen)[..., 0]
    q = draft_probs.gather(-1, chosen)[..., 0]
    uniform = _uniform(key, positions_BW[:, :-1])
    # The test is u * q < p instead of u < p / q, so that nothing is divided by a q of 0.
    num_accepted = (uniform * q < p).cumprod(dim=1).sum(dim=1)
    first_refused = num_accepted[:, None]
    # After the last proposal, no token was rejected. Zeros there leave the target's whole distribution.
    nothing = torch.zeros_like(draft_probs[:, :1])
    padded = torch.cat([draft_probs, nothing], dim=1)
    wanted = along(first_refused, probs)
    residual = (wanted - along(first_refused, padded)).clamp_min_(0)
    # If two distributions are equal except for rounding, nothing may be left to draw from.
    has_residual = residual.sum(dim=-1, keepdim=True) > 0
    redraw_scores = torch.log(torch.where(has_residual, residual, wanted))
    # This draw has its own stream, because the target's noise must not influence the rest of its distribution.
    position = positions_BW.gather(1, first_refused)
    redrawn = choose(redraw_scores, key, position, RESIDUAL_STREAM)
    tokens = torch.cat([proposals, redrawn], dim=1)
    return num_accepted, tokens.scatter(1, first_refused, redrawn)


def _uniform(key: NoiseKey, positions_BK: Tensor) -> Tensor:
    """Returns uniform numbers `[B, K]` in `[0, 1)`: `1 - exp(-e)` of an exponential number `e`."""
    no_token = torch.zeros_like(positions_BK)[..., None]
    exponential = key.exponential(positions_BK, no_token, REJECT_STREAM)
    return -torch.expm1(-exponential[..., 0])


def ends_row(tokens: Tensor, eos_ids: Tensor) -> Tensor:
    """Returns a mask, of the shape of `tokens`, of the tokens that are end-of-sequence ids `[N]`."""
    # `torch.isin` is not used: with many ids it sorts, and reads the number of different ids on the host.
    return (tokens[..., None] == eos_ids).any(dim=-1)
