"""One run after its prefill, and the parts of a step that every engine shares.

That is the tapped verify, and what the host does with a step's outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import CausalLMOutputWithPast

from dflash_hf.attention import RaggedBlock
from dflash_hf.cache import RaggedCache
from dflash_hf.generation import steps
from dflash_hf.generation.buffers import FixedBuffers
from dflash_hf.generation.candidate_generator import DFlashCandidateGenerator
from dflash_hf.generation.kept_cache import KeptCache
from dflash_hf.generation.lockstep import Lockstep
from dflash_hf.generation.outputs import Recorder
from dflash_hf.generation.processors import BlockProcessors
from dflash_hf.generation.state import DecodeState
from dflash_hf.generation.stats import SpeculativeStats, Stopwatch
from dflash_hf.generation.widths import WidthChooser
from dflash_hf.recurrent_cache import noting
from dflash_hf.reentry import KEYWORD
from dflash_hf.taps import Taps
from dflash_hf.target import Target, ragged_attention

# See `iterate`: proposals [B, W - 1], the target's tokens [B, W] and logits [B, W, V] -> number accepted [B].
Accept = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(slots=True)
class Run:
    """The parts of one run, after its prefill.

    `longest` is the longest row's length and `prompt` what it was at first. `num_new` is how many tokens the longest
    answer has, and `room` how many the buffers are made for (`room.py`). `reach` is per row the length at which a
    target with a table of positions has used all of them.
    """

    target: Target
    generator: DFlashCandidateGenerator
    cache: RaggedCache
    processors: BlockProcessors
    state: DecodeState
    criteria: list[StoppingCriteria]
    streamer: BaseStreamer | None
    stats: SpeculativeStats
    watch: Stopwatch
    recorder: Recorder
    lockstep: Lockstep | None
    longest: int
    prompt: int
    room: int
    extra: dict[str, Any]
    kept: KeptCache | None = None
    buffers: FixedBuffers | None = None
    accept: Accept | None = None
    chooser: WidthChooser | None = None
    reach: list[int] | None = None
    num_new: int = 0
    finished: bool = False

    def next_blocks(self) -> tuple[RaggedBlock, RaggedBlock]:
        """Returns where the next block stands: as the draft writes it, and as far as it will be verified."""
        lengths, size, width = self.state.lengths, self.generator.block_size, self.state.width
        # With one row the longest row is the row.
        drafted = RaggedBlock(lengths, size, self.longest + size, is_exact=lengths.shape[0] == 1)
        return drafted, drafted if width == size else RaggedBlock(lengths, width, self.longest + max(size, width))

    def begin_step(self) -> None:
        """Sets the step's width and counts its two forwards; a block of one token is not drafted."""
        if self.chooser is not None:
            self.state.width = self.chooser.next_width()
        self.stats.num_target_forwards += 1
        self.stats.num_draft_forwards += self.generator.verify_width > 1

    def calls_out(self) -> bool:
        """Whether code of the user's runs between two verifies, which may want to use the target itself."""
        return bool(self.criteria) or self.streamer is not None or not self.processors.is_stateless


@contextmanager
def tapped(run: Run) -> Generator[Taps]:
    """The target with its attention switched, its layers tapped and its recurrences noted."""
    ids = run.generator.draft.config.target_layer_ids
    taps = Taps(run.target.layers, ids, counts=lambda kwargs: kwargs.get(KEYWORD) is run.cache.block)
    with ragged_attention(run.target), noting(run.cache.layers), taps.open():
        yield taps


