"""One step of decoding: draft a block, verify it, decide what stands, commit, and tell the host.

`forwards` and `settle` read nothing on the host where the run decides by itself. `finish` is the host's part. `step`
runs them one after the other, over exactly as many keys as there are. [`StaticStep`] runs them with lengths rounded
up, so that they are the same operations on the same addresses whatever is accepted: what a CUDA graph replays.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from dflash_hf.attention import RaggedBlock
from dflash_hf.cache_name import CACHE_NAME
from dflash_hf.generation.accept import commit, decide_at_once, decide_by_position, stop_by_criteria
from dflash_hf.generation.buffers import buckets_between, reads_lengths_on_device, round_up
from dflash_hf.generation.run import Run, has_room, make_room, tapped
from dflash_hf.generation.state import NUM_REPORTED
from dflash_hf.generation.widths import along_chain
from dflash_hf.target.reentry import KEYWORD
from dflash_hf.tree import is_in_place

logger: Any = logging.get_logger(__name__)


def step(run: Run) -> tuple[Tensor, list[int]]:
    """Runs one step eagerly; returns the target's logits `[B, W, V]`, and how many tokens each row has committed."""
    make_room(run)
    begin(run)
    with run.call.ranks.forward():
        outputs = forwards(run)
    return conclude(run, outputs)


def begin(run: Run) -> None:
    """Sets the step's width and counts its two forwards; a block of one token is not drafted."""
    state = run.state
    chooser = run.chooser
    width = run.generator.verify_width if chooser is None else chooser.next_width()
    # One number says both: a chain's is negative.
    number = run.call.ranks.meet(-width if chooser is not None and chooser.is_chain else width)
    state.width = abs(number)
    state.is_chain = number < 0
    run.stats.num_target_forwards += 1
    run.stats.num_draft_forwards += state.width > 1


def forwards(run: Run, bound: int | None = None) -> CausalLMOutputWithPast:
    """Drafts, where more than the anchor is to be verified, and verifies; returns the target's output.

    `bound` is how many slots of every row to read; by default as many as the longest row needs.
    """
    state = run.state
    size = run.generator.block_size
    width = run.state.width
    # With one row the longest row is the row.
    is_exact = bound is None and state.ids.shape[0] == 1
    positions = state.next_positions
    block = RaggedBlock(positions[:, :width], bound or run.longest + width, is_exact, state.tree)
    if width > 1:
        drafted = RaggedBlock(positions[:, :size], bound or run.longest + size, is_exact)
        run.generator.propose(state, block if width == size and block.tree is None else drafted)
        run.call.ranks.share(state.proposals, state.nodes)
    else:
        run.generator.pass_over(is_static=bound is not None)
    if bound is None:
        run.watch.lap("draft")
    return verify(run, block)


def verify(run: Run, block: RaggedBlock) -> CausalLMOutputWithPast:
    """Runs the target once over `state.block`, which stands at `block`, and hands its tapped states to the draft.

    Through the top-level model, so that soft caps, adapters and device hooks apply. Keys and values of all `W` tokens
    go into the cache; the rejected ones are overwritten by the next block. Returns the target's output, with logits
    `[B, W, V]`; raises `RuntimeError` if a layer did not go over the ragged cache as it must.
    """
    state = run.state
    target = run.call.target
    with tapped(run) as taps:
        run.cache.begin(block)
        outputs = target.model(
            input_ids=state.block,
            position_ids=target.position_ids(block.indices, state.position_delta),
            use_cache=True,
            return_dict=True,
            **{CACHE_NAME: run.cache, KEYWORD: run.cache},
            **run.extra,
        )
        run.cache.check_passed()
        run.generator.observe_block(taps.take(), block)
    return outputs


