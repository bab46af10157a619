"""This module runs steps over a run's fixed buffers: the same operations on the same addresses, whatever is accepted.

A CUDA graph replays such a step (`cuda_graph.py`). Without a capture, it runs on any device. Tests and benchmarks use
it in this way.
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
    """A step that was started, but whose outcome the host has not read yet."""

    outcome: Tensor  # the host's copy of the state's `outcome`; complete once it has arrived
    arrived: torch.cuda.Event | None  # the end of the copy; `None` if there is no wait for it
    width: int  # number of tokens that the step verifies


class StaticStep:
    """Runs steps over a run's fixed buffers, uncaptured.

    If no user code has to see a step, the host stays one step behind. It starts step `n + 1`, and then reads the
    report of step `n`. A row that has finished does not change, so one additional step at the end has no effect. If
    the limit says that step `n` is the last step, the host does not start another one. If user code has to see each
    step, this class launches only the two forwards, and the host accepts the tokens.

    Args:
        run (`Run`): A run with fixed buffers.
    """

    name = "static"

    def __init__(self, run: Run) -> None:
        self.run = run
        self.accepts = run.rule.runs_on_device
        self.widest = run.buffers.shape.block
        # A forward that expands cached latents expands every slot within the bound, so the bound has to be close.
        expands_slots = caches_latents(run.request.target.config)
        self.reads_lengths = reads_lengths_on_device(*run.buffers.caches()) and not expands_slots
        run.stats.engine = self.name

    def advance(self) -> None:
        """Runs steps until every row has finished or the buffers are full."""
        if self.accepts:
            self._run_ahead()
            return
        run = self.run
        # Fixed buffers do not grow. When they are full, eager steps continue with longer buffers.
        while not run.finished and has_room(run):
            begin(run)
            outputs = self.launch(self.bound(0))
            assert outputs is not None
            finish(run, outputs)

    def _run_ahead(self) -> None:
        """Runs steps whose acceptance needs no host. The host reads each report one step later."""
        run = self.run
        begun = deque([self._begin(0)])
        while begun and not run.finished:
            # The next step is launched first, so that the device works while the host reads the report before it.
            if has_room(run, 1) and not run.ends_at_next:
                begun.append(self._begin(1))
            step = begun.popleft()
            # This is the only wait. It is for the copy of a report, while a whole step is queued after that copy.
            if step.arrived is not None:
                step.arrived.synchronize()
            run.watch.lap("verify")
            report(run, step.outcome, step.width)

    def _begin(self, num_unread: int) -> Begun:
        """Starts a step after `num_unread` steps that the host has not read."""
        begin(self.run)
        self.launch(self.bound(num_unread))
        outcome = self.run.state.outcome
        # A copy into memory that is not pinned would wait for the device. The copy has its own tensor, because the
        # next step overwrites the state's `outcome` before the host reads this one.
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
        """Runs a step, or only its two forwards, over the first `bound` slots of every row."""
        return self.body(bound)

    def body(self, bound: int) -> CausalLMOutputWithPast | None:
        """Runs the captured part: the whole step if it needs no host, else the forwards, whose output is returned."""
        block = draft(self.run, bound)
        outputs = verify(self.run, block)
        if not self.accepts:
            return outputs
        # Nothing asks for the scores of a step that needs no host.
        accept(self.run, logits_of(self.run, outputs))
        return None

    def bound(self, num_unread: int) -> int:
        """Returns the number of slots that a step may need, `num_unread` steps after the last one that was read."""
        run = self.run
        # The kernel finds the end of each row on the device, so one graph serves all lengths.
        if self.reads_lengths:
            return run.buffers.capacity
        # An unread step has committed at most as many tokens as it verified.
        longest = run.longest + num_unread * run.generator.verify_width + self.widest
        return min(round_up(longest), run.buffers.capacity)

    def bounds(self) -> list[int]:
        """Returns all possible results of [`bound`] in this run, the longest first: one graph each, per width."""
        run = self.run
        if self.reads_lengths:
            return [run.buffers.capacity]
        shortest = run.longest + self.widest
        longest_text = run.longest_prompt + run.state.host.limit
        longest = longest_text + run.generator.verify_width + self.widest
        return buckets_between(shortest, longest, run.buffers.capacity)
