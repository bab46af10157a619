"""This module keeps the keys, values and states of decoded texts, for requests that begin with the same tokens.

The next turn of a conversation begins with the whole turn before it. Many conversations begin with the same system
prompt. The target need not compute these tokens again: their keys and values in both caches are copied, and the
prefill continues after them. Of a layer with a window, only the newest keys and values are kept, and of a recurrent
layer, only the states after the last token. If target or draft has such layers, a prefill can continue only after the
last token of a kept text, and not from its middle. If a prompt begins like a kept text but cannot continue from it,
its prefill stops once after the tokens that both have in common, and these tokens are kept as a text of their own. All
images have the same tokens, so the images are compared as well.
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
from dflash_hf.generation.request import Request
from dflash_hf.generation.run import Run

logger: Any = logging.get_logger(__name__)
# Computing fewer tokens is faster than copying them.
SHORTEST = 16

# Keys and values of layers, by the layer's index: `[n, G, E]`, or `[1, G, n, E]` as Transformers' caches take them.
Pairs = Mapping[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentStates:
    """Windows and states of one row's recurrent layers, by the layer's index. A layer may have only a window."""

    windows: dict[int, Tensor]  # [1, C, k]
    states: dict[int, Tensor]  # [1, ...]

    @classmethod
    def of_row(cls, cache: RaggedCache, place: int) -> RecurrentStates:
        """Returns views of the windows and states of the row at a place of a cache."""
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
        """Returns views of the windows and states of a prefill's only row."""
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
        """Returns the same windows and states in new tensors."""
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
    states: RecurrentStates  # of the target's recurrent layers, after the last token
    is_shared: bool  # whether several texts begin with it

    @classmethod
    def of_row(cls, run: Run, place: int, ids: Sequence[int], images: PromptImages) -> KeptPrefix:
        """Returns copies of a row's first tokens: the tokens that are in the caches of its run.

        The arguments are those of [`KeptPrefixes.keep`]. Context and states must include the last of these tokens.
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
        """Returns copies of the tokens of a single prompt that the target has computed, for texts that begin alike."""
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
        """Whether every layer of both models has the keys of every token, so that any part of the text can be used."""
        pairs = [*self.target.values(), *self.draft.values()]
        has_all_keys = all(len(keys) == len(self.ids) for keys, _ in pairs)
        return has_all_keys and not self.states.windows

    def num_same(self, prompt: Tensor, images: list[PromptImage]) -> int:
        """Returns how many of a prompt's first tokens `[n]` are the same here, without the prompt's last token."""
        # The last token goes through the target in any case: its logits give the first token of the answer.
        longest = min(len(self.ids), len(prompt) - 1)
        is_same = self.ids[:longest] == prompt[:longest]
        num_same = int(is_same.long().cumprod(dim=0).sum())
        # If only one of the two texts has an image, all tokens after this image depend on it.
        only_of_one = {*self.images} ^ {*images}
        num_same = min([num_same, *(image.first for image in only_of_one)])
        # The target computes an image as a whole.
        for image in images:
            if image.first < num_same < image.end:
                num_same = image.first
        return num_same

    def goes_on_behind(self, num: int) -> bool:
        """Returns True if a prefill can continue after the first `num` tokens."""
        # A window has lost its older keys, and a state is the state after the last token.
        return num == len(self.ids) or self.is_whole

    def begins_with(self, other: KeptPrefix) -> bool:
        """Returns True if this text begins with the whole of another text, with the same images."""
        num = len(other.ids)
        has_tokens = num <= len(self.ids) and bool((self.ids[:num] == other.ids).all())
        images = [image for image in self.images if image.first < num]
        return has_tokens and images == other.images

    def first(self, kept: Pairs, num: int) -> Pairs:
        """Returns `target` or `draft` for the first `num` tokens: `[1, G, num, E]`, zeros where nothing is kept."""
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
        max_bytes (`int`): Maximum size of all copies; 0 keeps none.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        # The least recently used text is the first.
        self.kept: list[KeptPrefix] = []
        # The state of the models that have computed the texts; `None` before the first request.
        self.state: ModelState | None = None

    def look_at(self, request: Request, is_alone: bool) -> None:
        """Drops all texts if target or draft have changed since they computed them.

        Args:
            request (`Request`): A request, with the models as they are now.
            is_alone (`bool`): Whether no row runs. Only then are all weights read, because nobody changes weights
                while a row runs.
        """
        if not self.max_bytes:
            return
        if self.state is not None and self.state.is_of(request, reads_weights=is_alone):
            return
        self.state = ModelState.of(request)
        if self.drop_all():
            logger.warning_once(
                "The target or the draft has changed, so the keys and values of earlier texts are not used any more"
            )

    def keep(self, run: Run, place: int, ids: Sequence[int], images: PromptImages) -> None:
        """Keeps the first tokens of the row at a place of a run: the tokens that are in its caches.

        Args:
            run (`Run`): The run, between two steps.
            place (`int`): The place of the row.
            ids (sequence of `int`): The row's text, which is at least one token longer.
            images (`PromptImages`): The images of the row's prompt.
        """
        length = run.rows.reported.lengths[place]
        # The size is tested before anything is copied, because a text that is too long would push out all others.
        num_bytes = _num_bytes(run.cache, length) + _num_bytes(run.generator.draft_cache, length)
        num_bytes += RecurrentStates.of_row(run.cache, place).num_bytes
        if length < SHORTEST or num_bytes > self.max_bytes:
            return
        # The newest tokens are not in the draft's context yet, and the recurrent states lack the tokens of the last
        # step. An error here concerns the whole run, because some of its states may have changed already.
        run.generator.flush()
        run.cache.advance(RaggedBlock.at(run.state.lengths, 1))
        self._add(partial(KeptPrefix.of_row, run, place, ids, images))

    def keep_shared(self, begun: Prefill, images: PromptImages) -> None:
        """Keeps the tokens of a single prompt that the target has computed: the tokens of [`num_to_share`]."""
        self._add(partial(KeptPrefix.of_prefill, begun, images))

    def _add(self, copied: Callable[[], KeptPrefix]) -> None:
        """Keeps the text that `copied` returns, and drops other texts to make room for it."""
        try:
            prefix = copied()
        # The running rows do not need these copies, so they continue.
        except torch.OutOfMemoryError as error:
            logger.warning_once(f"The text of a row is not kept for others: {one_line(error)}")
            return
        beginnings = [one for one in self.kept if prefix.begins_with(one)]
        shared = [one for one in beginnings if one.is_shared]
        # A text that is the beginning of only this text is not useful any more.
        self.kept = [one for one in self.kept if one.is_shared or one not in beginnings]
        # Many texts begin with a shared beginning, and few with a whole text. So the shared beginning is kept longer
        # than texts that ended before this one. This text uses only the longest of its shared beginnings.
        if shared:
            longest = max(shared, key=lambda one: len(one.ids))
            self._use(longest)
        self.kept.append(prefix)
        # The new text itself fits, so this loop never removes it. A shared beginning is shorter than such a text.
        while self.num_bytes > self.max_bytes:
            del self.kept[0]

    def _use(self, prefix: KeptPrefix) -> None:
        """Marks a kept text as the most recently used one."""
        self.kept.remove(prefix)
        self.kept.append(prefix)

    @property
    def num_bytes(self) -> int:
        """Size of all copies in bytes."""
        return sum(one.num_bytes for one in self.kept)

    def drop_all(self) -> bool:
        """Frees the memory of all copies; returns False if there are none."""
        had_any = bool(self.kept)
        self.kept.clear()
        return had_any

    def go_on(self, begun: Prefill, images: PromptImages) -> int:
        """Lets a prefill begin after the tokens of its prompt that are kept; returns the number of these tokens."""
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
        # The text that was used now is the last one to be dropped.
        self._use(prefix)
        states = prefix.states
        begun.filling.go_on_from(
            num, prefix.first(prefix.target, num), states.windows, states.states
        )
        context = prefix.first(prefix.draft, num)
        begun.generator.take_context(list(context.values()))
        return num

    def num_to_share(self, begun: Prefill, images: PromptImages) -> int:
        """Returns the number of a prompt's first tokens to keep after the target has computed them; 0 for none.

        A kept text begins with these tokens, but [`go_on`], which is called before, could not continue after them.
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
        # Slots of a ring outside the window may hold rejected tokens.
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
        # A layer with a window holds only its newest tokens: as many as the next token attends to.
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
