"""The step over fixed buffers: the same functions as the eager loop's, with nothing read on the host and the same
operations on the same addresses whatever is accepted. That is what a CUDA graph needs; here it runs uncaptured, on any
device.

Where nothing of the user's has to look at a step, the step decides by itself what is accepted and the host stays one
step behind: it starts step `n + 1`, then reads what step `n` reported. A row that has finished is frozen, so the one
step too many at the end changes nothing. Elsewhere only the two forwards are taken from here and `loop.step` decides.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from dflash_hf import ops
from dflash_hf.attention import RaggedBlock
from dflash_hf.generation import steps
from dflash_hf.generation.buffers import NUM_REPORTED, FixedBuffers, round_up
from dflash_hf.generation.compiled import compile_errors, compiled_layers
from dflash_hf.generation.room import has_room
from dflash_hf.generation.run import Run, finish_step, verify

logger: Any = logging.get_logger(__name__)
Forwards = tuple[CausalLMOutputWithPast, RaggedBlock]


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
        run (`Run`): Begun, with buffers.
    """

    name = "static"

    def __init__(self, run: Run) -> None:
        assert run.buffers is not None
        self.run = run
        self.buffers: FixedBuffers = run.buffers
        self.decides = (
            run.processors.is_stateless and not run.criteria and run.lockstep is None and not run.recorder.is_on
        )
        generator, state = run.generator, run.state
        # A kernel that ends the step begins the next block too.
        self.is_settled = self.decides and ops.accepts(state.block, state.ids, generator.block_ids)
        if self.is_settled:
            self.buffers.begin_block()
        self.widest = max(generator.block_size, generator.verify_width)
        self.compiles = generator.draft.generation_config.compile_layers
        run.stats.engine = self.name

    def forwards(self, run: Run) -> Forwards:
        """Drafts and verifies, once; what is returned is overwritten by the next call."""
        run.begin_step()
        found = self.launch(self.bound(run, 0))
        assert found is not None
        return found

    def advance(self, run: Run) -> None:
        """Runs steps until every row has finished or the buffers are full, the host one step behind."""
        slots = (_Slot.beside(self.buffers.outcome), _Slot.beside(self.buffers.outcome))
        self._begin(run, slots[0], 0)
        index = 0
        fits = True
        while not run.finished and fits:
            fits = has_room(run, 1)
            if fits:
                self._begin(run, slots[(index + 1) % 2], 1)
            outcome = slots[index % 2].read()
            run.watch.lap("verify")
            finish_step(run, outcome[:NUM_REPORTED].tolist(), outcome[NUM_REPORTED:].T)
            index += 1

    def on_device(self) -> AbstractContextManager[Any]:
        """What has to be entered before a step is launched."""
        return nullcontext()

    def launch(self, bound: int) -> Forwards | None:
        """Runs a step, or its forwards alone, over the first `bound` slots of every row."""
        return self.body(bound)

    def body(self, bound: int) -> Forwards | None:
        """What is captured: the whole step if it decides by itself, else its forwards, which are returned."""
        run, state = self.run, self.run.state
        generator, width = run.generator, state.width
        positions = self.buffers.positions if self.is_settled else None
        drafted = RaggedBlock(state.lengths, generator.block_size, bound, positions=positions)
        block = drafted
        if drafted.width != width:
            block = RaggedBlock(state.lengths, width, bound, positions=positions)
        steps.draft_step(state, generator, drafted, has_anchor=self.is_settled)
        outputs = self._verify(block)
        if not self.decides:
            return outputs, block
        assert outputs.logits is not None
        logits = outputs.logits.to(state.ids.device)
        if positions is not None:
            outcome = self.buffers.outcome[: NUM_REPORTED + width]
            steps.settle_step(state, logits, block, run.processors, generator, positions=positions, outcome=outcome)
            return None
        steps.select_step(state, logits, block, run.processors)
        steps.accept_step(state)
        self.buffers.outcome[:NUM_REPORTED] = steps.report(state)
        self.buffers.outcome[NUM_REPORTED : NUM_REPORTED + width] = state.tokens.T
        return None

    def _verify(self, block: RaggedBlock) -> CausalLMOutputWithPast:
        """Verifies, with compiled layers if that is asked for and works.

        A compilation that fails does so before the step has changed more than scratch: it is done again without.
        """
        if not self.compiles:
            return verify(self.run, block)
        try:
            with compiled_layers(self.run.target, (block.lengths.shape[0], block.width)):
                return verify(self.run, block)
        except compile_errors() as error:
            self.compiles = False
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            logger.warning_once(f"The target's layers run as they are, torch.compile cannot compile them: {reason}")
        return verify(self.run, block)

    def bound(self, run: Run, num_unread: int) -> int:
        """The slots that a step may need, `num_unread` steps after the one the host has read last."""
        longest = run.longest + num_unread * run.generator.verify_width + self.widest
        return min(round_up(longest), self.buffers.capacity)

    def _begin(self, run: Run, slot: _Slot, num_unread: int) -> None:
        run.begin_step()
        self.launch(self.bound(run, num_unread))
        slot.fetch(self.buffers.outcome, run.state.width)


__all__ = ["Forwards", "StaticStep"]
