"""This module divides the batches of an epoch, and the examples of an evaluation, among the processes."""

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
    """Yields one process's batches of an epoch. Their order depends only on the seed and the epoch.

    Batch `i` of an epoch goes to process `i % world_size`, so a step of several processes has the batches that one
    process would accumulate. If an epoch ends before every process has its batch, the other processes get rows without
    labels (`~i` for row `i`). So every process takes part in every step, and no row counts twice. Processes that hold
    one target together count as one process, and get the same batches.

    Args:
        batches_of (callable): Returns the batches of all processes for an epoch. Each epoch has the same number of
            batches. See [`epoch_batches`].
        args ([`DFlashTrainingArguments`]): Their `group_index`, `num_groups` and `gradient_accumulation_steps` are
            used.
        next_step (callable): Returns the number of steps done. The epoch follows from this number, so a resumed run
            gets the right epoch.
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
    """Returns the row for an index: `row`, or `~row` without labels. `~row` is negative for row 0 too."""
    return index if index >= 0 else ~index


class Rows:
    """A data set that returns `(index, example)`. The index `~i` returns example `i`, to be used without labels."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> tuple[int, Example]:
        return index, self.examples[row_of(index)]


class Collator:
    """Collates items of [`Rows`] into the inputs of [`DFlashTrainer.compute_loss`].

    The inputs are `batch`, `features`, the indices of the examples (`rows`), and the numbers of examples and of their
    tokens without padding (`num_rows`, `num_tokens`). Rows without labels are not counted.

    Args:
        packing_length (`int`, *optional*): The number of tokens in a row into which examples are packed.
        cache ([`FeatureCache`], *optional*): The cache from which the target's features of the examples are read. The
            loader's workers read it during a step.
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
    """Returns the examples of one process: every `world_size`-th by length, so that all processes have equal work."""
    if world_size == 1:
        return examples
    lengths = example_lengths(examples)
    indices = sorted(range(len(lengths)), key=lambda index: lengths[index])[rank::world_size]
    share: Any = Subset(examples, indices)  # type: ignore[arg-type]
    share.lengths = [lengths[index] for index in indices]
    return share
