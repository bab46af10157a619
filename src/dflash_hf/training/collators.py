"""This module splits an epoch into batches, and collates examples into padded or packed rows."""

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

# Batches are cut from a sorted pool of this many batches: their lengths are similar, but each epoch mixes them anew.
POOL_BATCHES = 8


class Movable:
    """A base class for dataclasses whose tensors can be moved to a device."""

    __slots__ = ()

    def to(self, device: torch.device) -> Self:
        """Returns a copy whose tensors are on another device."""
        this: Any = self
        return replace(
            this,
            **{
                item.name: send_to_device(getattr(self, item.name), device) for item in fields(this)
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Movable):
    """A batch of padded or packed examples, with `B` rows of `S` tokens."""

    input_ids: Tensor  # [B, S], int64: tokens
    attention_mask: Tensor  # [B, S], bool: real tokens
    loss_mask: Tensor  # [B, S], bool: tokens that the target wrote
    # Other inputs of the target's forward, such as images
    model_inputs: dict[str, Tensor] = field(default_factory=dict)
    # [B, S], int64: in packed rows, the column at which each token's example begins. For padding, this is the first
    # column after the last example. `None`: every row is one example.
    starts: Tensor | None = None

    def row(self, number: int) -> Batch:
        """Returns one row as a batch. The row must be text, because `model_inputs` are left out."""
        parts: dict[str, Any] = {
            name: getattr(self, name) for name in ("input_ids", "attention_mask", "loss_mask")
        }
        if self.starts is not None:
            parts["starts"] = self.starts
        return Batch(**{name: value[number : number + 1] for name, value in parts.items()})

    @property
    def position_ids(self) -> Tensor:
        """The index of each token in its example: int64 of shape `[B, S]`."""
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
    """Pads examples to the length of the longest one. Examples of text and with any number of images may be mixed.

    Inputs per token are padded like the rows, with 0 (text). Other inputs are concatenated along their first dimension
    and padded with zeros in the other dimensions, as processors do it for images of several rows and sizes.
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
    """Fills rows of at most `max_length` tokens with examples, in their order. Rows are padded on the right.

    Raises `ValueError` if an example is longer, or has inputs besides its tokens, such as images.
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
    """Fills rows of `max_length` tokens with examples, the longest first, each into the fullest row with enough room.

    Returns the indices of the examples of each row. Raises `ValueError` if an example is longer than a row.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room, row), the fullest row first
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
    """Concatenates tensors along the first dimension. The other dimensions are padded with zeros at their ends."""
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
    """Splits an epoch into batches of examples of similar length, or of packed examples. Each example occurs once.

    Packed rows are filled by best fit. [`collate_packed`] may begin a new row at a later example than planned here.
    The rest of the planned row then fits into the new row.

    Returns the indices of the examples of each batch. A batch has `batch_size` examples, or the examples of
    `batch_size` rows of `packing_length` tokens. The order depends only on the seed and the epoch.
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
    """Sorts indices of examples by `lengths` (or other sort keys) and cuts them into batches."""
    return cuts(sorted(indices, key=lambda index: lengths[index]), batch_size)


def cuts(values: Sequence[Any], size: int) -> list[Any]:
    """Cuts a sequence into pieces of `size`. The last piece may be shorter."""
    return [values[at : at + size] for at in range(0, len(values), size)]
