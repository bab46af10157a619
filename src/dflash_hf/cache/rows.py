"""This module moves rows that leave or join a batch, in any tensor that has a dimension of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_hf.devices import plain_tensors


def kept_rows(buffer: Tensor, rows: Sequence[int], dim: int = 0) -> Tensor:
    """Moves these rows to the beginning of a buffer, in place, and returns a view of them.

    Row `rows[i]` of dimension `dim` goes to place `i`. A row that moves must come from behind the last place of the
    result. The other rows are not copied.
    """
    for place, row in enumerate(rows):
        # Most rows stay where they are.
        if place == row:
            continue
        source = buffer.select(dim, row)
        destination = buffer.select(dim, place)
        destination.copy_(source)
    # The memory behind these rows stays allocated, because a row that joins later uses it.
    return buffer.narrow(dim, 0, len(rows))


def with_row(buffer: Tensor, max_rows: int, dim: int = 0) -> Tensor:
    """Returns a copy of a buffer with room for `max_rows` rows in dimension `dim`, or for one more row if that is
    more.

    The new rows are zero.
    """
    size = list(buffer.shape)
    num_rows = size[dim]
    # Several rows are allocated at once, so that rows are not copied again for each row that joins.
    size[dim] = max(max_rows, num_rows + 1)
    with plain_tensors():
        new = buffer.new_zeros(size)
        new.narrow(dim, 0, num_rows).copy_(buffer)
    return new


def lengthened(buffer: Tensor, ring: int) -> Tensor:
    """Returns a copy of a buffer `[B, R, G, E]` with `ring` slots. The new slots are zero."""
    with plain_tensors():
        batch, num_slots, *head = buffer.shape
        # The new slots are zero, because the content of a masked slot must be finite.
        new = buffer.new_zeros(batch, ring, *head)
        new[:, :num_slots] = buffer
    return new


def copy_row(source: Tensor, row: Tensor, length: int) -> None:
    """Copies the newest tokens of a row, in place, from one ring of slots into another.

    Args:
        source (`torch.Tensor` of shape `[R, G, E]`): Keys or values. The token of index `p` is in slot `p % R`.
        row (`torch.Tensor` of shape `[R', G, E]`): The row that is written. Its other slots become zero.
        length (`int`): Number of tokens of the row.
    """
    # The row that was here before may have left infinities, which a masked slot must not hold.
    row.zero_()
    num_slots = source.shape[0]
    num_places = row.shape[0]
    # The tokens of a row that has never wrapped are in its slots in order.
    if length <= min(num_slots, num_places):
        row[:length] = source[:length]
        return
    num_newest = min(length, num_slots, num_places)
    first = length - num_newest
    positions = torch.arange(first, length, device=source.device)
    # The two rings may differ in size, so a token's slot in each of them is computed from its index.
    source_slots = positions % num_slots
    places = positions % num_places
    newest = source.index_select(0, source_slots)
    row.index_copy_(0, places, newest)


def newest_of_row(row: Tensor, length: int, num: int) -> Tensor:
    """Returns a copy of the newest `num` tokens of a row `[R, G, E]` of `length` tokens: `[num, G, E]`."""
    first = length - num
    positions = torch.arange(first, length, device=row.device)
    num_slots = row.shape[0]
    slots = positions % num_slots
    return row.index_select(0, slots)


def with_gap(newest: Tensor, length: int) -> Tensor:
    """Returns the newest tokens `[m, G, E]` of a row as a row of `length` tokens with zeros before them:
    `[1, G, n, E]`.
    """
    num_missing = length - newest.shape[0]
    # `pad` counts from the last dimension. It adds nothing to the heads, and zeros before the tokens.
    before_tokens = (0, 0, 0, 0, num_missing, 0)
    row = torch.nn.functional.pad(newest, before_tokens)
    by_head = row.transpose(0, 1)
    return by_head[None]
