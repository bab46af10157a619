"""Batches: padded rows of similar length, or rows full of examples, in an order of seed and epoch alone."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, Literal, Self

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dflash_hf.errors import require
from dflash_hf.training.example import Example

# A batch is cut from a sorted pool of this many batches: similar lengths, and still a different mix every epoch.
POOL_BATCHES = 8


class Movable:
    """A dataclass that can be moved with its tensors."""

    __slots__ = ()

    def to(self, device: torch.device) -> Self:
        """Returns the same on another device."""
        this: Any = self
        return replace(
            this,
            **{
                item.name: send_to_device(getattr(self, item.name), device) for item in fields(this)
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Movable):
    """Padded examples; `B` rows, `S` tokens."""

    input_ids: Tensor  # [B, S], int64: tokens
    attention_mask: Tensor  # [B, S], bool: real tokens
    loss_mask: Tensor  # [B, S], bool: tokens that the target wrote
    # What else the target's forward takes (images ...)
    model_inputs: dict[str, Tensor] = field(default_factory=dict)
    # [B, S], int64: the column at which each token's example begins, where rows hold several, one after another;
    # padding begins where the last one ends. `None` where every row is one example.
    starts: Tensor | None = None

    def row(self, number: int) -> Batch:
        """Returns a row of text as a batch."""
        parts: dict[str, Any] = {
            name: getattr(self, name) for name in ("input_ids", "attention_mask", "loss_mask")
        }
        if self.starts is not None:
            parts["starts"] = self.starts
        return Batch(**{name: value[number : number + 1] for name, value in parts.items()})

    @property
    def position_ids(self) -> Tensor:
        """Index of each token in its example: int64 of shape `[B, S]`."""
        shape = self.input_ids.shape
        columns = torch.arange(shape[1], device=self.input_ids.device).expand(shape)
        if self.starts is None:
            return columns
        return columns - self.starts


def collate(
    examples: Sequence[Example],
    pad_token_id: int = 0,
    *,
    padding_side: Literal["left", "right"] = "right",
) -> Batch:
    """Pads examples to the longest of them; text and any number of images may be mixed.

    Inputs per token are padded with the rows, by 0 (text). The others are joined along their first dimension, padded
    with zeros in the others: that is how processors lay out images of several rows, of different sizes too.
    """

    def padded(rows: Sequence[Tensor], value: int = 0) -> Tensor:
        return pad_sequence(
            list(rows), batch_first=True, padding_value=value, padding_side=padding_side
        )

    def join(name: str) -> Tensor:
        found = [example.model_inputs.get(name) for example in examples]
        present = [value for value in found if value is not None]
        if any(
            value is not None and value.shape != row.shape
            for value, row in zip(found, ids, strict=True)
        ):
            return _concatenate(present)
        return padded(
            [
                present[0].new_zeros(row.shape) if v is None else v
                for v, row in zip(found, ids, strict=True)
            ]
        )

    ids = [torch.tensor(example.input_ids, dtype=torch.long, device="cpu") for example in examples]
    names = dict.fromkeys(name for example in examples for name in example.model_inputs)
    return Batch(
        input_ids=padded(ids, pad_token_id),
        attention_mask=padded([torch.ones_like(row, dtype=torch.bool) for row in ids]),
        loss_mask=padded(
            [
                torch.tensor(example.loss_mask, dtype=torch.bool, device="cpu")
                for example in examples
            ]
        ),
        model_inputs={name: join(name) for name in names},
    )


def collate_packed(examples: Sequence[Example], max_length: int) -> Batch:
    """Fills rows of at most `max_length` tokens with examples, in their order; rows are padded on the right.

    Raises `ValueError` if an example is longer, or has inputs beside its tokens (images ...).
    """
    rows: list[Example] = []
    starts: list[list[int]] = []
    for index, example in enumerate(examples):
        what = "examples of text alone to pack"
        require(
            not example.model_inputs,
            what,
            sorted(example.model_inputs),
            f"leave example {index} unpacked",
        )
        length = len(example.input_ids)
        _check_room(length, max_length, index)
        if not rows or len(rows[-1].input_ids) + length > max_length:
            rows.append(Example(input_ids=[], loss_mask=[]))
            starts.append([])
        last = rows[-1]
        starts[-1] += [len(last.input_ids)] * length
        rows[-1] = Example(
            input_ids=[*last.input_ids, *example.input_ids],
            loss_mask=[*last.loss_mask, *example.loss_mask],
        )
    batch = collate(rows)
    width = batch.input_ids.shape[1]
    filled = [[*row, *[len(row)] * (width - len(row))] for row in starts]
    return replace(batch, starts=torch.tensor(filled, dtype=torch.long, device="cpu"))


def _check_room(length: int, max_length: int, index: int) -> None:
    what = f"examples of at most {max_length} tokens to pack"
    require(length <= max_length, what, length, f"cut or drop example {index}, or pack longer rows")


def best_fit(indices: Iterable[int], lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Fills rows of `max_length` tokens: the longest example first, each into the fullest row that has room for it.

    Returns the indices of the examples of each row; raises `ValueError` if one is longer than a row.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # room and row, the fullest first
    for index in sorted(indices, key=lambda index: -lengths[index]):
        _check_room(lengths[index], max_length, index)
        place = bisect.bisect_left(free, (lengths[index], -1))
        if place < len(free):
            room, row = free.pop(place)
        else:
            room = max_length
            row = len(rows)
            rows.append([])
        rows[row].append(index)
        bisect.insort(free, (room - lengths[index], row))
    return rows


def _concatenate(values: list[Tensor]) -> Tensor:
    """Joins along the first dimension, padding the others with zeros at their ends."""
    sizes = [max(size) for size in zip(*(value.shape[1:] for value in values), strict=True)]

    def widened(value: Tensor) -> Tensor:
        missing = [size - have for size, have in zip(sizes, value.shape[1:], strict=True)]
        return nn.functional.pad(value, [part for size in reversed(missing) for part in (0, size)])

    return torch.cat([widened(value) for value in values])


def epoch_batches(
    lengths: Sequence[int],
    batch_size: int,
    seed: int,
    epoch: int,
    packing_length: int | None = None,
) -> list[list[int]]:
    """Splits an epoch into batches, in which every example occurs once: of similar length, or packed.

    Rows that are packed are filled by best fit; at whichever of their examples [`collate_packed`] goes on to a new
    row, what is left of that row fits into it.

    Returns the indices of the examples of each batch: `batch_size` of them, or those of as many rows of
    `packing_length` tokens. The order depends on seed and epoch alone.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)

    def mixed(values: Sequence[Any]) -> list[Any]:
        return [
            values[at]
            for at in torch.randperm(len(values), generator=generator, device="cpu").tolist()
        ]

    order: list[int] = mixed(range(len(lengths)))
    if packing_length is None:
        pools = cuts(order, batch_size * POOL_BATCHES)
        return mixed(
            [batch for pool in pools for batch in sorted_batches(pool, lengths, batch_size)]
        )
    rows = mixed(best_fit(order, lengths, packing_length))
    return [list(chain.from_iterable(part)) for part in cuts(rows, batch_size)]


def sorted_batches(
    indices: Iterable[int], lengths: Sequence[Any], batch_size: int
) -> list[list[int]]:
    """Sorts indices of examples by their lengths (or whatever stands for them) and cuts them into batches."""
    return cuts(sorted(indices, key=lambda index: lengths[index]), batch_size)


def cuts(values: Sequence[Any], size: int) -> list[Any]:
    """Cuts a sequence into pieces of `size`, of which the last may be shorter."""
    return [values[at : at + size] for at in range(0, len(values), size)]
