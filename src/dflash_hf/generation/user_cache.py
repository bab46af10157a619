"""This module handles caches that outlive a call, and the draft's context that belongs to them.

Such a cache was passed in, or the call returns it. The prefill fills a cache that was passed in as plain `generate`
does. The run uses a ragged copy of it. At the end, the decoded columns are added through the cache's own `update`. The
draft's context is attached to the cache object, so that the draft of the next turn knows the whole conversation. The
context contains the columns to which it belongs, and a sample of the cache's keys. If the cache was changed since
(cropped, or advanced without the draft), the sample differs.

Shapes: `B` rows, `T` columns of the whole conversation, `P` of them in the cache at the start, `R` slots of a buffer.
"""

from __future__ import annotations

import copy
import math
import uuid
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer, StaticLayer, StaticSlidingWindowLayer
from transformers.utils import logging

from dflash_hf.block.attention import RaggedBlock
from dflash_hf.block.positions import slot_positions
from dflash_hf.cache.prefilled import PromptSlots, stored_columns
from dflash_hf.cache.ragged import RaggedCache, RaggedLayer
from dflash_hf.cache.recurrent import RecurrentLayer
from dflash_hf.generation.candidate_generator import DFlashCandidateGenerator
from dflash_hf.generation.state import DecodeState
from dflash_hf.modeling_dflash import DFlashDraftModel

logger: Any = logging.get_logger(__name__)
# One name for each draft object. So a cache with its context can be copied and pickled, and keeps no draft alive.
_names: weakref.WeakKeyDictionary[DFlashDraftModel, str] = weakref.WeakKeyDictionary()


@dataclass(slots=True, kw_only=True)
class DraftContext:
    """A draft's context K/V over the columns of a cache, attached to it as `cache.dflash_context`."""

    draft: str  # name of the draft object that wrote it
    buffers: list[tuple[Tensor, Tensor]]  # keys and values per draft layer, [B, R, G, E]
    positions: Tensor  # [B, C], int64: index of each column's token, negative for padding
    offset: Tensor  # [B], int64: first index with context; the draft counts from it
    newest: Tensor  # [B], int64: highest index that was ever written, as the draft counts
    layer: int  # layer of the target that the sample is taken from
    sample: Tensor  # [B, n, E]: the first head's keys in the newest n of the C columns

    def repeated(self, rows: int, device: torch.device) -> DraftContext:
        """Returns this context for a cache after `batch_repeat_interleave`; all tensors except K/V are on `device`."""
        times = rows // self.positions.shape[0]

        def wide(tensor: Tensor) -> Tensor:
            return torch.repeat_interleave(tensor, times, dim=0)

        buffers = self.buffers
        # Keys and values may be gigabytes, so they are copied only if rows are repeated.
        if times > 1:
            buffers = [(wide(keys), wide(values)) for keys, values in self.buffers]
        return DraftContext(
            draft=self.draft,
            buffers=buffers,
            positions=wide(self.positions).to(device),
            offset=wide(self.offset).to(device),
            newest=wide(self.newest).to(device),
            layer=self.layer,
            sample=wide(self.sample).to(device),
        )

    def num_unchanged(self, cache: Cache) -> Tensor:
        """Returns how many first columns of each row have not changed since this was attached: int64 `[B]`."""
        past = int(cache.get_seq_length())
        now = stored_columns(cache.layers[self.layer])[0][:, 0].to(self.sample.device)
        first_now = past - now.shape[1]
        first_then = self.positions.shape[1] - self.sample.shape[1]
        begin = max(first_now, first_then)
        end = min(past, self.positions.shape[1])
        if begin >= end or now.shape[2] != self.sample.shape[2]:
            return torch.zeros_like(self.offset)
        now = now[:, begin - first_now : end - first_now]
        then = self.sample[:, begin - first_then : end - first_then]
        # A key depends on all tokens before it. If the sampled keys have not changed, no earlier key has changed.
        num_same = (now == then).all(dim=-1).long().cumprod(dim=1).sum(dim=1)
        return torch.where(num_same > 0, begin + num_same, 0)


