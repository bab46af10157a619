"""Which rows a step is made of: batches of similar length, dealt out to processes; and shares of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Sampler, Subset

from dflash_hf.training.arguments import DFlashTrainingArguments
from dflash_hf.training.collators import collate, collate_packed
from dflash_hf.training.example import Example, example_lengths
from dflash_hf.training.features import FeatureCache


class EpochBatches(Sampler[list[int]]):
    """One process's batches of an epoch, in an order that follows from the seed and the epoch alone.

    Batch `i` of an epoch goes to process `i % world_size`, so a step over several processes has the batches that one
    process would accumulate. Where an epoch ends before every process has its batch, the others get rows without
    labels (`~i` for row `i`): every process takes part in every step, and no row counts twice. Processes that hold one
    target together count as one, and have the same batches.

    Args:
        batches_of (callable): From an epoch to all processes' batches, as many in every one: see [`epoch_batches`].
        args ([`DFlashTrainingArguments`]): Say which process this is, of how many, and how many batches it
            accumulates.
        next_step (callable): The number of steps done, from which the epoch follows; so a resumed run asks for the
            right one.
    """

    def __init__(
        self,
        batches_of: Callable[[int], list[list[int]]],
        args: DFlashTrainingArguments,
        next_step: Callable[[], int],
    ) -> None:
        self.batches_of = batches_of
        self.args = args
        self.next_step = next_step
        self.num_batches = len(batches_of(0))

    def __len__(self) -> int:
        return math.ceil(self.num_batches / self.args.num_groups)

    def __iter__(self) -> Iterator[list[int]]:
        steps_per_epoch = math.ceil(len(self) / self.args.gradient_accumulation_steps)
        batches = self.batches_of(self.next_step() // steps_per_epoch)
        num_groups = self.args.num_groups
        for at in range(self.args.group_index, len(self) * num_groups, num_groups):
            if at < len(batches):
                yield batches[at]
            else:
                yield [~index for index in batches[0]]


def row_of(index: int) -> int:
    """Returns the row that a number stands for; `~row` is negative, so that row 0 without labels has a number too."""
    return index if index >= 0 else ~index


class Rows:
    """Examples with their numbers; `~i` stands for row `i` without labels."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> tuple[int, Example]:
        return index, self.examples[row_of(index)]


class Collator:
    """Makes of numbered examples what `Trainer` hands on: `batch`, their numbers as `rows`, and `features`.

    `num_rows` and `num_tokens` count the examples and their tokens, without padding. Rows without labels are not
    counted.

    Args:
        packing_length (`int`, *optional*): Tokens of a row that examples are packed into.
        cache ([`FeatureCache`], *optional*): Where the target's features of the examples are read; by the loader's
            workers, while a step is under way.
    """

    def __init__(
        self, packing_length: int | None = None, cache: FeatureCache | None = None
    ) -> None:
        self.packing_length = packing_length
        self.cache = cache

    def __call__(self, rows: Sequence[tuple[int, Example]]) -> dict[str, Any]:
        examples = [example for _, example in rows]
        if self.packing_length is None:
            batch = collate(examples)
        else:
            batch = collate_packed(examples, self.packing_length)
        features = None
        if self.cache is not None:
            features = self.cache.read(examples, batch)
        num_rows = len(rows)
        num_tokens = int(batch.attention_mask.sum())
        if rows[0][0] < 0:
            batch = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
            num_rows = 0
            num_tokens = 0
        return {
            "batch": batch,
            "features": features,
            "rows": [row_of(index) for index, _ in rows],
            "num_rows": num_rows,
            "num_tokens": num_tokens,
        }


def share_of(examples: Sequence[Example], rank: int, world_size: int) -> Sequence[Example]:
    """Returns the examples of one process: every `world_size`-th by length, so that all have as much to do."""
    if world_size == 1:
        return examples
    lengths = example_lengths(examples)
    indices = sorted(range(len(lengths)), key=lambda index: lengths[index])[rank::world_size]
    share: Any = Subset(examples, indices)  # type: ignore[arg-type]
    share.lengths = [lengths[index] for index in indices]
    return share
