"""Caches that outlive a call, passed in or asked for, and the draft's context that goes with them.

A cache passed in is filled by the prefill as plain `generate` fills it, and advanced at the end by what was decoded,
through its own `update`; in between the run has a ragged copy. The draft's context is attached to the cache object, so
that the next turn drafts as if it had seen the whole conversation. It says which columns it is for and keeps a sample
of the cache's keys: where the cache has been changed since (cropped, advanced by something else), the sample differs.

Shapes: `B` rows, `T` columns of the whole conversation, `P` of them in the cache at the start, `R` slots of a buffer.
"""

from __future__ import annotations

import copy
import functools
import uuid
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer, StaticLayer, StaticSlidingWindowLayer
from transformers.utils import logging

from dflash_hf.attention import RaggedBlock
from dflash_hf.cache.prompts import PromptSlots
from dflash_hf.cache.ragged import RaggedCache, RaggedLayer, stored_columns
from dflash_hf.cache.recurrent import RecurrentLayer
from dflash_hf.generation.candidate_generator import DFlashCandidateGenerator
from dflash_hf.generation.state import DecodeState
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.positions import slot_positions

logger: Any = logging.get_logger(__name__)
# A name per draft object: a cache can be copied and pickled with its context, and keeps no draft alive.
_names: weakref.WeakKeyDictionary[DFlashDraftModel, str] = weakref.WeakKeyDictionary()


@dataclass(slots=True, kw_only=True)
class DraftContext:
    """A draft's context K/V over the columns of a cache, attached to it as `cache.dflash_context`."""

    draft: str  # name of the draft object that wrote it
    buffers: list[tuple[Tensor, Tensor]]  # keys and values per draft layer, [B, R, G, E]
    positions: Tensor  # [B, C], int64: index of each column's token, negative for padding
    offset: Tensor  # [B], int64: first index that there is context for; the draft counts from it
    newest: Tensor  # [B], int64: highest index, as the draft counts, that was ever written to
    layer: int  # target layer that the sample is from
    sample: Tensor  # [B, n, E]: the first head's keys in the newest n of the C columns

    def repeated(self, rows: int, device: torch.device) -> DraftContext:
        """Returns it for a cache whose rows `batch_repeat_interleave` has repeated; all but K/V are on this device."""
        times = rows // self.positions.shape[0]
        wide = functools.partial(torch.repeat_interleave, repeats=times, dim=0)
        buffers = self.buffers if times == 1 else [(wide(keys), wide(values)) for keys, values in self.buffers]
        notes = {name: wide(getattr(self, name)).to(device) for name in ("positions", "offset", "newest", "sample")}
        return replace(self, buffers=buffers, **notes)

    def num_unchanged(self, cache: Cache) -> Tensor:
        """Returns how many of the first columns of each row are as they were when this was attached: int64 `[B]`."""
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
        # Keys depend on everything before them: where these are as they were, so are earlier ones that are gone.
        num_same = (now == then).all(dim=-1).long().cumprod(dim=1).sum(dim=1)
        return torch.where(num_same > 0, begin + num_same, 0)


class NoUserCache:
    """What [`UserCache`] is in a call that leaves no cache behind."""

    is_kept = False
    is_given = False
    cache: Cache | None = None
    past = 0

    def restored_on_error(self) -> AbstractContextManager[None]:
        """Does nothing."""
        return nullcontext()

    def begin(self, generator: DFlashCandidateGenerator, positions: Tensor, limit: int) -> None:
        """Does nothing."""