class NoUserCache:
    """Takes the place of a [`UserCache`] in a call that leaves no cache behind."""

    is_kept = False
    is_given = False
    cache: Cache | None = None
    past = 0

    def restored_on_error(self) -> AbstractContextManager[None]:
        """Does nothing."""
        return nullcontext()

    def load_context(self, generator: DFlashCandidateGenerator, positions: Tensor) -> None:
        """Does nothing."""


class UserCache:
    """The cache that a call leaves behind. The prefill runs on it if it was passed in; else it is filled at the end.

    Args:
        cache (`Cache`): The cache.
        is_given (`bool`): Whether it was passed in.
    """

    is_kept = True

    def __init__(self, cache: Cache, is_given: bool) -> None:
        self.cache = cache
        self.is_given = is_given
        self.past = int(cache.get_seq_length())
        self.positions = torch.empty(0, 0, dtype=torch.long, device="cpu")

    @contextmanager
    def restored_on_error(self) -> Generator[None]:
        """Restores the cache if anything is raised, including an interrupt."""
        before = [_snapshot(layer) for layer in self.cache.layers]
        try:
            yield
        except BaseException:
            del self.cache.layers[len(before) :]
            for layer, (attributes, _) in zip(self.cache.layers, before, strict=True):
                vars(layer).clear()
                vars(layer).update(attributes)
            # Tensors are restored last, because nothing can be copied on a device that has failed.
            for _, copies in before:
                for tensor, copied in copies:
                    tensor.copy_(copied)
            raise

    def load_context(self, generator: DFlashCandidateGenerator, positions: Tensor) -> None:
        """Writes the attached context into a draft's empty cache; other rows begin at their first new token.

        Sets the generator's offset. `positions` `[B, T]` are as in [`DraftContext`].
        """
        self.positions = positions
        if not self.past:
            return
        past = positions[:, : self.past]
        num_past = (past >= 0).sum(dim=1)
        offset = num_past
        context: Any = getattr(self.cache, "dflash_context", None)
        reason = _why_unusable(context, generator, len(past))
        if not reason:
            context = context.repeated(len(past), past.device)
            anchor = positions[:, -1] + 1
            usable = _usable_rows(
                context, generator, past, anchor, context.num_unchanged(self.cache)
            )
            if not bool(usable.all()):
                reason = "the cache was changed since, or its columns now have other positions"
            offset = torch.where(usable, context.offset, num_past)
            _write_context(generator, context, torch.where(usable, num_past - context.offset, 0))
        if reason:
            logger.warning_once(
                f"The draft's context of a cache passed in is left out, at least of some rows ({reason}): the draft "
                "sees the new tokens only, and accepts less. The text is not affected."
            )
        if bool(offset.any()):
            generator.newest.set_offset(offset)

    def finish(
        self,
        state: DecodeState,
        ragged: RaggedCache,
        generator: DFlashCandidateGenerator,
        sequences: Tensor,
        verify: Callable[[Iterator[RaggedBlock]], None],
        *,
        keeps_buffers: bool,
    ) -> int:
        """Advances the cache by the decoded columns and attaches the draft's context. The run cannot continue then.

        As after plain `generate`, the cache has columns for all tokens except the last one. `sequences` `[B, columns +
        longest answer]` is the result of `generate`. `verify` runs the target over `state.block`, at the places of
        each block of an iterator; the iterator overwrites `state.block`. The ragged cache is emptied layer by layer,
        unless the buffers of both caches are kept for the next call. Returns the number of additional forwards of the
        target.
        """
        # 1. Write the context of the last verify. No forward of the draft follows that would write it.
        num_columns = int(state.num_new.max()) - 1
        answer = torch.arange(num_columns, device=self.positions.device)
        first = self.positions[:, -1] + 1
        generator.flush()
        # 2. Fill the columns of rows that have ended early, by forwards over their padding.
        most_behind = int((state.num_new.max() - state.num_new).max())
        num_forwards = math.ceil(most_behind / state.block.shape[1])
        if num_forwards:
            verify(self._padding(state, generator, sequences, num_forwards))
        # 3. Move the decoded columns, layer by layer, from the ragged cache.
        positions = first[:, None] + answer
        all_positions = torch.cat([self.positions, positions], dim=1)
        # The prefill has filled a cache that was passed in up to the end of the prompt. A new cache is empty.
        new = all_positions[:, int(self.cache.get_seq_length()) :]
        ragged.advance(RaggedBlock.at(first + num_columns, 1))
        self._take_columns(ragged, new, keeps_buffers)
        # 4. Attach the draft's context. It includes the token that ended a row, but no padding after this token.
        positions = positions.masked_fill(answer >= state.num_new[:, None], -1)
        self._attach_context(
            generator, torch.cat([self.positions, positions], dim=1), keeps_buffers
        )
        return num_forwards

    def _take_columns(self, ragged: RaggedCache, positions: Tensor, keeps_buffers: bool) -> None:
        """Adds the columns at positions `[B, n]` from a ragged cache, which is emptied unless its buffers are kept."""
        for index, layer in enumerate(ragged.layers):
            if isinstance(layer, RecurrentLayer):
                self.cache.update_conv_state(layer.window, index)
                if layer.state is not None:
                    self.cache.update_recurrent_state(layer.state, index)
                continue
            assert isinstance(layer, RaggedLayer)
            if positions.shape[1]:
                keys, values = layer.read_rows(positions)
                self.cache.update(keys, values, index)
            # This is done layer by layer, so that only one layer's keys and values are in memory twice.
            if not keeps_buffers:
                layer.release()

    def _padding(
        self,
        state: DecodeState,
        generator: DFlashCandidateGenerator,
        sequences: Tensor,
        num_forwards: int,
    ) -> Iterator[RaggedBlock]:
        """Yields blocks that feed the last token and then padding to rows that ended early, as plain `generate` does.

        Rows without a token to feed run over columns after their end.
        """
        width = state.block.shape[1]
        behind = state.num_new.max() - state.num_new
        offsets = torch.arange(width, device=sequences.device)
        for index in range(num_forwards):
            # Number of new tokens that each row has fed: first the last token, and then the padding after it.
            fed = behind.clamp_max(index * width) + state.num_new - 1
            columns = (state.host.columns + fed)[:, None] + offsets
            state.block.copy_(sequences.gather(1, columns.clamp_max(sequences.shape[1] - 1)))
            yield RaggedBlock.at(self.positions[:, -1] + 1 + fed, width)
            if index == 0:
                generator.flush()

    def _attach_context(
        self, generator: DFlashCandidateGenerator, positions: Tensor, keeps_buffers: bool
    ) -> None:
        """Attaches the draft's context to the cache; `positions` `[B, C]` are those of the columns with context."""
        holder: Any = self.cache
        holder.dflash_context = None
        # A run that never drafts has written no context.
        if generator.verify_width < 2:
            return
        buffers = [layer.buffers() for layer in generator.draft_cache.attention.values()]
        lengths = (positions >= 0).sum(dim=1)
        offset = generator.newest.offset
        # The next call overwrites buffers that are kept, so they are copied.
        if keeps_buffers:
            buffers = [(keys.clone(), values.clone()) for keys, values in buffers]
            offset = offset.clone()
        layers: list[Any] = self.cache.layers
        attention = [
            index for index, one in enumerate(layers) if not isinstance(one, LinearAttentionLayer)
        ]
        # The last full layer has the most columns to sample.
        full = [index for index in attention if not layers[index].is_sliding]
        layer = (full or attention)[-1]
        holder.dflash_context = DraftContext(
            draft=_names.setdefault(generator.draft, uuid.uuid4().hex),
            buffers=buffers,
            positions=positions,
            offset=offset,
            # The draft's last blocks were written after its context.
            newest=lengths - offset + max(generator.block_size, generator.verify_width) - 1,
            layer=layer,
            sample=stored_columns(layers[layer])[0][:, 0].clone(),
        )


