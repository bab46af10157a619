"""Keys, values and states of texts that a running batch has decoded, for requests that begin with the same tokens.

The next turn of a conversation begins with the whole of the one before, and many conversations with one system prompt.
Their tokens need not go through the target again: keys and values of both caches are copied in, and the prefill goes
on behind them. Windows and states of recurrent layers are there for the end of a text alone. So a prefill that has the
beginning of a kept text, and cannot go on from the middle of it, stops behind this beginning once: what is there then
is kept too. Tokens of images are the same for all images: what these show has to be the same too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.utils import logging

from dflash_hf.block.attention import RaggedBlock
from dflash_hf.cache.prefilled import stored_columns
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.cache.rows import newest_of_row, with_gap
from dflash_hf.errors import one_line
from dflash_hf.generation.model_state import ModelState
from dflash_hf.generation.prefill import Prefill
from dflash_hf.generation.prompt_images import PromptImage, PromptImages
from dflash_hf.generation.run import Run
from dflash_hf.target_model.parts import Target

logger: Any = logging.get_logger(__name__)
# Fewer tokens are sooner computed than looked up.
SHORTEST = 16

# Of layers, by their index: keys and values `[n, G, E]`, or `[1, G, n, E]` as caches of Transformers take them.
Pairs = Mapping[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentStates:
    """Windows and states of one row's recurrent layers, by their index; a layer may have a window alone."""

    windows: dict[int, Tensor]  # [1, C, k]
    states: dict[int, Tensor]  # [1, ...]

    @classmethod
    def of_row(cls, cache: RaggedCache, place: int) -> RecurrentStates:
        """Returns views of a row's, at a place of a cache."""
        one = slice(place, place + 1)
        found = cls({}, {})
        for group in cache.groups:
            for slot, index in enumerate(group.indices):
                found.windows[index] = group.windows[slot, one]
                if group.states is not None:
                    found.states[index] = group.states[slot, one]
        return found

    @classmethod
    def of_filled(cls, filled: Cache, indices: Collection[int]) -> RecurrentStates:
        """Returns views of those of a prefill's only row."""
        found = cls({}, {})
        for index in indices:
            layer: Any = filled.layers[index]
            found.windows[index] = layer.conv_states[0]
            state = layer.recurrent_states[0]
            if state is not None:
                found.states[index] = state
        return found

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in (*self.windows.values(), *self.states.values()))

    def copied(self) -> RecurrentStates:
        """Returns the same states in tensors of their own."""
        windows = {index: window.clone() for index, window in self.windows.items()}
        states = {index: state.clone() for index, state in self.states.items()}
        return RecurrentStates(windows, states)


