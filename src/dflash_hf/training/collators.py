"""Batches: padded rows of similar length, or rows full of examples, in an order of seed and epoch alone."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from dflash_hf.errors import require
from dflash_hf.training.data import Example

# A batch is cut from a sorted pool of this many batches: similar lengths, and still a different mix every epoch.
POOL_BATCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Padded examples; `B` rows, `S` tokens.

    Args:
        input_ids (`torch.Tensor` of shape `[B, S]`, int64): Tokens.
        attention_mask (`torch.Tensor` of shape `[B, S]`, bool): Real tokens.
        loss_mask (`torch.Tensor` of shape `[B, S]`, bool): Tokens that the target wrote.
        model_inputs (`dict[str, torch.Tensor]`): What else the target's forward takes (images ...).
        starts (`torch.Tensor` of shape `[B, S]`, int64, *optional*): The column at which each token's example begins,
            where rows hold several, one after another; padding begins where the last one ends. `None` where every row
            is one example.
    """

    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    model_inputs: dict[str, Tensor] = field(default_factory=dict)
    starts: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """Returns the same batch on another device."""
        return Batch(
            input_ids=self.input_ids.to(device),
            attention_mask=self.attention_mask.to(device),
            loss_mask=self.loss_mask.to(device),
            model_inputs={name: value.to(device) for name, value in self.model_inputs.items()},
            starts=None if self.starts is None else self.starts.to(device),
        )

    @property
    def position_ids(self) -> Tensor:
        """Index of each token in its example: int64 of shape `[B, S]`."""
        columns = torch.arange(self.input_ids.shape[1], device=self.input_ids.device).expand(self.input_ids.shape)
        return columns if self.starts is None else columns - self.starts


def collate(
    examples: Sequence[Example], pad_token_id: int = 0, *, padding_side: Literal["left", "right"] = "right"
) -> Batch:
    """Pads examples to the longest of them; text and any number of images may be mixed.

    Inputs per token are padded with the rows, by 0 (text). The others are joined along their first dimension, padded
    with zeros in the others: that is how processors lay out images of several rows, of different sizes too.
    """
    shape = (len(examples), max(len(example.input_ids) for example in examples))
    input_ids = torch.full(shape, pad_token_id, dtype=torch.long, device="cpu")
    attention_mask, loss_mask = (torch.zeros(shape, dtype=torch.bool, device="cpu") for _ in range(2))
    columns: list[slice] = []
    for row, example in enumerate(examples):
        length = len(example.input_ids)
        columns.append(slice(0, length) if padding_side == "right" else slice(shape[1] - length, shape[1]))
        input_ids[row, columns[row]] = torch.tensor(example.input_ids, dtype=torch.long, device="cpu")
        attention_mask[row, columns[row]] = True
        loss_mask[row, columns[row]] = torch.tensor(example.loss_mask, dtype=torch.bool, device="cpu")
    names = dict.fromkeys(name for example in examples for name in example.model_inputs)
    return Batch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        loss_mask=loss_mask,
        model_inputs={name: _join(examples, name, shape, columns) for name in names},
    )


def collate_packed(examples: Sequence[Example], max_length: int, pad_token_id: int = 0) -> Batch:
    """Fills rows of at most `max_length` tokens with examples, in their order; rows are padded on the right.

    Args:
        examples (sequence of [`Example`]): Of text.
        max_length (`int`): Tokens of a row.
        pad_token_id (`int`): Fills rows up.

    Raises:
        ValueError: If an example is longer, or has inputs beside its tokens (images ...).
    """
    rows: list[Example] = []
    starts: list[list[int]] = []
    for index, example in enumerate(examples):
        what = "examples of text alone to pack"
        require(not example.model_inputs, what, sorted(example.model_inputs), f"leave example {index} unpacked")
        length = len(example.input_ids)
        _check_room(length, max_length, index)
        if not rows or len(rows[-1].input_ids) + length > max_length:
            rows.append(Example(input_ids=[], loss_mask=[]))
            starts.append([])
        last = rows[-1]
        starts[-1] += [len(last.input_ids)] * length
        rows[-1] = Example(
            input_ids=[*last.input_ids, *example.input_ids], loss_mask=[*last.loss_mask, *example.loss_mask]
        )
    batch = collate(rows, pad_token_id)
    width = batch.input_ids.shape[1]
    filled = [[*row, *[len(row)] * (width - len(row))] for row in starts]
    return replace(batch, starts=torch.tensor(filled, dtype=torch.long, device="cpu"))