def _snapshot(layer: Any) -> tuple[dict[str, Any], list[tuple[Tensor, Tensor]]]:
    """Returns a layer's attributes, and pairs of each tensor that an update changes in place and its copy."""
    attributes: dict[str, Any] = dict(vars(layer))
    for name, value in attributes.items():
        # Layers keep states in dicts, and an update changes these in place too.
        if isinstance(value, dict):
            attributes[name] = copy.copy(value)
    changing: list[Tensor | None] = []
    if isinstance(layer, LinearAttentionLayer):
        changing.extend(attributes["conv_states"].values())
        changing.extend(attributes["recurrent_states"].values())
    if isinstance(layer, StaticLayer):
        changing.append(attributes["cumulative_length"])
    # A full static layer has scratch slots beyond its length. A sliding static layer moves all its slots.
    if isinstance(layer, StaticSlidingWindowLayer):
        changing.extend([attributes["keys"], attributes["values"]])
    # A layer that has not been used yet has no tensors.
    return attributes, [(tensor, tensor.clone()) for tensor in changing if tensor is not None]


def _why_unusable(context: Any, generator: DFlashCandidateGenerator, num_rows: int) -> str:
    """Returns why a draft cannot use an attached context for `num_rows` rows; an empty string if it may use it."""
    if not isinstance(context, DraftContext):
        return "none is attached: the cache was not advanced with a draft"
    if context.draft != _names.get(generator.draft):
        return "it is another draft's"
    if num_rows % len(context.positions):
        return "the cache has other rows now"
    return ""


