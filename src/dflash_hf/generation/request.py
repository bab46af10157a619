"""This module defines `Request`: the inputs and settings of one call, as Transformers has prepared them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import (
    Cache,
    GenerationConfig,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteriaList,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

from dflash_hf.devices import Inventory
from dflash_hf.generation.ranks import Ranks
from dflash_hf.generation.sampling import BlockProcessors
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.fast_layers import in_whole_run
from dflash_hf.target_model.parts import Target

# Criteria that the commit itself applies.
LENGTH_AND_END = (EosTokenCriteria, MaxLengthCriteria)
# Packages whose processors, criteria and streamers change no weights.
OWN_PACKAGES = {"transformers", "dflash_hf"}
# Classes of Transformers that call a function of the user, or criteria of any class.
CALLING_OTHERS = {PrefixConstrainedLogitsProcessor, StoppingCriteriaList}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The inputs and settings of one call.

    No step changes it. A run gets another `Request` when its models are looked up again (`run.look_at_models`, and
    `RunningBatch` for a prefill that has begun), and when rows join or leave a running batch (`joining.go_by`).
    """

    target: Target
    draft: DFlashDraftModel
    draft_parts: Inventory  # the modules of the draft
    ranks: Ranks
    streamer: BaseStreamer | None  # gets the accepted tokens; `generate` gives it the prompt
    cache: Cache | None  # the cache that the caller has passed
    started: float  # `time.perf_counter()` at the user's call
    input_ids: torch.LongTensor  # [B, S], left-padded, on the target's device
    given_on: torch.device  # the device on which the caller has passed them
    processors: BlockProcessors
    criteria: StoppingCriteriaList
    config: GenerationConfig

    @property
    def own_criteria(self) -> list[StoppingCriteria]:
        """The stopping criteria without those for length and end of sequence."""
        return [criterion for criterion in self.criteria if type(criterion) not in LENGTH_AND_END]

    @property
    def calls_user_code(self) -> bool:
        """Whether code that is neither Transformers' nor this package's runs between two forwards."""
        called = [*self.processors.processors, *self.criteria]
        if self.streamer is not None:
            called.append(self.streamer)
        kinds = set(map(type, called))
        packages = {kind.__module__.partition(".")[0] for kind in kinds}
        is_all_own = packages <= OWN_PACKAGES and not kinds & CALLING_OTHERS
        return not is_all_own or any(map(_has_replaced_method, called))

    @property
    def runs_user_code(self) -> bool:
        """Whether code that is neither torch's, Transformers' nor this package's runs in a forward or between two."""
        # In a whole run, the target's modules were already tested at its beginning.
        return self.calls_user_code or not (in_whole_run(self.target) or self.target.is_unmodified)

    @property
    def calls_out(self) -> bool:
        """Whether code that runs between two forwards may use the target itself.

        The user's code may use it, and guidance does. All other code of Transformers sees only tokens and scores.
        """
        kinds = set(map(type, self.processors.processors))
        return self.calls_user_code or UnbatchedClassifierFreeGuidanceLogitsProcessor in kinds


def _has_replaced_method(called: object) -> bool:
    """Returns True if a method of an object was replaced by a function on the object itself."""
    kind = type(called)
    own = getattr(called, "__dict__", {})
    # Only this package calls `put_tree`. No class of Transformers has this method.
    has_own_tree = "put_tree" in own
    return has_own_tree or any(callable(getattr(kind, name, None)) for name in own)
