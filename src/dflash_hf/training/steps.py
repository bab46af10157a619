"""Which rows a step is made of: batches of similar length, dealt out to processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import TrainingArguments

from dflash_hf.training.collators import collate
from dflash_hf.training.data import Example


class EpochBatches(Sampler[list[int]]):
    """One process's batches of an epoch, in an order that follows from the seed and the epoch alone.

    Batch `i` of an epoch goes to process `i % world_size`, so a step over several processes has the batches that one
    process would accumulate. Where an epoch ends before every process has its batch, the others get rows without
    labels (`~i` for row `i`): every process takes part in every step, and no row counts twice.

    Args:
        batches_of (callable): From an epoch to all processes' batches, as many in every one: see [`epoch_batches`].
        args (`TrainingArguments`): Say which process this is, of how many, and how many batches it accumulates.
        next_step (callable): The number of steps done, from which the epoch follows; so a resumed run asks for the
            right one.
    """

    def __init__(
        self, batches_of: Callable[[int], list[list[int]]], args: TrainingArguments, next_step: Callable[[], int]
    ) -> None:
        self.batches_of, self.args, self.next_step = batches_of, args, next_step
        self.num_batches = len(batches_of(0))

    def __len__(self) -> int:
        return math.ceil(self.num_batches / self.args.world_size)

    def __iter__(self) -> Iterator[list[int]]:
        steps_per_epoch = math.ceil(len(self) / self.args.gradient_accumulation_steps)
        batches, world_size = self.batches_of(self.next_step() // steps_per_epoch), self.args.world_size
        for at in range(self.args.process_index, len(self) * world_size, world_size):
            yield batches[at] if at < len(batches) else [~index for index in batches[0]]


class Rows:
    """Examples with their numbers; `~i` stands for row `i` without labels."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> tuple[int, Example]:
        return index, self.examples[index if index >= 0 else ~index]


class Collator:
    """Makes of numbered examples what `Trainer` hands on: `batch`."""

    def __call__(self, rows: Sequence[tuple[int, Example]]) -> dict[str, Any]:
        batch = collate([example for _, example in rows])
        if rows[0][0] < 0:
            batch = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
        return {"batch": batch}