def settle(run: Run, logits_BWV: Tensor) -> Tensor:
    """Decides, as the run does, and commits; returns scores `[B, W, V]` for the recorder, processed if it is on."""
    state = run.state
    processors = run.call.processors
    if run.synchronized is not None:
        scores, num_accepted = run.synchronized.decide(state, logits_BWV)
    elif processors.is_stateless:
        num_accepted = decide_at_once(state, logits_BWV, processors, run.accept)
        scores = processors.warp(state.along_path(logits_BWV)) if run.recorder.is_on else logits_BWV
    else:
        scores = decide_by_position(state, logits_BWV, processors)
        num_accepted = None
    if run.call.own_criteria and run.synchronized is None:
        stop_by_criteria(state, run.call.own_criteria, num_accepted)
    num_accepted = run.call.ranks.decided(state, num_accepted, run.synchronized)
    if state.path is not None:
        state.report_nodes()
        path = state.path[:, : run.buffers.shape.path]
        # To look costs nothing where nothing has to be waited for.
        stays = path.device.type == "cpu" and not run.keeps_buffers and is_in_place(path)
        if not stays:
            run.cache.keep_path(path, state.lengths)
        run.generator.take_path(path, stays)
    commit(state, num_accepted)
    return scores


def conclude(run: Run, outputs: CausalLMOutputWithPast) -> tuple[Tensor, list[int]]:
    """Settles a step whose forwards have run, and finishes it on the host; returns as [`step`]."""
    run.watch.lap("verify")
    assert outputs.logits is not None
    logits = outputs.logits.to(run.state.ids.device)  # where the head is need not be where ids go in
    scores = settle(run, logits)
    outcome = run.state.outcome.to("cpu")
    run.watch.lap("accept")
    committed = finish(run, outcome, run.state.width)
    states: Any = outputs.get("hidden_states")
    if run.state.path is not None and (run.recorder.is_on or run.generator.keeps_logits):
        logits = run.state.along_path(logits)
        states = None if states is None else [run.state.along_path(layer.to(logits.device)) for layer in states]
    run.recorder.add(scores, logits, states, committed)
    return logits, committed


def finish(run: Run, outcome: Tensor, width: int) -> list[int]:
    """Does on the host what follows a step: streamer, statistics, whether the run has finished.

    `outcome` is the step's `state.outcome`, on the host, `width` the tokens that it verified. Returns how many tokens
    each row has committed; raises `ValueError` if a row needs more positions than the target has.
    """
    stats = run.stats
    tree = run.state.report_in(outcome, width)
    reported = outcome[:NUM_REPORTED].tolist()
    committed, accepted = reported[:2]
    put_tree = getattr(run.call.streamer, "put_tree", None)
    if tree is not None and put_tree is not None and run.synchronized is None and committed[0]:
        put_tree(**{name: part[0].tolist() for name, part in tree._asdict().items()})
    take_note(run, reported, outcome[NUM_REPORTED : NUM_REPORTED + width].T)
    running = [row for row, num in enumerate(committed) if num]
    for row in running:
        stats.num_committed[run.rows[row]].append(committed[row])
        stats.num_accepted[run.rows[row]].append(accepted[row])
    stats.verify_widths.append(width)
    kept: list[list[int]] | None = None
    chains: list[tuple[int, int]] = []
    if tree is not None:
        path = tree.path.tolist()
        sources = tree.sources.tolist()
        kept = [path[row][1 : accepted[row] + 1] for row in running]
        stats.count_nodes(width, kept, [sources[row] for row in running])
        if run.chooser is not None and run.chooser.chain is not None:
            parents = tree.parents.tolist()
            chains = [along_chain(parents[row], path[row]) for row in running]
    if run.chooser is not None:
        # Without the rest: how long a streamer takes does not depend on the width.
        seconds = stats.draft_seconds + stats.verify_seconds + stats.accept_seconds
        run.chooser.observe(width, [accepted[row] for row in running], seconds, kept, chains)
        if run.finished and (verdict := run.chooser.verdict()) is not None:
            logger.warning_once(verdict)
    run.watch.lap("rest")
    return committed


