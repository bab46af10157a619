"""The step with lengths rounded up: the same operations on the same addresses whatever is accepted, no host sync.

That is what a CUDA graph needs; here it runs uncaptured, on any device, as tests and benchmarks have it run
(`cuda_graph.uncaptured`).
Where nothing of the user's has to look at a step, the host stays one step behind: it starts step `n + 1`, then reads
what step `n` has reported. A row that has finished is frozen, so the one step too many at the end changes nothing.
Elsewhere only the two forwards are launched from here, and the host settles the step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from dflash_hf.generation.buffers import buckets_between, reads_lengths_on_device, round_up
from dflash_hf.generation.compiled import compile_errors, compiled_layers
from dflash_hf.generation.run import Run, has_room
from dflash_hf.generation.state import NUM_REPORTED
from dflash_hf.generation.step import begin, conclude, finish, forwards, settle

logger: Any = logging.get_logger(__name__)


@dataclass(slots=True)
class _Slot:
    """Where the host finds a step's outcome: `[5 + W, B]` int64, pinned beside CUDA, when it is there, and how many
    tokens the step verified.
    """

    outcome: Tensor
    arrived: torch.cuda.Event | None
    width: int = 0

    @classmethod
    def beside(cls, outcome: Tensor) -> _Slot:
        """Makes one for a device's outcome."""
        is_cuda = outcome.is_cuda
        host = torch.empty(outcome.shape, dtype=outcome.dtype, device="cpu", pin_memory=is_cuda)
        return cls(host, torch.cuda.Event() if is_cuda else None)

    def fetch(self, outcome: Tensor, width: int) -> None:
        """Starts copying the outcome of a step of this width; waits for nothing."""
        self.width = width
        self.outcome.copy_(outcome, non_blocking=True)
        if self.arrived is not None:
            self.arrived.record()

    def read(self) -> Tensor:
        """Waits for the outcome and returns it, `[5 + width, B]`."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.outcome[: NUM_REPORTED + self.width]


class StaticStep:
    """A step over a run's fixed buffers, uncaptured.

    Args:
        run (`Run`): Begun.
    """

    name = "static"

    def __init__(self, run: Run) -> None:
        self.run = run
        self.decides = run.decides()
        self.widest = run.buffers.shape.block
        self.reads_lengths = reads_lengths_on_device(run.cache, run.generator.cache)
        self.compiles = run.generator.draft.generation_config.compile_layers
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
        run, outcome = self.run, self.run.state.outcome
        slots = (_Slot.beside(outcome), _Slot.beside(outcome))
        self._begin(slots[0], 0)
        index = 0
        fits = True
        while not run.finished and fits:
            fits = has_room(run, 1)
            if fits:
                self._begin(slots[(index + 1) % 2], 1)
            reported = slots[index % 2].read()
            run.watch.lap("verify")
            finish(run, reported[:NUM_REPORTED].tolist(), reported[NUM_REPORTED:].T)
            index += 1

    def on_device(self) -> AbstractContextManager[Any]:
        """What has to be entered before a step is launched."""
        return nullcontext()

    def launch(self, bound: int) -> CausalLMOutputWithPast | None:
        """Runs a step, or its forwards alone, over the first `bound` slots of every row."""
        return self.body(bound)

    def body(self, bound: int) -> CausalLMOutputWithPast | None:
        """What is captured: the whole step if it decides by itself, else its forwards, which are returned."""
        outputs = self._forwards(bound)
        if not self.decides:
            return outputs
        assert outputs.logits is not None
        settle(self.run, outputs.logits.to(self.run.state.ids.device))
        return None

    def _forwards(self, bound: int) -> CausalLMOutputWithPast:
        """Drafts and verifies, with compiled layers if that is asked for and works.

        A compilation that fails does so before the step has changed more than scratch: it is done again without.
        """
        if self.compiles:
            try:
                with compiled_layers(self.run.target, (self.run.state.ids.shape[0], self.run.state.width)):
                    return forwards(self.run, bound)
            except compile_errors() as error:
                self.compiles = False
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                logger.warning_once(
                    f"The target's layers run as they are, torch.compile cannot compile them: {reason}"
                )
        return forwards(self.run, bound)

    def bound(self, num_unread: int) -> int:
        """The slots that a step may need, `num_unread` steps after the one the host has read last."""
        if self.reads_lengths:
            return self.run.buffers.capacity
        longest = self.run.longest + num_unread * self.run.generator.verify_width + self.widest
        return min(round_up(longest), self.run.buffers.capacity)

    def bounds(self) -> list[int]:
        """Returns all that [`bound`] may give during the run, longest first: one graph each, per width.

        A single one where every layer's attention reads lengths on the device.
        """
        run = self.run
        if self.reads_lengths:
            return [run.buffers.capacity]
        shortest = run.longest + self.widest
        return buckets_between(shortest, shortest + run.state.limit + run.generator.verify_width, run.buffers.capacity)

    def _begin(self, slot: _Slot, num_unread: int) -> None:
        begin(self.run)
        self.launch(self.bound(num_unread))
        slot.fetch(self.run.state.outcome, self.run.state.width)


__all__ = ["StaticStep"]
