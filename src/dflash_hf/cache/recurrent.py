"""The recurrent part of the ragged cache: states that stay as they were until it is known what a block keeps.

A verify gets the window and the state from before its block, and what it would make of them is dropped. Beside them
the block's inputs are noted. When the next block begins, the rows' lengths say how many tokens of the last one were
kept, and `RecurrentGroup.replay` takes window and state on by exactly as many: whatever has shortened a row in
between, a stopping criterion or another row in step with it, has changed its length too.

Layers of one kind and size share stacked buffers, so that a replay is a few calls for all of them.

Shapes: `L` layers of a group, `B` rows, `C` channels, `k` of the window, `W` tokens of the longest block.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from dflash_hf.cache.recurrence import Noted, Recurrence, Rule
from dflash_hf.scopes import Hook, hooked


class RecurrentLayer(LinearAttentionCacheLayerMixin):
    """One layer's window and state, as Transformers' recurrent modules look for them.

    They are views of its group's buffers, in which it has the place `slot`.
    """

    @property
    def is_compileable(self) -> bool:
        """Says no: what is noted of a block is Python code around the module."""
        return False

    def __init__(self, group: RecurrentGroup, slot: int) -> None:
        super().__init__()
        self.group = group
        with torch.inference_mode(False):
            self.window = group.windows[slot]
            self.state = None if group.states is None else group.states[slot]
            self._block = group.blocks[slot]
            self._noted = group.noted[slot]
        self.module: weakref.ref[nn.Module] = group.modules[slot]
        self.conv_states = {0: self.window}
        self.recurrent_states = {0: self.state}
        self.is_conv_states_initialized = {0: True}
        self.is_recurrent_states_initialized = {0: self.state is not None}
        self.has_previous_state = {0: True}
        self.conv_kernel_size = {0: self.window.shape[-1]}
        self.device = self.window.device
        self.dtype = self.window.dtype
        # Keeps modules from writing into the window themselves, which they do for single tokens.
        self.record_past = True
        # What has not been noted of the block.
        self.waiting: set[str] = set()
        # Of the calls of its module that are running, innermost last, whether they are over this cache.
        self._calls: list[bool] = []

    def begin(self, width: int) -> None:
        """Expects a block of `width` tokens."""
        self.waiting = {"", *self.group.places}
        if self.state is not None and self.group.plan.rule.writes_state:
            self.recurrent_states[0] = self.state.clone() if width == 1 else self.state

    def hooks(self, layers: Sequence[object]) -> list[Hook]:
        """Returns the forward hooks that note the projections.

        They listen to calls over a cache of these layers: a hook of the user's may run the module inside a verify.
        """
        module = self.module()
        assert module is not None, "a run keeps its target alive"
        self._calls = []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = (*args, *kwargs.values())
            self._calls.append(any(getattr(value, "layers", None) is layers for value in given))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._calls.pop()

        def hook(name: str, place: slice) -> Callable[[nn.Module, Any, Any], None]:
            def note(module: nn.Module, args: Any, output: Tensor) -> None:
                if self._calls and self._calls[-1]:
                    self._noted[:, : output.shape[1], place].copy_(output[..., place.start - place.stop :])
                    self.waiting.discard(name)

            return note

        return [
            Hook(module, enter, before=True, options={"prepend": True, "with_kwargs": True}),
            Hook(module, leave, options={"always_call": True}),
            *(Hook(getattr(module, name), hook(name, place)) for name, place in self.group.places.items()),
        ]

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Notes what goes into the convolution, `[B, C, w]`, and returns it behind the window, `[B, C, k + w]`."""
        self._block[..., : conv_states.shape[-1]].copy_(conv_states)
        self.waiting.discard("")
        return torch.cat([self.window.to(conv_states.dtype), conv_states], dim=-1)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Drops the state after the whole block and returns it."""
        return recurrent_states

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the buffers exist from the start."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Layers that will share buffers, and what those have to be like."""

    rule: Rule
    device: torch.device
    # Rows, and tokens of the longest block.
    batch: int
    width: int
    # Shape of one row of one layer, and dtype; no state where the window is all.
    window: tuple[torch.Size, torch.dtype]
    state: tuple[torch.Size, torch.dtype] | None
    num_noted: int  # numbers noted per token

    def num_bytes(self) -> int:
        """Returns the size of one layer's buffers: window, state, the noted block."""
        (channels, kernel), dtype = self.window
        noted = (kernel + self.width) * channels + self.width * self.num_noted
        state = 0 if self.state is None else self.state[0].numel() * self.state[1].itemsize
        return self.batch * (noted * dtype.itemsize + state)