def take_note(run: Run, reported: list[list[int]], tokens: Tensor) -> None:
    """Notes where the rows stand, by the first five rows of a step's `state.outcome`; errors as [`finish`].

    What is new of the step's `tokens` `[B, width]`, on any device, goes to the streamer.
    """
    committed, _, lengths, done, _ = reported
    if run.reach is not None:
        for length, reach, has_ended in zip(lengths, run.reach, done, strict=True):
            # At the forward that plain decoding would fail in: nothing is made of positions that do not exist.
            if length > reach - (not has_ended):
                num = run.call.target.facts.num_positions
                raise ValueError(
                    f"expected rows of at most {reach + 1} tokens (the target has {num} "
                    "learned positions), got a row that is longer or goes on; lower max_new_tokens"
                )
    if run.call.streamer is not None and run.synchronized is None and committed[0]:
        # A copy: the next step writes into the same memory, and a streamer may keep what it gets.
        run.call.streamer.put(tokens[0, : committed[0]].to("cpu", copy=True))
    run.reported = reported
    run.note_longest()


class StaticStep:
    """A step over a run's fixed buffers, uncaptured: on any device, as tests and benchmarks have it run.

    Where nothing of the user's has to look at a step, the host stays one step behind: it starts step `n + 1`, then
    reads what step `n` has reported. A row that has finished is frozen, so one step too many at the end changes
    nothing; where the limit says that step `n` is the last, there is none. Elsewhere only the two forwards are
    launched from here, and the host settles the step.
    """

    name = "static"

    def __init__(self, run: Run) -> None:
        self.run = run
        self.decides = run.decides()
        self.widest = run.buffers.shape.block
        self.reads_lengths = reads_lengths_on_device(run.cache, run.generator.cache)
        run.stats.engine = self.name

    def advance(self) -> None:
        """Runs steps until every row has finished or the buffers are full."""
        if self.decides:
            self._run_ahead()
            return
        run = self.run
        while not run.finished and has_room(run):
            begin(run)
            outputs = self.launch(self.bound(0))
            assert outputs is not None
            conclude(run, outputs)

    def _run_ahead(self) -> None:
        """Runs steps that decide by themselves, the host one step behind."""
        run = self.run
        begun = deque([self._begin(0)])
        while begun and not run.finished:
            if has_room(run, 1) and not run.ends_at_next:
                begun.append(self._begin(1))
            outcome, arrived, width = begun.popleft()
            if arrived is not None:
                arrived.synchronize()
            run.watch.lap("verify")
            finish(run, outcome, width)

    def _begin(self, num_unread: int) -> tuple[Tensor, torch.cuda.Event | None, int]:
        """Starts a step; returns where its outcome will be on the host, when it is there, and the step's width."""
        begin(self.run)
        self.launch(self.bound(num_unread))
        outcome = self.run.state.outcome
        host = torch.empty(outcome.shape, dtype=outcome.dtype, device="cpu", pin_memory=outcome.is_cuda)
        arrived = torch.cuda.Event() if outcome.is_cuda else None
        host.copy_(outcome, non_blocking=True)
        if arrived is not None:
            arrived.record()
        return host, arrived, self.run.state.width

    def launch(self, bound: int) -> CausalLMOutputWithPast | None:
        """Runs a step, or its forwards alone, over the first `bound` slots of every row."""
        return self.body(bound)

    def body(self, bound: int) -> CausalLMOutputWithPast | None:
        """What is captured: the whole step if it decides by itself, else its forwards, which are returned."""
        outputs = forwards(self.run, bound)
        if not self.decides:
            return outputs
        assert outputs.logits is not None
        settle(self.run, outputs.logits.to(self.run.state.ids.device))
        return None

    def bound(self, num_unread: int) -> int:
        """The slots that a step may need, `num_unread` steps after the one the host has read last."""
        if self.reads_lengths:
            return self.run.buffers.capacity
        longest = self.run.longest + num_unread * self.run.generator.verify_width + self.widest
        return min(round_up(longest), self.run.buffers.capacity)

    def bounds(self) -> list[int]:
        """Returns all that [`bound`] may give during the run, longest first: one graph each, per width."""
        run = self.run
        if self.reads_lengths:
            return [run.buffers.capacity]
        shortest = run.longest + self.widest
        return buckets_between(shortest, shortest + run.state.limit + run.generator.verify_width, run.buffers.capacity)