def _check_room(length: int, max_length: int, index: int) -> None:
    what = f"examples of at most {max_length} tokens to pack"
    require(length <= max_length, what, length, f"cut or drop example {index}, or pack longer rows")


def best_fit(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Fills rows of `max_length` tokens: the longest example first, each into the fullest row that has room for it.

    Args:
        lengths (sequence of `int`): Tokens of each example.
        max_length (`int`): Tokens of a row.

    Returns:
        `list[list[int]]`: Indices of the examples of each row.

    Raises:
        ValueError: If an example is longer than a row.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # room and row, the fullest first
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        _check_room(lengths[index], max_length, index)
        place = bisect.bisect_left(free, (lengths[index], -1))
        room, row = free.pop(place) if place < len(free) else (max_length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        bisect.insort(free, (room - lengths[index], row))
    return rows


def packed_batches(lengths: Sequence[int], batch_size: int, max_length: int, seed: int, epoch: int) -> list[list[int]]:
    """Splits an epoch into batches that [`collate_packed`] makes at most `batch_size` full rows of.

    Every example occurs once. Rows are filled by best fit; at whichever of their examples the collator goes on to a
    new row, what is left of that row fits into it.

    Args:
        lengths (sequence of `int`): Tokens of each example.
        batch_size (`int`): Rows per batch.
        max_length (`int`): Tokens of a row.
        seed, epoch (`int`): What the order depends on, and all that it depends on.

    Returns:
        `list[list[int]]`: Indices of the examples of each batch.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    order = torch.randperm(len(lengths), generator=generator, device="cpu").tolist()
    rows = [[order[at] for at in row] for row in best_fit([lengths[index] for index in order], max_length)]
    mixed = torch.randperm(len(rows), generator=generator, device="cpu").tolist()
    return [
        [index for row in mixed[at : at + batch_size] for index in rows[row]] for at in range(0, len(rows), batch_size)
    ]


def _join(examples: Sequence[Example], name: str, shape: tuple[int, int], columns: Sequence[slice]) -> Tensor:
    """One of a batch's other inputs: `[B, S]` if it has a value per token, else all examples' one after another."""
    present = [
        (row, e.model_inputs[name], len(e.input_ids)) for row, e in enumerate(examples) if name in e.model_inputs
    ]
    if any(value.shape != (length,) for _, value, length in present):
        return _concatenate([value for _, value, _ in present])
    joined = torch.zeros(shape, dtype=present[0][1].dtype, device="cpu")
    for row, value, _ in present:
        joined[row, columns[row]] = value
    return joined


def _concatenate(values: list[Tensor]) -> Tensor:
    """Joins along the first dimension, padding the others with zeros at their ends."""
    sizes = [max(value.shape[dim] for value in values) for dim in range(1, values[0].ndim)]
    if all(list(value.shape[1:]) == sizes for value in values):
        return torch.cat(values)
    joined = values[0].new_zeros(sum(len(value) for value in values), *sizes)
    start = 0
    for value in values:
        rows = slice(start, start + len(value))
        joined[(rows, *(slice(0, size) for size in value.shape[1:]))] = value
        start += len(value)
    return joined


def bucketed_batches(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Splits an epoch into batches of similar length; every example occurs once.

    Args:
        lengths (sequence of `int`): Tokens of each example.
        batch_size (`int`): Examples per batch; one batch may have fewer.
        seed, epoch (`int`): What the order depends on, and all that it depends on.

    Returns:
        `list[list[int]]`: Indices of the examples of each batch.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    order = torch.randperm(len(lengths), generator=generator, device="cpu").tolist()
    pool = batch_size * POOL_BATCHES
    batches: list[list[int]] = []
    for start in range(0, len(order), pool):
        batches += sorted_batches(order[start : start + pool], lengths, batch_size)
    return [batches[at] for at in torch.randperm(len(batches), generator=generator, device="cpu").tolist()]


def sorted_batches(indices: Iterable[int], lengths: Sequence[Any], batch_size: int) -> list[list[int]]:
    """Sorts indices of examples by their lengths (or whatever stands for them) and cuts them into batches."""
    order = sorted(indices, key=lambda index: lengths[index])
    return [order[at : at + batch_size] for at in range(0, len(order), batch_size)]


__all__ = [
    "POOL_BATCHES",
    "Batch",
    "best_fit",
    "bucketed_batches",
    "collate",
    "collate_packed",
    "packed_batches",
    "sorted_batches",
]