@dataclass(frozen=True, slots=True, eq=False)
class KeptPrefix:
    """A text whose keys, values and states are kept."""

    ids: Tensor  # [n], int64, on the host
    images: list[PromptImage]
    # Keys and values `[m, G, E]` of each layer: of all tokens, or of the newest `m` in a window.
    target: Pairs
    draft: Pairs
    states: RecurrentStates  # of the target's recurrent layers, behind the last token
    is_shared: bool  # whether it is the beginning of several texts

    @classmethod
    def of_row(cls, run: Run, place: int, ids: Sequence[int], images: PromptImages) -> KeptPrefix:
        """Returns copies of a row's first tokens, those that are in the caches of its run.

        Arguments as of [`KeptPrefixes.keep`]; context and states have to be there up to the last of them.
        """
        length = run.rows.reported.lengths[place]
        return cls(
            ids=torch.tensor(ids[:length], device="cpu"),
            images=images.images,
            target=_copies(run.cache, place, length),
            draft=_copies(run.generator.draft_cache, place, length),
            states=RecurrentStates.of_row(run.cache, place).copied(),
            is_shared=False,
        )

    @classmethod
    def of_prefill(cls, begun: Prefill, images: PromptImages) -> KeptPrefix:
        """Returns copies of the tokens of a single prompt that the target has seen, which other texts begin with."""
        num = begun.filling.seen
        filled = begun.filling.cache
        recurrences = begun.generator.request.target.recurrences
        prompt = begun.generator.request.input_ids[0, :num]
        return cls(
            ids=prompt.cpu(),
            images=[image for image in images.images if image.first < num],
            target=_copies_of_filled(filled, recurrences),
            draft=_copies(begun.generator.draft_cache, 0, num),
            states=RecurrentStates.of_filled(filled, recurrences).copied(),
            is_shared=True,
        )

    @property
    def num_bytes(self) -> int:
        """Size of the copies in bytes."""
        pairs = [*self.target.values(), *self.draft.values()]
        num_bytes = sum(keys.nbytes + values.nbytes for keys, values in pairs)
        return num_bytes + self.states.num_bytes

    @property
    def is_whole(self) -> bool:
        """Whether there are keys of every token in every layer of the target, so that a part of the text will do."""
        has_all_keys = all(len(keys) == len(self.ids) for keys, _ in self.target.values())
        return has_all_keys and not self.states.windows

    def num_same(self, prompt: Tensor, images: list[PromptImage]) -> int:
        """Returns how many of a prompt's first tokens `[n]` are the same here; the last one does not count."""
        # The last token goes through the target in any case: its logits give the first token of the answer.
        longest = min(len(self.ids), len(prompt) - 1)
        is_same = self.ids[:longest] == prompt[:longest]
        num_same = int(is_same.long().cumprod(dim=0).sum())
        # What stands behind an image that only one of the two has follows from it.
        only_of_one = {*self.images} ^ {*images}
        num_same = min([num_same, *(image.first for image in only_of_one)])
        # An image goes through the target as a whole.
        for image in images:
            if image.first < num_same < image.end:
                num_same = image.first
        return num_same

    def goes_on_behind(self, num: int) -> bool:
        """Returns True if a prefill can begin behind the first `num` tokens."""
        # In a window older keys are gone, and a state is that of the end: only from there can be gone on.
        return num == len(self.ids) or self.is_whole

    def begins_with(self, other: KeptPrefix) -> bool:
        """Returns True if this text begins with all of another one, and shows the same."""
        num = len(other.ids)
        has_tokens = num <= len(self.ids) and bool((self.ids[:num] == other.ids).all())
        images = [image for image in self.images if image.first < num]
        return has_tokens and images == other.images

    def first(self, kept: Pairs, num: int) -> Pairs:
        """Returns `target` or `draft` of the first `num` tokens: `[1, G, num, E]`, zeros where nothing is kept."""
        length = len(self.ids)
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for index, (keys, values) in kept.items():
            first_keys = with_gap(keys, length)[:, :, :num]
            first_values = with_gap(values, length)[:, :, :num]
            found[index] = (first_keys, first_values)
        return found


