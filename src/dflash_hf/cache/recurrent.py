"""The recurrent part of the ragged cache: states that move on when it is known which tokens of a block are kept.

A verify gets the window and the state from before its block, and the new ones that it computes are dropped. The
block's inputs are recorded instead. When the next block begins, the rows' lengths say how many tokens of the last one
were kept, and `RecurrentGroup.replay` takes window and state on by as many. That covers everything that shortens a row
in between, such as a stopping criterion or another row in step with it, because that changes the row's length.

Layers of one kind and size share stacked buffers, so that a replay is a few calls for all of them.

Shapes: `L` layers of a group, `B` rows, `C` channels, `k` columns of the window, `W` tokens of the longest block.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from dflash_hf.cache.recurrence import RecordedBlock, Recurrence, Rule
from dflash_hf.cache.rows import kept_rows, with_row
from dflash_hf.undo import Hook

# A group's buffers that have rows, and the dimension of these.
ROW_DIMS = {"windows": 1, "states": 1, "blocks": 1, "projections": 1, "lengths": 0}
# The name, beside those of the projections, under which a layer waits for the input of its convolution.
_CONVOLUTION = ""


class RecurrentLayer(LinearAttentionCacheLayerMixin):
    """One layer's window and state, under the names by which Transformers' recurrent modules use them.

    Args:
        group (`RecurrentGroup`): The group whose buffers window and state are views of.
        slot (`int`): The layer's place in these buffers.
    """

    @property
    def is_compileable(self) -> bool:
        """False: hooks around the module record the block, and a compiled module calls none."""
        return False

    def __init__(self, group: RecurrentGroup, slot: int) -> None:
        super().__init__()
        self.group = group
        self.slot = slot
        self.view_buffers()
        self.module: weakref.ref[nn.Module] = group.modules[slot]
        # Transformers keys states by a number that is 0 unless a layer has several.
        self.is_conv_states_initialized = {0: True}
        self.is_recurrent_states_initialized = {0: self.state is not None}
        self.has_previous_state = {0: True}
        num_columns = self.window.shape[-1]
        self.conv_kernel_size = {0: num_columns}
        self.device = self.window.device
        self.dtype = self.window.dtype
        # Modules write single tokens into the window themselves, unless the layer records its past.
        self.record_past = True
        # The inputs of the block that have not been recorded yet: projections by name, and the convolution's.
        self.waiting: set[str] = set()
        # For each running call of the module, innermost last, whether it is a call over this cache.
        self._calls: list[bool] = []

    def view_buffers(self) -> None:
        """Looks at the group's buffers of now, which are others once rows have joined or left."""
        group = self.group
        self.state: Tensor | None = None
        # A view that is made in inference mode could not be written to outside it.
        with torch.inference_mode(False):
            self.window = group.windows[self.slot]
            if group.states is not None:
                self.state = group.states[self.slot]
            self._block = group.blocks[self.slot]
            self._projections = group.projections[self.slot]
        self.conv_states = {0: self.window}
        self.recurrent_states = {0: self.state}

    def begin(self, width: int) -> None:
        """Expects a block of `width` tokens."""
        self.waiting = {_CONVOLUTION, *self.group.places}
        rule = self.group.plan.rule
        if self.state is None or not rule.writes_state:
            return
        self.recurrent_states[0] = self.state
        if width == 1:
            # The module writes into the state that it is given for a single token, so it gets a copy.
            self.recurrent_states[0] = self.state.clone()

    def hooks(self, layers: Sequence[object]) -> list[Hook]:
        """Returns the forward hooks that record the projections in calls over a cache of these layers."""
        module = self.module()
        assert module is not None, "a run keeps its target alive"
        # An interrupt may have left the calls of an earlier verify unfinished.
        self._calls = []

        # Other calls are not recorded: a user's hook may run the module inside a verify.
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # The cache may be handed over in any place: it is known by its list of layers.
            given = (*args, *kwargs.values())
            caches = [value for value in given if hasattr(value, "layers")]
            is_ours = any(cache.layers is layers for cache in caches)
            self._calls.append(is_ours)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._calls.pop()

        # This hook stands before the user's, and the one behind is called after an error too: calls stay in pairs.
        at_begin = {"prepend": True, "with_kwargs": True}
        at_end = {"always_call": True}
        hooks = [
            Hook(module, enter, before=True, options=at_begin),
            Hook(module, leave, options=at_end),
        ]
        for name, place in self.group.places.items():
            projection = getattr(module, name)
            hooks.append(self._recording_hook(projection, name, place))
        return hooks

    def _recording_hook(self, projection: nn.Module, name: str, place: slice) -> Hook:
        """Returns the hook that records the output of a projection."""
        num_columns = place.stop - place.start

        def record(module: nn.Module, args: Any, output: Tensor) -> None:
            is_in_verify = bool(self._calls) and self._calls[-1]
            if not is_in_verify:
                return
            # A block may be shorter than the longest one: what stands behind it is of an earlier block.
            width = output.shape[1]
            recorded = self._projections[:, :width, place]
            recorded.copy_(output[..., -num_columns:])
            self.waiting.discard(name)

        return Hook(projection, record)

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Records the convolution's input `[B, C, w]` and returns it behind the window: `[B, C, k + w]`."""
        width = conv_states.shape[-1]
        recorded = self._block[..., :width]
        recorded.copy_(conv_states)
        self.waiting.discard(_CONVOLUTION)
        # The window itself stays: the block's tokens are not accepted yet.
        window = self.window.to(conv_states.dtype)
        return torch.cat([window, conv_states], dim=-1)

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Returns the state after the whole block and stores nothing: the block's tokens are not accepted yet."""
        return recurrent_states

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the buffers exist from the start."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Sizes that the recurrent layers of one group have in common."""

    rule: Rule
    device: torch.device
    batch: int  # rows
    width: int  # tokens of the longest block
    window: tuple[torch.Size, torch.dtype]  # shape of one row of one layer, `[C, k]`, and dtype
    # Shape of one row of one layer, and dtype; `None` where the window is the whole state.
    state: tuple[torch.Size, torch.dtype] | None
    num_projected: int  # numbers of the recorded projections per token

    def num_bytes(self) -> int:
        """Returns the size of one layer's buffers: its window, its state and the recorded block."""
        (channels, kernel), dtype = self.window
        num_inputs = (kernel + self.width) * channels
        numbers = num_inputs + self.width * self.num_projected
        num_bytes = numbers * dtype.itemsize
        if self.state is not None:
            size, state_dtype = self.state
            state_bytes = size.numel() * state_dtype.itemsize
            num_bytes += state_bytes
        return self.batch * num_bytes