def verify(run: Run, block: RaggedBlock, held: Taps | None = None) -> CausalLMOutputWithPast:
    """Runs the target over the block and hands its tapped states to the draft.

    Args:
        run (`Run`): Its state and caches are changed in place.
        block (`RaggedBlock`): Where the block stands.
        held (`Taps`, *optional*): Taps of a target whose attention is switched already; without them the target is
            tapped and switched for no longer than this call.

    Returns:
        `CausalLMOutputWithPast`: The target's output, with logits `[B, W, V]`.

    Raises:
        RuntimeError: If a layer did not go over the ragged cache as it must.
    """
    with nullcontext(held) if held is not None else tapped(run) as taps:
        outputs = steps.verify_step(run.state, run.target, run.cache, block, run.extra)
        run.cache.check_passed(block)
        steps.context_step(run.generator, taps, block)
    return outputs


def finish_step(run: Run, reported: list[list[int]], tokens: Tensor, is_prefill: bool = False) -> list[int]:
    """Does on the host what follows a step: stopping criteria, streamer, statistics, whether the run has finished.

    Args:
        run (`Run`): Changed in place.
        reported (`list[list[int]]`): What `steps.report` said.
        tokens (`torch.Tensor` of shape `[B, width]`, int64): The step's `state.tokens`, on any device.
        is_prefill (`bool`): Whether they are the prefill's.

    Returns:
        `list[int]`: Number of tokens that each row has committed.

    Raises:
        ValueError: If a row needs more positions than the target has.
    """
    committed, accepted, lengths, done, filled = reported
    _check_reach(run, lengths, done)
    if run.criteria and run.lockstep is None:
        _apply_criteria(run, committed, done, filled)
    if run.streamer is not None and run.lockstep is None and committed[0]:
        # A copy: the next step writes into the same memory, and a streamer may keep what it gets.
        run.streamer.put(tokens[0, : committed[0]].to("cpu", copy=True))
    for row, num in enumerate(committed):
        if num and not is_prefill:
            run.stats.num_committed[row].append(num)
            run.stats.num_accepted[row].append(accepted[row])
    if not is_prefill:
        _note_width(run, tokens.shape[1], [right for right, num in zip(accepted, committed, strict=True) if num])
    run.longest, run.num_new = max(lengths), max(filled) - run.state.columns
    run.finished = all(done)
    run.watch.lap("rest")
    return committed


def _check_reach(run: Run, lengths: list[int], done: list[int]) -> None:
    """Ends a run at the forward that plain decoding would fail in: nothing is made of positions that do not exist."""
    if run.reach is None:
        return
    for length, reach, has_ended in zip(lengths, run.reach, done, strict=True):
        if length > reach - (not has_ended):
            raise ValueError(
                f"expected rows of at most {reach + 1} tokens (the target has learned positions, "
                f"{run.target.num_positions} of them), got a row that is longer or goes on; lower max_new_tokens"
            )


def _note_width(run: Run, width: int, accepted: list[int]) -> None:
    """Notes how wide a step was, and what came of it in the rows that were running."""
    stats = run.stats
    stats.verify_widths.append(width)
    if run.chooser is not None:
        # Without the rest: how long a streamer takes does not depend on the width.
        run.chooser.observe(width, accepted, stats.draft_seconds + stats.verify_seconds + stats.accept_seconds)


def _apply_criteria(run: Run, committed: list[int], done: list[int], filled: list[int]) -> None:
    """Calls the other stopping criteria after each committed token, row by row; nothing past a stop is kept.

    Only those that look at a row's own tokens: with any other, rows go in step (`lockstep`). Changes the state and
    the given lists in place.
    """
    state = run.state
    for row, num in enumerate(committed):
        before = filled[row] - num
        for extra in range(1, num + 1):
            ids = cast(torch.LongTensor, state.ids[row : row + 1, : before + extra])
            if any(bool(torch.as_tensor(criterion(ids, None), device="cpu").all()) for criterion in run.criteria):
                committed[row], done[row] = extra, 1
                for counter in (state.lengths, state.cursor):
                    counter[row] -= num - extra
                state.remaining[row] += num - extra
                state.anchor[row] = ids[0, -1]
                state.done[row] = True
                break


__all__ = ["Accept", "Run", "finish_step", "tapped", "verify"]
