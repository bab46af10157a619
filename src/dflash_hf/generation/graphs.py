"""This module holds the CUDA graphs that were captured over one set of fixed buffers, and the costs of their steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from dflash_hf.generation.sampling import BlockProcessors
from dflash_hf.target_model.user_code import Code

Settings = tuple[object, ...]
Size = tuple[int, int]  # slots that are read, tokens that are verified
NO_CODE = Code(())  # the code of no classes, before the first capture


class Captured(NamedTuple):
    """A graph, or anything else with a `replay`, and the tensors that each replay overwrites."""

    graph: Any
    outputs: CausalLMOutputWithPast | None  # the target's output, if the host accepts the step
    draft_probs: Tensor  # `DecodeState.draft_probs` of the captured step
    processors: BlockProcessors  # kept as long as the graph, because replays read their tensors


class Kept(dict[Size, Captured]):
    """Holds the graph of each size for one combination of settings, and the costs of these steps."""

    def __init__(self) -> None:
        super().__init__()
        # The seconds that a step of each useful width takes. The dict is empty until they are measured.
        self.costs: dict[int, float] = {}


@dataclass(slots=True)
class Graphs:
    """Holds the graphs captured over one set of buffers, by settings, or the reason why nothing can be captured."""

    fingerprint: int = 0  # of the models at the time of the captures; 0 before the first one
    code: Code = NO_CODE  # the code of the models' classes at the time of the captures
    pool: Any = None  # the memory pool that all graphs share, because replays never overlap
    captured: dict[Settings, Kept] = field(default_factory=dict[Settings, Kept])
    reason: str = ""
    # The settings under which a step needs the host, with the reason. Other settings may not need it.
    needing_host: dict[Settings, str] = field(default_factory=dict[Settings, str])
