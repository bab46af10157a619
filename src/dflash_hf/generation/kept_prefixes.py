"""Keys, values and states of texts that a running batch has decoded, for requests that begin with the same tokens.

The next turn of a conversation begins with the whole of the one before, and many conversations with one system prompt.
Their tokens need not go through the target again: keys and values of both caches are copied in, and the prefill goes
on behind them. Windows and states of recurrent layers are there for the end of a text alone. Tokens of images are the
same for all images: what these show has to be the same too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from dflash_hf.block.attention import RaggedBlock
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.cache.rows import newest_of_row, with_gap
from dflash_hf.errors import one_line
from dflash_hf.generation.prefill import Prefill
from dflash_hf.generation.prompt_images import PromptImage, PromptImages
from dflash_hf.generation.run import Run

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

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in (*self.windows.values(), *self.states.values()))

    def copied(self) -> RecurrentStates:
        """Returns copies."""
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

    def num_shared(self, prompt: Tensor, images: list[PromptImage]) -> int:
        """Returns how many of a prompt's first tokens `[n]` can be taken from here: the last one never is."""
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
        # In a window older keys are gone, and a state is that of the end: only from there can be gone on.
        if num_same < len(self.ids) and not self.is_whole:
            return 0
        return num_same

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
        num_bytes = _num_bytes(run.cache, length) + _num_bytes(run.generator.cache, length)
        num_bytes += RecurrentStates.of_row(run.cache, place).num_bytes
        if length < SHORTEST or num_bytes > self.max_bytes:
            return
        # The newest tokens are no context of the draft yet, and the states lack those that the last step has kept.
        run.generator.flush()
        run.cache.advance(RaggedBlock.at(run.state.lengths, 1))
        try:
            prefix = KeptPrefix(
                ids=torch.tensor(ids[:length], device="cpu"),
                images=images.images,
                target=_copies(run.cache, place, length),
                draft=_copies(run.generator.cache, place, length),
                states=RecurrentStates.of_row(run.cache, place).copied(),
            )
        # Rows that run need none of it.
        except torch.OutOfMemoryError as error:
            logger.warning_once(f"The text of a row is not kept for others: {one_line(error)}")
            return
        # What is the beginning of this text is of no more use.
        self.kept = [one for one in self.kept if not prefix.begins_with(one)]
        self.kept.append(prefix)
        # The text itself fits, so that it is never the one that goes.
        while self.num_bytes > self.max_bytes:
            del self.kept[0]

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
        prompt = begun.generator.request.input_ids[0].cpu()
        shared = [one.num_shared(prompt, images.images) for one in self.kept]
        num = max(shared, default=0)
        if num < SHORTEST:
            return 0
        # What was used now is the last to go.
        index = shared.index(num)
        prefix = self.kept.pop(index)
        self.kept.append(prefix)
        states = prefix.states
        begun.filling.go_on_from(
            num, prefix.first(prefix.target, num), states.windows, states.states
        )
        context = prefix.first(prefix.draft, num)
        begun.generator.take_context(list(context.values()))
        return num


def _copies(cache: RaggedCache, place: int, length: int) -> Pairs:
    """Returns copies of the keys and values of a row's first `length` tokens in every layer."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for index, layer in cache.attention.items():
        # Slots of a ring that are out of the window may hold rejected tokens.
        num = length if layer.shape.window is None else min(length, layer.shape.window)
        keys, values = (newest_of_row(buffer[place], length, num) for buffer in layer.buffers())
        found[index] = (keys, values)
    return found


def _num_bytes(cache: RaggedCache, length: int) -> int:
    """Returns the size of [`_copies`] in bytes."""
    return sum(layer.shape.num_bytes(1, length, 0) for layer in cache.attention.values())
