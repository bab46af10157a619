"""A step over a run's fixed buffers: the same operations on the same addresses, whatever is accepted.

A CUDA graph replays it (`cuda_graph.py`). Uncaptured it runs on any device, as tests and benchmarks have it run.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from dflash_hf.generation.buffers import buckets_between, reads_lengths_on_device, round_up
from dflash_hf.generation.run import Run, has_room
from dflash_hf.generation.step import (
    accept,
    begin,
    draft,
    finish,
    logits_of,
    report,
    verify,
)
from dflash_hf.layer_configs import caches_latents


class Begun(NamedTuple):
    """A step that was started and that the host has not read."""

    outcome: Tensor  # the host's copy of the state's `outcome`, once it has arrived
    arrived: torch.cuda.Event | None  # when it has; `None` where nothing has to be waited for
    width: int  # tokens that the step verifies


class StaticStep:
    """A step over a run's fixed buffers, uncaptured.

    Where no user code has to look at a step, the host stays one step behind: it starts step `n + 1`, then reads the
    report of step `n`. A row that has finished is frozen, so one step too many at the end changes nothing; where the
    limit says that step `n` is the last, there is none. Elsewhere only the two forwards are launched from here, and
    the host accepts.

    Args:
        run (`Run`): One with fixed buffers.
    """

    name = "static"

    def __init__(self, run: Run) -> None:
        self.run = run
        self.accepts = run.rule.runs_on_device
        self.widest = run.buffers.shape.block
        # A forward that expands what is cached expands every slot within the bound.
        expands_slots = caches_latents(run.request.target.config)
        self.reads_lengths = reads_lengths_on_device(*run.buffers.caches()) and not expands_slots
        run.stats.engine = self.name

    def advance(self) -> None:
        """Runs steps until every row has finished or the buffers are full."""
        if self.accepts:
            self._run_ahead()
            return
        run = self.run
        # Fixed buffers do not grow: where they are full, the eager steps go on with longer ones.
        while not run.finished and has_room(run):
            begin(run)
            outputs = self.launch(self.bound(0))
            assert outputs is not None
            finish(run, outputs)

    def _run_ahead(self) -> None:
        """Runs steps that accept by themselves, the host one step behind."""
        run = self.run
        begun = deque([self._begin(0)])
        while begun and not run.finished:
            # The next step is launched first, so that the device works while the host reads the last one.
            if has_room(run, 1) and not run.ends_at_next:
                begun.append(self._begin(1))
            step = begun.popleft()
            # The only wait: for the copy of a report, with a whole step queued behind it.
            if step.arrived is not None:
                step.arrived.synchronize()
            run.watch.lap("verify")
            report(run, step.outcome, step.width)

    def _begin(self, num_unread: int) -> Begun:
        """Starts a step behind `num_unread` steps that the host has not read."""
        begin(self.run)
        self.launch(self.bound(num_unread))
        outcome = self.run.state.outcome
        # Pinned memory: a copy into any other would wait for the device. A tensor of its own, because the next step
        # overwrites the state's before this one is read.
        host = torch.empty(
            outcome.shape, dtype=outcome.dtype, device="cpu", pin_memory=outcome.is_cuda
        )
        host.copy_(outcome, non_blocking=True)
        arrived: torch.cuda.Event | None = None
        if outcome.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        return Begun(host, arrived, self.run.state.width)

    def launch(self, bound: int) -> CausalLMOutputWithPast | None:
        """Runs a step, or its forwards alone, over the first `bound` slots of every row."""
        return self.body(bound)

    def body(self, bound: int) -> CausalLMOutputWithPast | None:
        """Runs what is captured: the whole step if it accepts by itself, else its forwards, which are returned."""
        block = draft(self.run, bound)
        outputs = verify(self.run, block)
        if not self.accepts:
            return outputs
        # Nobody asks for scores of a step that accepts by itself.
        accept(self.run, logits_of(self.run, outputs))
        return None

    def bound(self, num_unread: int) -> int:
        """Returns the slots that a step may need, `num_unread` steps after the one that the host has read last."""
        run = self.run
        # The kernel finds the end of each row on the device: one graph serves all lengths.
        if self.reads_lengths:
            return run.buffers.capacity
        # An unread step has committed as many tokens as it verified, at most.
        longest = run.longest + num_unread * run.generator.verify_width + self.widest
        return min(round_up(longest), run.buffers.capacity)

    def bounds(self) -> list[int]:
        """Returns all numbers that [`bound`] may return during the run, longest first: one graph each, per width."""
        run = self.run
        if self.reads_lengths:
            return [run.buffers.capacity]
        shortest = run.longest + self.widest
        longest_text = run.longest_prompt + run.state.host.limit
        longest = longest_text + run.generator.verify_width + self.widest
        return buckets_between(shortest, longest, run.buffers.capacity)
