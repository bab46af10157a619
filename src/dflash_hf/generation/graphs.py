"""What has been captured over one set of fixed buffers: graphs by settings and size, and what steps cost there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from dflash_hf.generation.sampling import BlockProcessors
from dflash_hf.target_model.user_code import Code

Settings = tuple[object, ...]
Size = tuple[int, int]  # slots that are read, tokens that are verified
NO_CODE = Code(())  # of no classes: nothing was captured yet


class Captured(NamedTuple):
    """A graph, or anything else with a `replay`, and the tensors that each replay overwrites."""

    graph: Any
    outputs: CausalLMOutputWithPast | None  # the target's, of a step that the host accepts
    draft_probs: Tensor  # the state's
    processors: BlockProcessors  # kept for as long as the graph: replays read their tensors


class Kept(dict[Size, Captured]):
    """The graph of each size under some settings, and the costs of steps there."""

    def __init__(self) -> None:
        super().__init__()
        # Seconds that a step of each useful width takes; empty until they are measured.
        self.costs: dict[int, float] = {}


@dataclass(slots=True)
class Graphs:
    """The graphs captured over one set of buffers, per settings, or the reason why nothing can be captured."""

    fingerprint: int = 0  # of the models at the time; nothing is captured under this one
    code: Code = NO_CODE  # what the classes of their modules computed by at the time
    pool: Any = None  # of memory, which all graphs share; replays never overlap
    captured: dict[Settings, Kept] = field(default_factory=dict[Settings, Kept])
    reason: str = ""
    # Why a step under some settings needs the host; other settings may not.
    needing_host: dict[Settings, str] = field(default_factory=dict[Settings, str])