class RecurrentGroup:
    """Stacked buffers of recurrent layers alike, by a plan of what they have in common and the layers by index."""

    def __init__(self, plan: GroupPlan, members: Mapping[int, Recurrence]) -> None:
        num = len(members)
        window, dtype = plan.window
        self.plan = plan
        self.indices = list(members)
        # Buffers outlive the call, a target need not.
        self.modules = [weakref.ref(member.module) for member in members.values()]
        # Where each projection goes in what is noted.
        projections = plan.rule.projections(next(iter(members.values())).module)
        ends = itertools.pairwise(itertools.accumulate(projections.values(), initial=0))
        self.places = {name: slice(*pair) for name, pair in zip(projections, ends, strict=True)}

        def zeros(*size: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(num, plan.batch, *size, dtype=dtype, device=plan.device)

        # Plain tensors in any case: a call outside inference mode could not write to others.
        with torch.inference_mode(False):
            self.windows = zeros(*window)
            self.states = None if plan.state is None else zeros(*plan.state[0], dtype=plan.state[1])
            self.blocks = zeros(window[0], plan.width)
            self.noted = zeros(plan.width, plan.num_noted)
            self.lengths = torch.zeros(plan.batch, dtype=torch.long, device=plan.device)
            self._steps = torch.arange(plan.width, device=plan.device)
            self._columns = torch.arange(window[1], device=plan.device)

    def layers(self) -> dict[int, RecurrentLayer]:
        """Returns the layers of a cache that are views of the buffers, by index."""
        return {index: RecurrentLayer(self, slot) for slot, index in enumerate(self.indices)}

    def is_for(self, plan: GroupPlan, members: Mapping[int, Recurrence]) -> bool:
        """Returns True if these are the buffers that would be made for them."""
        modules = [weakref.ref(member.module) for member in members.values()]
        return (self.plan, self.indices, self.modules) == (plan, list(members), modules)

    def take(self, layers: Sequence[Any], lengths: Tensor, keep: bool) -> None:
        """Copies the states of a prefill's layers in, freeing each as it goes unless it is to keep them.

        Of all its layers; `lengths` `[B]`, int64, are the tokens that the rows' states have seen.
        """
        for slot, index in enumerate(self.indices):
            source = layers[index]
            self.windows[slot].copy_(source.conv_states[0])
            if self.states is not None:
                self.states[slot].copy_(source.recurrent_states[0])
            if not keep:
                source.conv_states[0] = None
                source.recurrent_states[0] = None
                source.is_conv_states_initialized[0] = False
                source.is_recurrent_states_initialized[0] = False
                source.has_previous_state[0] = False
        self.lengths.copy_(lengths)

    def replay(self, lengths: Tensor) -> None:
        """Takes the states on to where the rows stand now: in place, nothing read on the host.

        `lengths` `[B]`, int64, are the tokens that they are to have seen: as at the last call, or up to a block more.
        """
        num_kept = lengths - self.lengths
        inputs = torch.cat([self.windows, self.blocks], dim=-1)
        if self.states is not None:
            modules = [module() for module in self.modules]
            kept = self._steps < num_kept[:, None]
            self.states.copy_(self.plan.rule.replay(Noted(modules, inputs, self.noted, self.states, kept)))
        columns = (num_kept[:, None] + self._columns)[None, :, None].expand_as(self.windows)
        self.windows.copy_(inputs.gather(-1, columns))
        self.lengths.copy_(lengths)

    def buffers(self) -> list[Tensor]:
        """Returns every tensor that must stay where it is."""
        kept = (self.windows, self.states, self.blocks, self.noted, self.lengths, self._steps, self._columns)
        return [buffer for buffer in kept if buffer is not None]

    def clear(self) -> None:
        """Empties the buffers in place."""
        for buffer in self.buffers()[:-2]:  # steps and columns never change
            buffer.zero_()


Members = tuple[GroupPlan, dict[int, Recurrence]]


def plan_groups(prefill: Cache, recurrences: Mapping[int, Recurrence], width: int) -> list[Members]:
    """Puts the recurrent layers of a filled cache into groups alike, for blocks of up to `width` tokens."""
    groups: dict[GroupPlan, dict[int, Recurrence]] = {}
    for index, (rule, module) in recurrences.items():
        source: Any = prefill.layers[index]
        window, state = (getattr(source, f"{name}_states", {}).get(0) for name in ("conv", "recurrent"))
        if not isinstance(source, LinearAttentionLayer) or window is None or len(source.conv_states) != 1:
            raise ValueError(
                f"expected one convolution window in layer {index} of the prefill cache, got "
                f"{type(source).__name__}; this target keeps its recurrent state elsewhere and is not supported"
            )
        of_window = (window.shape[1:], window.dtype)
        of_state = None if state is None else (state.shape[1:], state.dtype)
        num_noted = sum(rule.projections(module).values())
        plan = GroupPlan(rule, window.device, window.shape[0], width, of_window, of_state, num_noted)
        groups.setdefault(plan, {})[index] = recurrences[index]
    return list(groups.items())


@contextmanager
def noting(layers: Sequence[object]) -> Generator[None]:
    """Has the recurrent layers among a cache's note the projections of this thread's blocks."""
    with hooked(*(hook for layer in layers if isinstance(layer, RecurrentLayer) for hook in layer.hooks(layers))):
        yield
