"""Where training blocks start, and what each of their slots sees: anchor sampling and the one mask rule of training.

A block with anchor `a` holds the indices `a .. a + K - 1`. It sees the context strictly before `a` (the anchor itself
enters as an embedding, as in decoding) and itself; slot `k >= 1` predicts the token at index `a + k`. Rows are padded
on the right, so a token's index is its column.

Shapes: `B` rows, `S` context tokens, `A` anchors, `K` block, `Q = A * K` queries, `T = S + Q` keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from dflash_hf.configuration_dflash import AttentionKind
from dflash_hf.positions import visible

Mask = Tensor | BlockMask


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchors:
    """The blocks of a batch.

    Args:
        indices (`torch.Tensor` of shape `[B, A]`, int64): Index of each anchor in its row, ascending; 0 where there is
            none.
        keep (`torch.Tensor` of shape `[B, A]`, bool): Which entries are anchors; rows may have fewer than `A`.
        block_size (`int`): Slots per block, the anchor included.
    """

    indices: Tensor
    keep: Tensor
    block_size: int

    @property
    def positions(self) -> Tensor:
        """Index of every slot: int64 of shape `[B, A, K]`; may lie beyond the end of the row."""
        return self.indices[:, :, None] + torch.arange(self.block_size, device=self.indices.device)

    def select(self, start: int, stop: int) -> Anchors:
        """Returns the anchors in columns `start .. stop - 1`."""
        return Anchors(indices=self.indices[:, start:stop], keep=self.keep[:, start:stop], block_size=self.block_size)

    def to(self, device: torch.device) -> Anchors:
        """Returns the same anchors on another device."""
        return Anchors(indices=self.indices.to(device), keep=self.keep.to(device), block_size=self.block_size)


def valid_anchors(loss_mask_BS: Tensor) -> Tensor:
    """Says which tokens can be anchors: answer tokens that an answer token follows.

    In decoding the first anchor is the first generated token, which the prefill yields.

    Args:
        loss_mask_BS (`torch.Tensor` of shape `[B, S]`, bool): `True` on tokens that the target wrote.

    Returns:
        `torch.Tensor` of shape `[B, S]`, bool.
    """
    followed = torch.zeros_like(loss_mask_BS)
    followed[:, :-1] = loss_mask_BS[:, 1:]
    return loss_mask_BS & followed


def sample_anchors(
    loss_mask_BS: Tensor, num_anchors: int, block_size: int, generator: torch.Generator | None = None
) -> Anchors:
    """Draws up to `num_anchors` different anchors per row, uniformly; `A` is what the fullest row needs.

    Args:
        loss_mask_BS (`torch.Tensor` of shape `[B, S]`, bool, on the CPU): See `valid_anchors`.
        num_anchors (`int`): Most anchors per row.
        block_size (`int`): Slots per block.
        generator (`torch.Generator`, *optional*): Of the draw, on the CPU.
    """
    valid = valid_anchors(loss_mask_BS)
    scores = torch.rand(valid.shape, generator=generator, device=valid.device).masked_fill_(~valid, -1.0)
    num_columns = max(1, min(num_anchors, int(valid.sum(dim=1).max())))
    drawn, indices = scores.topk(num_columns, dim=1)
    return _sorted(indices, drawn >= 0, block_size)


def all_anchors(loss_mask_BS: Tensor, block_size: int) -> Anchors:
    """Returns every valid anchor of every row, in order."""
    valid = valid_anchors(loss_mask_BS)
    num_columns = max(1, int(valid.sum(dim=1).max()))
    keep, indices = valid.to(torch.int8).topk(num_columns, dim=1)
    return _sorted(indices, keep.bool(), block_size)


def _sorted(indices: Tensor, keep: Tensor, block_size: int) -> Anchors:
    """Anchors in ascending order, the missing ones last and at index 0."""
    order = indices.masked_fill(~keep, torch.iinfo(torch.int64).max).argsort(dim=1)
    keep = keep.gather(1, order)
    return Anchors(indices=indices.gather(1, order).masked_fill(~keep, 0), keep=keep, block_size=block_size)


class BlockMaskRule:
    """Which of the keys `[context | blocks]` each slot of each block sees; every mask of training comes from here.

    Args:
        attention_mask_BS (`torch.Tensor` of shape `[B, S]`, bool): Real context tokens, right-padded.
        anchors (`Anchors`): The blocks.
    """

    def __init__(self, attention_mask_BS: Tensor, anchors: Anchors) -> None:
        batch, num_context = attention_mask_BS.shape
        device = attention_mask_BS.device
        columns = torch.arange(num_context, device=device)
        num_blocks = anchors.indices.shape[1]
        self.block_size = anchors.block_size
        self.shape = (batch, num_blocks * self.block_size, num_context + num_blocks * self.block_size)
        self.anchor_BQ = anchors.indices.repeat_interleave(self.block_size, dim=1)
        self.query_BQ = anchors.positions.flatten(1)
        self.key_BT = torch.cat([torch.where(attention_mask_BS, columns, -1), self.query_BQ], dim=1)
        blocks = torch.arange(num_blocks, device=device).repeat_interleave(self.block_size)
        self.key_block_T = torch.cat([torch.full_like(columns, -1), blocks])

    def __call__(self, row: Tensor, query: Tensor, key: Tensor, kind: AttentionKind) -> Tensor:
        """Says whether query `[row, query]` sees key `[row, key]` in a layer of this kind; arguments broadcast.

        Args:
            row, query, key (`torch.Tensor`, integer): Below `B`, `Q` and `T`.
            kind (`tuple`): `(window, causal, from_anchor)` of the layer.
        """
        key_position, key_block = self.key_BT[row, key], self.key_block_T[key]
        in_context = (key_block < 0) & (key_position < self.anchor_BQ[row, query])
        in_block = key_block == query // self.block_size
        window, causal, from_anchor = kind
        anchor = self.anchor_BQ[row, query]
        seen = visible(self.query_BQ[row, query], key_position, window, causal, anchor if from_anchor else None)
        return (in_context | in_block) & seen

    def dense(self, kind: AttentionKind) -> Tensor:
        """Returns the mask of a kind of layer as booleans `[B, 1, Q, T]`."""
        row, query, key = (torch.arange(size, device=self.key_BT.device) for size in self.shape)
        return self(row[:, None, None], query[:, None], key, kind)[:, None]

    def block_mask(self, kind: AttentionKind) -> BlockMask:
        """Returns the mask of a kind of layer for FlexAttention."""
        batch, num_queries, num_keys = self.shape

        def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return self(row, query, key, kind)

        return create_block_mask(mask_mod, batch, None, num_queries, num_keys, device=self.key_BT.device.type)

    def masks(self, kinds: Iterable[AttentionKind], flex: bool) -> dict[AttentionKind, Mask]:
        """Returns one mask per kind of layer, as `DFlashDraftModel.forward` takes them.

        Args:
            kinds (iterable of `tuple`): `(window, causal, from_anchor)` of each layer; repeats cost nothing.
            flex (`bool`): Build `BlockMask`s (for CUDA) instead of dense booleans.
        """
        return {kind: self.block_mask(kind) if flex else self.dense(kind) for kind in set(kinds)}


__all__ = ["Anchors", "BlockMaskRule", "Mask", "all_anchors", "sample_anchors", "valid_anchors"]