class UserCache:
    """The cache that a call leaves behind; the prefill runs on a given one, others are filled at the end.

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
        """Leaves the cache as it was if anything is raised, an interrupt included."""
        before = [_snapshot(layer) for layer in self.cache.layers]
        try:
            yield
        except BaseException:
            del self.cache.layers[len(before) :]
            for layer, (attributes, _) in zip(self.cache.layers, before, strict=True):
                vars(layer).clear()
                vars(layer).update(attributes)
            # Last, because on a device that has failed nothing can be copied.
            for tensor, copy in (pair for _, copies in before for pair in copies):
                tensor.copy_(copy)
            raise

    def begin(self, generator: DFlashCandidateGenerator, positions: Tensor, limit: int) -> None:
        """Writes the attached context into a draft's empty cache; rows without one begin at their first new token.

        Sets the generator's `offset`. `positions` `[B, T]` are as in [`DraftContext`]. Raises `ValueError` if a static
        cache has no room for `limit` new tokens.
        """
        self.positions = positions
        if not self.past:
            return
        past = positions[:, : self.past]
        context = getattr(self.cache, "dflash_context", None)
        reason = ""
        num_past = (past >= 0).sum(dim=1)
        generator.offset = num_past
        if not isinstance(context, DraftContext):
            reason = "none is attached: the cache was not advanced with a draft"
        elif context.draft != _names.get(generator.draft):
            reason = "it is another draft's"
        elif len(past) % len(context.positions):
            reason = "the cache has other rows now"
        else:
            context = context.repeated(len(past), past.device)
            usable = _usable_rows(context, generator, past, positions[:, -1] + 1, context.num_unchanged(self.cache))
            if not bool(usable.all()):
                reason = "the cache was changed since, or its columns now have other positions"
            generator.offset = torch.where(usable, context.offset, num_past)
            _write_context(generator, context, torch.where(usable, num_past - context.offset, 0))
        if reason:
            logger.warning_once(
                f"The draft's context of a cache passed in is left out, at least of some rows ({reason}): the draft "
                "sees the new tokens only, and accepts less. The text is not affected."
            )
        if not bool(generator.offset.any()):
            generator.offset = None

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
        """Advances the cache by what was decoded and attaches the draft's context. The run is over then.

        As after plain `generate`, there are columns for all tokens but the last one. `sequences`
        `[B, columns + longest answer]` are what `generate` returns; `verify` runs the target over `state.block`, which
        is overwritten, wherever an iterator of blocks says. The ragged cache is emptied layer by layer unless the
        buffers of both caches are kept for the next call. Returns how many forwards of the target it took.
        """
        num_columns = int(state.num_new.max()) - 1
        answer = torch.arange(num_columns, device=self.positions.device)
        first = self.positions[:, -1] + 1
        generator.flush()
        num_forwards = -(-int((state.num_new.max() - state.num_new).max()) // state.block.shape[1])
        if num_forwards:
            verify(self._padding(state, generator, sequences, num_forwards))
        positions = first[:, None] + answer
        new = torch.cat([self.positions, positions], dim=1)[:, int(self.cache.get_seq_length()) :]
        ragged.advance(RaggedBlock.at(first + num_columns, 1))
        for index, layer in enumerate(ragged.layers):
            if isinstance(layer, RecurrentLayer):
                self.cache.update_conv_state(layer.window, index)
                if layer.state is not None:
                    self.cache.update_recurrent_state(layer.state, index)
                continue
            assert isinstance(layer, RaggedLayer)
            if new.shape[1]:
                self.cache.update(*layer.read_rows(new), index)
            if not keeps_buffers:
                layer.release()
        # The draft has context for the token that ended a row, and for no padding after it.
        positions = positions.masked_fill(answer >= state.num_new[:, None], -1)
        self._attach_context(generator, torch.cat([self.positions, positions], dim=1), keeps_buffers)
        return num_forwards

    def _padding(
        self, state: DecodeState, generator: DFlashCandidateGenerator, sequences: Tensor, num_forwards: int
    ) -> Iterator[RaggedBlock]:
        """Feeds rows that ended before the last one what plain `generate` feeds them: their last token, then padding.

        Rows without anything to be fed run on behind their end.
        """
        width = state.block.shape[1]
        behind = state.num_new.max() - state.num_new
        offsets = torch.arange(width, device=sequences.device)
        for index in range(num_forwards):
            fed = behind.clamp_max(index * width) + state.num_new - 1
            columns = (state.columns + fed)[:, None] + offsets
            state.block.copy_(sequences.gather(1, columns.clamp_max(sequences.shape[1] - 1)))
            yield RaggedBlock.at(self.positions[:, -1] + 1 + fed, width)
            if index == 0:
                generator.flush()

    def _attach_context(self, generator: DFlashCandidateGenerator, positions: Tensor, keeps_buffers: bool) -> None:
        """Attaches a draft's context to the cache; `positions` `[B, C]` are those that there is context for."""
        holder: Any = self.cache
        holder.dflash_context = None
        if generator.verify_width < 2:  # it has drafted nothing and written nothing
            return
        buffers = [layer.buffers() for layer in generator.cache.attention.values()]
        if keeps_buffers:
            buffers = [(keys.clone(), values.clone()) for keys, values in buffers]
        lengths = (positions >= 0).sum(dim=1)
        offset = torch.zeros_like(lengths) if generator.offset is None else generator.offset
        layers: list[Any] = self.cache.layers
        attention = [index for index, one in enumerate(layers) if not isinstance(one, LinearAttentionLayer)]
        layer = ([index for index in attention if not layers[index].is_sliding] or attention)[-1]
        holder.dflash_context = DraftContext(
            draft=_names.setdefault(generator.draft, uuid.uuid4().hex),
            buffers=buffers,
            positions=positions,
            offset=offset.clone() if keeps_buffers else offset,
            # The draft's last blocks were written behind its context.
            newest=lengths - offset + max(generator.block_size, generator.verify_width) - 1,
            layer=layer,
            sample=stored_columns(layers[layer])[0][:, 0].clone(),
        )