class KeptPrefixes:
    """The texts that were used last, within a budget of memory.

    Args:
        max_bytes (`int`): Size of all copies, at most; 0 keeps none.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        # The least recently used ones first.
        self.kept: list[KeptPrefix] = []
        # What the target is that has computed them; none before the first request.
        self.state: ModelState | None = None

    def look_at(self, target: Target, is_alone: bool) -> None:
        """Drops all texts where the target is not the one any more that has computed them.

        Args:
            target (`Target`): The target as it is now.
            is_alone (`bool`): Whether no row runs: all weights are read then. Nobody changes them below a row.
        """
        if not self.max_bytes:
            return
        if self.state is not None and self.state.is_of(target, reads_weights=is_alone):
            return
        self.state = ModelState.of(target)
        if self.drop_all():
            logger.warning_once(
                "The target has changed, so the keys and values of earlier texts are not used any more"
            )

    def keep(self, run: Run, place: int, ids: Sequence[int], images: PromptImages) -> None:
        """Keeps the first tokens of the row at a place of a run, those that are in its caches.

        Args:
            run (`Run`): The run, between two steps.
            place (`int`): The row's.
            ids (sequence of `int`): The row's text, one token longer at least.
            images (`PromptImages`): Those of its prompt.
        """
        length = run.rows.reported.lengths[place]
        # Looked at before anything is copied: a text that is too long would push all others out.
        num_bytes = _num_bytes(run.cache, length) + _num_bytes(run.generator.draft_cache, length)
        num_bytes += RecurrentStates.of_row(run.cache, place).num_bytes
        if length < SHORTEST or num_bytes > self.max_bytes:
            return
        # The newest tokens are no context of the draft yet, and the states lack those that the last step has kept.
        # An error here is the run's: it may have moved some of its states on.
        run.generator.flush()
        run.cache.advance(RaggedBlock.at(run.state.lengths, 1))
        self._add(partial(KeptPrefix.of_row, run, place, ids, images))

    def keep_shared(self, begun: Prefill, images: PromptImages) -> None:
        """Keeps the tokens of a single prompt that the target has seen: those of [`num_to_share`]."""
        self._add(partial(KeptPrefix.of_prefill, begun, images))

    def _add(self, copied: Callable[[], KeptPrefix]) -> None:
        """Keeps a text, of which copies are made here, and drops others for it."""
        try:
            prefix = copied()
        # Rows that run need none of it.
        except torch.OutOfMemoryError as error:
            logger.warning_once(f"The text of a row is not kept for others: {one_line(error)}")
            return
        beginnings = [one for one in self.kept if prefix.begins_with(one)]
        shared = [one for one in beginnings if one.is_shared]
        # What is the beginning of this text alone is of no more use.
        self.kept = [one for one in self.kept if one.is_shared or one not in beginnings]
        # Many texts go on from a shared beginning, and few from the end of a text: so it outlives those that have
        # ended before this one. Only the longest is used by this text.
        if shared:
            longest = max(shared, key=lambda one: len(one.ids))
            self._use(longest)
        self.kept.append(prefix)
        # The text itself fits, so that it is never the one that goes. A shared beginning is shorter than a text that
        # has fitted.
        while self.num_bytes > self.max_bytes:
            del self.kept[0]

    def _use(self, prefix: KeptPrefix) -> None:
        """Makes a kept text the last to go."""
        self.kept.remove(prefix)
        self.kept.append(prefix)

    @property
    def num_bytes(self) -> int:
        """Size of all copies in bytes."""
        return sum(one.num_bytes for one in self.kept)

    def drop_all(self) -> bool:
        """Gives back the memory of all copies; returns False if there are none."""
        had_any = bool(self.kept)
        self.kept.clear()
        return had_any

    def go_on(self, begun: Prefill, images: PromptImages) -> int:
        """Has a prefill begin behind the tokens that are kept of its prompt; returns how many these are."""
        nums_same = self._nums_same(begun, images)
        usable = {
            num_same: prefix
            for prefix, num_same in zip(self.kept, nums_same, strict=True)
            if prefix.goes_on_behind(num_same)
        }
        num = max(usable, default=0)
        if num < SHORTEST:
            return 0
        prefix = usable[num]
        # What was used now is the last to go.
        self._use(prefix)
        states = prefix.states
        begun.filling.go_on_from(
            num, prefix.first(prefix.target, num), states.windows, states.states
        )
        context = prefix.first(prefix.draft, num)
        begun.generator.take_context(list(context.values()))
        return num

    def num_to_share(self, begun: Prefill, images: PromptImages) -> int:
        """Returns how many first tokens of a single prompt to keep once the target has seen them; 0 for none.

        A kept text begins with the same tokens, and [`go_on`], which comes before this, could not go on behind them.
        """
        longest = max(self._nums_same(begun, images), default=0)
        num_gained = longest - begun.filling.seen
        return longest if num_gained >= SHORTEST else 0

    def _nums_same(self, begun: Prefill, images: PromptImages) -> list[int]:
        """Returns, for each kept text, how many of a prompt's first tokens are the same."""
        prompt = begun.generator.request.input_ids[0].cpu()
        return [one.num_same(prompt, images.images) for one in self.kept]


def _copies(cache: RaggedCache, place: int, length: int) -> Pairs:
    """Returns copies of the keys and values of a row's first `length` tokens in every layer."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for index, layer in cache.attention.items():
        # Slots of a ring that are out of the window may hold rejected tokens.
        num = length if layer.shape.window is None else min(length, layer.shape.window)
        keys, values = (newest_of_row(buffer[place], length, num) for buffer in layer.buffers())
        found[index] = (keys, values)
    return found


def _copies_of_filled(filled: Cache, recurrent: Collection[int]) -> Pairs:
    """Returns copies of the keys and values of a prefill's only row, in every layer that is not recurrent."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for index, layer in enumerate(filled.layers):
        if index in recurrent:
            continue
        # A layer with a window has its newest tokens alone, as many as the next token looks at.
        pair = stored_columns(layer)
        keys, values = (
            states[0].transpose(0, 1).clone(memory_format=torch.contiguous_format)
            for states in pair
        )
        found[index] = (keys, values)
    return found


def _num_bytes(cache: RaggedCache, length: int) -> int:
    """Returns the size of [`_copies`] in bytes."""
    return sum(layer.shape.num_bytes(1, length, 0) for layer in cache.attention.values())
