"""A call, the run that it becomes, and what the host knows of it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from transformers import Cache, GenerationConfig, GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.cache.recurrent import noting
from dflash_hf.devices import Inventory
from dflash_hf.generation.accept import Accept, SynchronizedRows
from dflash_hf.generation.buffers import FixedBuffers
from dflash_hf.generation.candidate_generator import DFlashCandidateGenerator
from dflash_hf.generation.sampling import BlockProcessors
from dflash_hf.generation.state import DecodeState
from dflash_hf.generation.stats import Recorder, SpeculativeStats, Stopwatch
from dflash_hf.generation.user_cache import UserCache
from dflash_hf.generation.widths import WidthChooser
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target.hidden_states import Taps
from dflash_hf.target.parts import Target
from dflash_hf.target.reentry import KEYWORD, ragged_attention

# Criteria that the commit itself decides.
LENGTH_AND_END = (EosTokenCriteria, MaxLengthCriteria)


@dataclass(kw_only=True)
class Call:
    """A call of `generate` with a draft: what it was given, and what Transformers has made of that.

    It stands in place of Transformers' own sampling loop, as `custom_generate`.
    """

    # What is asked for before every call, and takes its time to be found out.
    __signature__: ClassVar[inspect.Signature] = inspect.signature(cast(Any, GenerationMixin)._sample)

    target: Target
    draft: DFlashDraftModel
    draft_parts: Inventory  # the modules of the draft
    answer: Callable[[Call], Any]  # what is done once everything is prepared
    streamer: BaseStreamer | None  # gets every accepted run; `generate` puts the prompt
    cache: Cache | None  # `past_key_values` that the caller passed
    started: float  # `time.perf_counter()` at the user's call
    # As `generate` prepared them.
    input_ids: torch.LongTensor = field(init=False)  # [B, S], left-padded, on the target's device
    given_on: torch.device = field(init=False)  # where they were
    processors: BlockProcessors = field(init=False)
    criteria: StoppingCriteriaList = field(init=False)
    config: GenerationConfig = field(init=False)
    inputs: dict[str, Any] = field(init=False)  # keywords for the target's prefill

    def __call__(
        self,
        model: Any,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **inputs: Any,
    ) -> Any:
        """Takes what `generate` has prepared, and answers."""
        self.given_on, self.input_ids = input_ids.device, cast(torch.LongTensor, input_ids.to(self.target.device))
        self.criteria, self.config, self.inputs = stopping_criteria, generation_config, inputs
        pad: Any = generation_config._pad_token_tensor
        self.processors = BlockProcessors(logits_processor, 0 if pad is None else int(pad))
        return self.answer(self)

    @functools.cached_property
    def own_criteria(self) -> list[StoppingCriteria]:
        """Criteria besides length and end of sequence."""
        return [criterion for criterion in self.criteria if type(criterion) not in LENGTH_AND_END]

    @property
    def calls_out(self) -> bool:
        """Whether code of the user's runs between two forwards, which may want to use the target itself."""
        return bool(self.own_criteria) or self.streamer is not None or not self.processors.is_stateless


@dataclass(slots=True, kw_only=True)
class Run:
    """The parts of one run, after its prefill."""

    call: Call  # that it answers
    generator: DFlashCandidateGenerator
    buffers: FixedBuffers
    cache: RaggedCache  # the target's
    synchronized: SynchronizedRows | None  # where something of the user's has to see all rows
    recorder: Recorder
    stats: SpeculativeStats
    watch: Stopwatch
    chooser: WidthChooser | None
    kept: UserCache | None  # the cache that was passed in or asked for
    extra: dict[str, Any]  # keywords of the caller's own for the target's forward
    reach: list[int] | None  # per row the length at which a target with a table of positions has used all
    longest: int  # tokens in the caches of the longest row
    keeps_buffers: bool  # whether they go back for the next call when the run has ended well
    accept: Accept | None = None  # a rule of the user's
    # The first five rows of the last step's `state.outcome`.
    reported: list[list[int]] = field(default_factory=list[list[int]])
    taps: Taps | None = None  # those that are open, see `tapped`

    @property
    def finished(self) -> bool:
        """Whether every row has ended."""
        return all(self.reported[3])

    @property
    def state(self) -> DecodeState:
        """What the steps change."""
        return self.buffers.state

    def decides(self) -> bool:
        """Returns True if nothing of the user's has to look at a step before it is committed or after it."""
        return self.call.processors.is_stateless and not (
            self.call.own_criteria or self.synchronized is not None or self.recorder.is_on or self.accept is not None
        )


@contextmanager
def tapped(run: Run) -> Generator[Taps]:
    """The target with its attention switched, its layers tapped and its recurrences noted.

    Where it is so already, for several verifies, nothing is done.
    """
    if run.taps is not None:
        yield run.taps
        return
    ids = run.generator.draft.config.target_layer_ids
    taps = Taps(run.call.target.layers, ids, counts=lambda kwargs: kwargs.get(KEYWORD) is run.cache)
    with ragged_attention(run.call.target), noting(run.cache.layers), taps.open():
        run.taps = taps
        try:
            yield taps
        finally:
            run.taps = None