class RecurrentGroup:
    """Stacked buffers of recurrent layers of one kind and size.

    Args:
        plan (`GroupPlan`): The sizes that the layers have in common.
        members (mapping of `int` to `Recurrence`): The layers by index.
    """

    def __init__(self, plan: GroupPlan, members: Mapping[int, Recurrence]) -> None:
        window, dtype = plan.window
        channels, kernel = window
        # The first two dimensions of every buffer: [L, B, ...].
        layers_and_rows = (len(members), plan.batch)
        device = plan.device
        self.plan = plan
        self.indices = list(members)
        self.modules = _weak_modules(members)
        # The columns of each projection in the recorded ones.
        self.places: dict[str, slice] = {}
        start = 0
        first = next(iter(members.values()))
        projections = plan.rule.projections(first.module)
        for name, num_columns in projections.items():
            end = start + num_columns
            self.places[name] = slice(start, end)
            start = end

        def zeros(*size: int, dtype: torch.dtype = dtype) -> Tensor:
            shape = (*layers_and_rows, *size)
            return torch.zeros(shape, dtype=dtype, device=device)

        # A tensor that is made in inference mode could not be written to outside it.
        with torch.inference_mode(False):
            self.windows = zeros(*window)
            self.states: Tensor | None = None
            if plan.state is not None:
                size, state_dtype = plan.state
                self.states = zeros(*size, dtype=state_dtype)
            self.blocks = zeros(channels, plan.width)
            self.projections = zeros(plan.width, plan.num_projected)
            # The tokens that each row's window and state have seen.
            self.lengths = torch.zeros(plan.batch, dtype=torch.long, device=device)
            # The tokens of a block and the columns of a window, counted once: a replay makes no new indices.
            self._steps = torch.arange(plan.width, device=device)
            self._columns = torch.arange(kernel, device=device)
        # All rows that there is memory for; the buffers are views of the first ones where others have left.
        self._allocated: dict[str, Tensor] = {}
        for name in ROW_DIMS:
            buffer = getattr(self, name)
            if buffer is not None:
                self._allocated[name] = buffer

    def layers(self) -> dict[int, RecurrentLayer]:
        """Returns the cache layers that are views of the buffers, by index."""
        found: dict[int, RecurrentLayer] = {}
        for slot, index in enumerate(self.indices):
            found[index] = RecurrentLayer(self, slot)
        return found

    def is_for(self, plan: GroupPlan, members: Mapping[int, Recurrence]) -> bool:
        """Returns True if a new group for these layers would have the same buffers."""
        if self.plan != plan or self.indices != list(members):
            return False
        # Two weak references are equal as long as they are of one living module.
        return self.modules == _weak_modules(members)

    def take(self, layers: Sequence[Any], lengths: Tensor, keep: bool) -> None:
        """Copies the windows and states of a prefill's layers in and releases each, unless `keep` is True.

        Args:
            layers (sequence): All layers of the filled cache.
            lengths (`torch.Tensor` of shape `[B]`, int64): The tokens that the rows' states have seen.
            keep (`bool`): Whether the layers stay as they are.
        """
        for slot, index in enumerate(self.indices):
            source = layers[index]
            window = self.windows[slot]
            window.copy_(source.conv_states[0])
            if self.states is not None:
                state = self.states[slot]
                state.copy_(source.recurrent_states[0])
            if not keep:
                _release(source)
        self.lengths.copy_(lengths)

    def replay(self, lengths: Tensor) -> None:
        """Takes windows and states on to where the rows stand now: in place, nothing is read on the host.

        `lengths` `[B]`, int64, are the tokens that they have to have seen: those of the last call, or up to a block
        more.
        """
        num_kept = lengths - self.lengths
        # The convolution looks back over the window: [L, B, C, k + W].
        inputs = torch.cat([self.windows, self.blocks], dim=-1)
        if self.states is not None:
            modules = [module() for module in self.modules]
            is_kept = self._steps < num_kept[:, None]
            block = RecordedBlock(
                modules=modules,
                inputs=inputs,
                projections=self.projections,
                states=self.states,
                is_kept=is_kept,
            )
            after = self.plan.rule.replay(block)
            # In place: the layers hold views of it, and a graph its address.
            self.states.copy_(after)
        # The new window is the `k` columns that end with the last kept token.
        columns = num_kept[:, None] + self._columns
        by_channel = columns[None, :, None]
        of_all_layers = by_channel.expand_as(self.windows)
        new_windows = inputs.gather(-1, of_all_layers)
        self.windows.copy_(new_windows)
        self.lengths.copy_(lengths)

    def num_bytes(self, num_rows: int) -> int:
        """Returns the size of all buffers for so many rows."""
        plan = replace(self.plan, batch=num_rows)
        return plan.num_bytes() * len(self.indices)

    def keep_rows(self, rows: Sequence[int], layers: Sequence[Any]) -> None:
        """Keeps these rows alone; see [`kept_rows`]. `layers` are all those of the cache."""
        for name in self._allocated:
            buffer = kept_rows(getattr(self, name), rows, ROW_DIMS[name])
            setattr(self, name, buffer)
        self._use_rows(len(rows), layers)

    def add_row(self, source: RecurrentGroup, max_rows: int, layers: Sequence[Any]) -> None:
        """Adds the first row of another group behind the last one, the block included that it has yet to take in.

        Memory for `max_rows` is allocated at once. `layers` are all those of the cache.
        """
        place = self.plan.batch
        for name, allocated in self._allocated.items():
            dim = ROW_DIMS[name]
            if allocated.shape[dim] == place:
                allocated = with_row(allocated, max_rows, dim)
                self._allocated[name] = allocated
            setattr(self, name, allocated.narrow(dim, 0, place + 1))
        self.put_row(place, source)
        self._use_rows(place + 1, layers)

    def put_row(self, place: int, source: RecurrentGroup) -> None:
        """Puts the first row of another group to a place, over the row that is there; see [`add_row`]."""
        for name in self._allocated:
            dim = ROW_DIMS[name]
            mine: Tensor = getattr(self, name)
            theirs: Tensor = getattr(source, name)
            mine.select(dim, place).copy_(theirs.select(dim, 0))

    def _use_rows(self, num_rows: int, layers: Sequence[Any]) -> None:
        """Goes on with buffers of so many rows."""
        self.plan = replace(self.plan, batch=num_rows)
        for index in self.indices:
            layers[index].view_buffers()

    def buffers(self) -> list[Tensor]:
        """Returns every tensor that a captured step reads or writes."""
        constants = [self._steps, self._columns]
        return self._changing_buffers() + constants

    def clear(self) -> None:
        """Fills the buffers with zeros, in place."""
        for buffer in self._changing_buffers():
            buffer.zero_()

    def _changing_buffers(self) -> list[Tensor]:
        """Returns the buffers that a run writes, in a fixed order."""
        buffers = [self.windows]
        if self.states is not None:
            buffers.append(self.states)
        buffers += [self.blocks, self.projections, self.lengths]
        return buffers