def _usable_rows(
    context: DraftContext,
    generator: DFlashCandidateGenerator,
    past: Tensor,
    anchor: Tensor,
    num_same: Tensor,
) -> Tensor:
    """Returns a mask of the rows that can continue with an attached context: bool `[B]`.

    In such a row, the columns with tokens have not changed: `num_same` `[B]` columns are the same, at the same
    indices. Also, no ring has lost context that the next block sees. This block begins at index `anchor` `[B]`.
    """
    num_columns = past.shape[1]
    offset = context.offset
    # Columns that are not in the context get an index that no column has.
    then = torch.full_like(past, -2)
    shared = min(num_columns, context.positions.shape[1])
    then[:, :shared] = context.positions[:, :shared]
    is_same = (then == past) & (torch.arange(num_columns, device=past.device) < num_same[:, None])
    # Padding needs no context. Neither do tokens before the first token with context.
    needs_none = (past < 0) | (past < offset[:, None])
    usable = (is_same | needs_none).all(dim=1)
    usable = usable & ((past >= 0).sum(dim=1) >= offset)
    for (keys, _), shape in zip(context.buffers, generator.draft.cache_shapes(), strict=True):
        oldest = torch.zeros_like(anchor)
        if shape.window is not None:
            # If a window counts from the anchor, it reaches `window` tokens back, otherwise one token less.
            oldest = (anchor - offset - shape.window).clamp_min(0)
        # A layer may have no window now, but a narrower one when its context was kept. Then its buffer has wrapped.
        usable = usable & (oldest > context.newest - keys.shape[1])
    return usable


def _write_context(
    generator: DFlashCandidateGenerator, context: DraftContext, length: Tensor
) -> None:
    """Copies the first `length` `[B]` tokens of an attached context into a draft's cache."""
    device = generator.device
    length = length.to(device)[:, None]
    newest = context.newest.to(device)[:, None]
    for index, (keys, values) in enumerate(context.buffers):
        ring = keys.shape[1]
        # Each slot is passed as a column, and slots beyond the length as padding, because ring sizes may differ.
        slots = torch.arange(ring, device=device)
        positions = slot_positions(newest, slots, ring)
        positions = positions.masked_fill(positions >= length, -1)
        layer = generator.draft_cache.attention[index]
        layer.write_rows(keys.to(device), values.to(device), PromptSlots(positions))