def _snapshot(layer: Any) -> tuple[dict[str, Any], list[tuple[Tensor, Tensor]]]:
    """A layer's attributes, and copies of those tensors that an update changes in place."""
    held: dict[str, Any] = vars(layer)
    # States are kept in dicts of the layer's, which change in place too.
    copied: dict[str, Any] = {name: copy.copy(value) for name, value in held.items() if isinstance(value, dict)}
    attributes = {**held, **copied}
    volatile: list[Tensor] = []
    if isinstance(layer, LinearAttentionLayer):
        states = (*attributes["conv_states"].values(), *attributes["recurrent_states"].values())
        volatile = [state for state in states if state is not None]
    if isinstance(layer, StaticLayer):
        # Of a full layer, what lies beyond its length is scratch.
        names = ("keys", "values") if isinstance(layer, StaticSlidingWindowLayer) else ()
        volatile = [attributes[name] for name in ("cumulative_length", *names) if attributes[name] is not None]
    return attributes, [(tensor, tensor.clone()) for tensor in volatile]


def _usable_rows(
    context: DraftContext, generator: DFlashCandidateGenerator, past: Tensor, anchor: Tensor, num_same: Tensor
) -> Tensor:
    """Says which rows can go on with an attached context: bool `[B]`.

    Those whose real columns are as they were and have the indices they had, and of whose context no ring has lost
    anything that the next block sees, which begins at index `anchor` `[B]`.
    """
    num_columns = past.shape[1]
    offset = context.offset
    then = torch.full_like(past, -2)
    shared = min(num_columns, context.positions.shape[1])
    then[:, :shared] = context.positions[:, :shared]
    same = (then == past) & (torch.arange(num_columns, device=past.device) < num_same[:, None])
    # Padding needs no context, and neither does what the draft had none of before.
    usable = (same | (past < 0) | (past < offset[:, None])).all(dim=1)
    usable = usable & ((past >= 0).sum(dim=1) >= offset)
    for (keys, _), shape in zip(context.buffers, generator.draft.cache_shapes(), strict=True):
        if shape.window is not None:
            # Where a window counts from the anchor it reaches `window` tokens back, elsewhere one less.
            oldest = (anchor - offset - shape.window).clamp_min(0)
            usable = usable & (oldest > context.newest - keys.shape[1])
    return usable


def _write_context(generator: DFlashCandidateGenerator, context: DraftContext, length: Tensor) -> None:
    """Copies the first `length` `[B]` tokens of an attached context into a draft's cache."""
    device = generator.device
    length = length.to(device)[:, None]
    newest = context.newest.to(device)[:, None]
    for index, (keys, values) in enumerate(context.buffers):
        ring = keys.shape[1]
        positions = slot_positions(newest, torch.arange(ring, device=device), ring)
        positions = positions.masked_fill(positions >= length, -1)
        generator.cache.attention[index].write_rows(keys.to(device), values.to(device), PromptSlots(positions))