def _weak_modules(members: Mapping[int, Recurrence]) -> list[weakref.ref[nn.Module]]:
    """Returns references to the modules that do not keep them: buffers in the pool may outlive the target."""
    return [weakref.ref(member.module) for member in members.values()]


def _release(source: Any) -> None:
    """Lets go of what an ordinary layer holds, which then is as one that nothing was written to."""
    source.conv_states[0] = None
    source.recurrent_states[0] = None
    source.is_conv_states_initialized[0] = False
    source.is_recurrent_states_initialized[0] = False
    source.has_previous_state[0] = False


# A group's sizes, and its layers by index.
Members = tuple[GroupPlan, dict[int, Recurrence]]


def plan_groups(prefill: Cache, recurrences: Mapping[int, Recurrence], width: int) -> list[Members]:
    """Returns the recurrent layers of a filled cache in groups of one kind and size, for blocks of `width` tokens.

    Raises `ValueError` for a layer whose cache does not hold exactly one convolution window.
    """
    groups: dict[GroupPlan, dict[int, Recurrence]] = {}
    for index, (rule, module) in recurrences.items():
        source: Any = prefill.layers[index]
        window = getattr(source, "conv_states", {}).get(0)
        state = getattr(source, "recurrent_states", {}).get(0)
        is_recurrent = isinstance(source, LinearAttentionLayer)
        # A second window would belong to a second recurrence of the layer, which no rule runs again.
        has_one_window = is_recurrent and len(source.conv_states) == 1
        if window is None or not has_one_window:
            raise ValueError(
                f"expected one convolution window in layer {index} of the prefill cache, got "
                f"{type(source).__name__}; this target keeps its recurrent state elsewhere and is not supported"
            )
        # Sizes of one row, so that the number of rows is no part of a window's or a state's.
        state_size = None
        if state is not None:
            state_size = (state.shape[1:], state.dtype)
        projections = rule.projections(module)
        plan = GroupPlan(
            rule=rule,
            device=window.device,
            batch=window.shape[0],
            width=width,
            window=(window.shape[1:], window.dtype),
            state=state_size,
            num_projected=sum(projections.values()),
        )
        # Layers of one plan share buffers, so that a replay is one call for all of them.
        members = groups.setdefault(plan, {})
        members[index] = recurrences[index]
    return list(groups.items())
