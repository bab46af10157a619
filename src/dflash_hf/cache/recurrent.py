"""This module is the recurrent part of the ragged cache.

Its states advance when it is known which tokens of a block are kept.

A verify gets the window and the state from before its block. The new window and state that it computes are dropped,
and the block's inputs are recorded instead. When the next block begins, the rows' lengths show how many tokens of the
last block were kept, and `RecurrentGroup.replay` advances window and state by these tokens. A stopping criterion or
another row of a synchronized batch may shorten a row in between. This is covered, because it changes the row's length.

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

# The buffers of a group that have a dimension of rows, and the number of this dimension.
ROW_DIMS = {"windows": 1, "states": 1, "blocks": 1, "projections": 1, "lengths": 0}
# A layer waits for the input of its convolution under this name, and for each projection under its own name.
_CONVOLUTION = ""


class RecurrentLayer(LinearAttentionCacheLayerMixin):
    """An instance holds the window and the state of one layer, under the names that Transformers' recurrent modules
    use.

    Args:
        group (`RecurrentGroup`): The group of the layer. The window and the state are views of its buffers.
        slot (`int`): The layer's place in these buffers.
    """

    @property
    def is_compileable(self) -> bool:
        """This is False, because hooks around the module record the block, and a compiled module runs no hooks."""
        return False

    def __init__(self, group: RecurrentGroup, slot: int) -> None:
        super().__init__()
        self.group = group
        self.slot = slot
        self.view_buffers()
        self.module: weakref.ref[nn.Module] = group.modules[slot]
        # Transformers numbers the states of a layer. The number is 0 unless a layer has several states.
        self.is_conv_states_initialized = {0: True}
        self.is_recurrent_states_initialized = {0: self.state is not None}
        self.has_previous_state = {0: True}
        num_columns = self.window.shape[-1]
        self.conv_kernel_size = {0: num_columns}
        self.device = self.window.device
        self.dtype = self.window.dtype
        # Without this setting, modules write single tokens into the window themselves.
        self.record_past = True
        # These are the inputs of the block that have not been recorded yet: the names of the projections, and of the
        # convolution.
        self.waiting: set[str] = set()
        # For each running call of the module, whether the call is over this cache. The innermost call is last.
        self._calls: list[bool] = []

    def view_buffers(self) -> None:
        """Makes the views of the group's current buffers. The buffers change when rows join or leave."""
        group = self.group
        self.state: Tensor | None = None
        # Outside inference mode, it would not be possible to write to a view that was made inside it.
        with torch.inference_mode(False):
            self.window = group.windows[self.slot]
            if group.states is not None:
                self.state = group.states[self.slot]
            self._block = group.blocks[self.slot]
            self._projections = group.projections[self.slot]
        self.conv_states = {0: self.window}
        self.recurrent_states = {0: self.state}

    def begin(self, width: int) -> None:
        """Prepares the layer for a block of `width` tokens."""
        self.waiting = {_CONVOLUTION, *self.group.places}
        rule = self.group.plan.rule
        if self.state is None or not rule.writes_state:
            return
        self.recurrent_states[0] = self.state
        if width == 1:
            # The module writes into the state that it is given for a single token, so it gets a copy.
            self.recurrent_states[0] = self.state.clone()

    def hooks(self, layers: Sequence[object]) -> list[Hook]:
        """Returns the forward hooks that record the projections in calls over a cache with these layers."""
        module = self.module()
        assert module is not None, "a run keeps its target alive"
        # After an interrupt, calls of an earlier verify may still be listed.
        self._calls = []

        # Other calls are not recorded, because a user's hook may run the module inside a verify.
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # The cache may be any of the arguments. It is recognised by its list of layers.
            given = (*args, *kwargs.values())
            caches = [value for value in given if hasattr(value, "layers")]
            is_ours = any(cache.layers is layers for cache in caches)
            self._calls.append(is_ours)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._calls.pop()

        # The first hook runs before the user's hooks, and the second one runs also after an error. So every `enter`
        # has its `leave`.
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
            # A block may be shorter than the longest block. The columns behind it belong to an earlier block.
            width = output.shape[1]
            recorded = self._projections[:, :width, place]
            recorded.copy_(output[..., -num_columns:])
            self.waiting.discard(name)

        return Hook(projection, record)

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Records the convolution's input `[B, C, w]`. Returns the window followed by this input: `[B, C, k + w]`."""
        width = conv_states.shape[-1]
        recorded = self._block[..., :width]
        recorded.copy_(conv_states)
        self.waiting.discard(_CONVOLUTION)
        # The window itself is not changed, because the block's tokens are not accepted yet.
        window = self.window.to(conv_states.dtype)
        return torch.cat([window, conv_states], dim=-1)

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Returns the state after the whole block.

        Nothing is stored, because the block's tokens are not accepted yet.
        """
        return recurrent_states

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing, because the buffers exist from the start."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """An instance holds the sizes that the recurrent layers of one group have in common."""

    rule: Rule
    device: torch.device
    batch: int  # number of rows
    width: int  # number of tokens of the longest block
    window: tuple[torch.Size, torch.dtype]  # shape `[C, k]` of one row of one layer, and dtype
    # Shape of one row of one layer, and dtype. `None` if the window is the whole state.
    state: tuple[torch.Size, torch.dtype] | None
    num_projected: int  # recorded numbers of all projections per token

    def num_bytes(self) -> int:
        """Returns the bytes of one layer's buffers: its window, its state and the recorded block."""
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
    """A group holds the stacked buffers of recurrent layers of one kind and size.

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
        # The columns of each projection in the buffer of recorded projections.
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

        # Outside inference mode, it would not be possible to write to a tensor that was made inside it.
        with torch.inference_mode(False):
            self.windows = zeros(*window)
            self.states: Tensor | None = None
            if plan.state is not None:
                size, state_dtype = plan.state
                self.states = zeros(*size, dtype=state_dtype)
            self.blocks = zeros(channels, plan.width)
            self.projections = zeros(plan.width, plan.num_projected)
            # The number of tokens that each row's window and state have seen.
            self.lengths = torch.zeros(plan.batch, dtype=torch.long, device=device)
            # The indices of a block's tokens and of a window's columns. They are made once, so a replay makes no new
            # indices.
            self._steps = torch.arange(plan.width, device=device)
            self._columns = torch.arange(kernel, device=device)
        # These tensors have all rows for which there is memory. After rows have left, the buffers are views of the
        # first rows.
        self._allocated: dict[str, Tensor] = {}
        for name in ROW_DIMS:
            buffer = getattr(self, name)
            if buffer is not None:
                self._allocated[name] = buffer

    def layers(self) -> dict[int, RecurrentLayer]:
        """Returns the layers of the cache, by index. They are views of the buffers."""
        found: dict[int, RecurrentLayer] = {}
        for slot, index in enumerate(self.indices):
            found[index] = RecurrentLayer(self, slot)
        return found

    def is_for(self, plan: GroupPlan, members: Mapping[int, Recurrence]) -> bool:
        """Returns True if a new group for these layers would have the same buffers."""
        if self.plan != plan or self.indices != list(members):
            return False
        # Two weak references are equal if they refer to the same living module.
        return self.modules == _weak_modules(members)

    def take(self, layers: Sequence[Any], lengths: Tensor, keep: bool) -> None:
        """Copies the windows and states of a prefill's layers into the buffers, and releases the layers unless `keep`
        is True.

        Args:
            layers (sequence): All layers of the filled cache.
            lengths (`torch.Tensor` of shape `[B]`, int64): Number of tokens that each row's state has seen.
            keep (`bool`): Whether the layers keep their windows and states.
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
        """Advances windows and states to the current end of the rows, in place. Nothing is read on the host.

        `lengths` `[B]`, int64, is the number of tokens that each row's state must have seen afterwards. It is the
        value of the last call plus at most the tokens of a block.
        """
        num_kept = lengths - self.lengths
        # The convolution looks back into the window: [L, B, C, k + W].
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
            # This copy is in place, because the layers hold views of the buffer, and a graph holds its address.
            self.states.copy_(after)
        # The new window consists of the `k` columns that end with the last kept token.
        columns = num_kept[:, None] + self._columns
        by_channel = columns[None, :, None]
        of_all_layers = by_channel.expand_as(self.windows)
        new_windows = inputs.gather(-1, of_all_layers)
        self.windows.copy_(new_windows)
        self.lengths.copy_(lengths)

    def num_bytes(self, num_rows: int) -> int:
        """Returns the bytes of all buffers for this number of rows."""
        plan = replace(self.plan, batch=num_rows)
        return plan.num_bytes() * len(self.indices)

    def keep_rows(self, rows: Sequence[int], layers: Sequence[Any]) -> None:
        """Keeps only these rows; see [`kept_rows`]. `layers` are all layers of the cache."""
        for name in self._allocated:
            buffer = kept_rows(getattr(self, name), rows, ROW_DIMS[name])
            setattr(self, name, buffer)
        self._use_rows(len(rows), layers)

    def add_row(self, source: RecurrentGroup, max_rows: int, layers: Sequence[Any]) -> None:
        """Adds the first row of another group behind the last row, including its block that has not
        been replayed yet.

        Memory for `max_rows` is allocated at once. `layers` are all layers of the cache.
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
        """Copies the first row of another group over the row at `place`; see [`add_row`]."""
        for name in self._allocated:
            dim = ROW_DIMS[name]
            mine: Tensor = getattr(self, name)
            theirs: Tensor = getattr(source, name)
            mine.select(dim, place).copy_(theirs.select(dim, 0))

    def _use_rows(self, num_rows: int, layers: Sequence[Any]) -> None:
        """Continues with buffers of this number of rows."""
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
    """Returns weak references to the modules, because buffers in the pool may outlive the target."""
    return [weakref.ref(member.module) for member in members.values()]


def _release(source: Any) -> None:
    """Releases the tensors of an ordinary layer. Afterwards the layer is like one that has never been written."""
    source.conv_states[0] = None
    source.recurrent_states[0] = None
    source.is_conv_states_initialized[0] = False
    source.is_recurrent_states_initialized[0] = False
    source.has_previous_state[0] = False


# The sizes of a group, and its layers by index.
Members = tuple[GroupPlan, dict[int, Recurrence]]


def plan_groups(prefill: Cache, recurrences: Mapping[int, Recurrence], width: int) -> list[Members]:
    """Returns the recurrent layers of a filled cache, grouped by kind and size, for blocks of `width` tokens.

    Raises `ValueError` for a layer whose cache does not hold exactly one convolution window.
    """
    groups: dict[GroupPlan, dict[int, Recurrence]] = {}
    for index, (rule, module) in recurrences.items():
        source: Any = prefill.layers[index]
        window = getattr(source, "conv_states", {}).get(0)
        state = getattr(source, "recurrent_states", {}).get(0)
        is_recurrent = isinstance(source, LinearAttentionLayer)
        # A second window would belong to a second recurrence of the layer, which no rule can replay.
        has_one_window = is_recurrent and len(source.conv_states) == 1
        if window is None or not has_one_window:
            raise ValueError(
                f"expected one convolution window in layer {index} of the prefill cache, got "
                f"{type(source).__name__}; this target keeps its recurrent state elsewhere and is not supported"
            )
        # These are sizes of one row, so they do not depend on the number of rows.
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
        # Layers with the same plan share buffers, so that a replay is one call for all of them.
        members = groups.setdefault(plan, {})
        members[index] = recurrences[index]
    return list(groups.items())
