"""This module samples the anchors of training blocks, and says which keys each slot of a block sees.

A block with anchor `a` holds the indices `a .. a + K - 1`. The block sees the context strictly before `a`, and itself.
The anchor enters as an embedding, as in decoding. Slot `k >= 1` predicts the token at index `a + k`. (With
`sample_from_anchor`, slot `k` predicts the token at index `a + k + 1`.) Rows are padded on the right, so a token's
column is its index in the row. A packed row holds several examples one after another, and no token sees another
example. In a packed row, windows and slots are still counted in columns, but positions start at 0 in each example.

Shapes: `B` rows, `S` context tokens, `A` anchors, `K` block, `Q = A * K` queries, `T = S + Q` keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from dflash_hf.block.positions import visible
from dflash_hf.configuration_dflash import AttentionKind, DFlashConfig
from dflash_hf.training.collators import Movable

Mask = Tensor | BlockMask


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchors(Movable):
    """The anchors of a batch's blocks, and the size of the blocks."""

    # [B, A], int64: index of each anchor in its row, ascending; 0 in entries without an anchor
    indices: Tensor
    keep: Tensor  # [B, A], bool: which entries are anchors; rows may have fewer than `A`
    block_size: int  # slots per block, including the anchor
    # No anchor has a greater index, so no block sees the context from this index on. `None`: unknown on the host.
    reach: int | None = None

    @property
    def positions(self) -> Tensor:
        """The index of every slot: int64 of shape `[B, A, K]`. An index may lie beyond the end of the row."""
        return self.indices[:, :, None] + torch.arange(self.block_size, device=self.indices.device)

    def select(self, start: int, stop: int) -> Anchors:
        """Returns the anchors in columns `start .. stop - 1`."""
        indices = self.indices[:, start:stop]
        keep = self.keep[:, start:stop]
        reach = self.reach
        if indices.device.type == "cpu" and indices.numel():
            reach = int(indices.max())
        return Anchors(indices=indices, keep=keep, block_size=self.block_size, reach=reach)


def valid_anchors(loss_mask_BS: Tensor, starts_BS: Tensor | None = None) -> Tensor:
    """Says which tokens `[B, S]` (bool) can be anchors: answer tokens followed by an answer token of the same example.

    The first anchor is the first answer token, as in decoding, where the prefill yields this token. In packed rows,
    `starts_BS` (int64) holds the column at which each token's example begins.
    """
    followed = torch.zeros_like(loss_mask_BS)
    followed[:, :-1] = loss_mask_BS[:, 1:]
    if starts_BS is not None:
        followed[:, :-1] &= starts_BS[:, 1:] == starts_BS[:, :-1]
    return loss_mask_BS & followed


def sample_anchors(
    loss_mask_BS: Tensor,
    num_anchors: int,
    block_size: int,
    generator: torch.Generator | None = None,
    starts_BS: Tensor | None = None,
) -> Anchors:
    """Draws up to `num_anchors` of the `valid_anchors` of each example, uniformly.

    `A` is the largest number of anchors in a row, and at least 1. `loss_mask_BS` (bool, `[B, S]`) and the generator
    are on the CPU.
    """
    valid = valid_anchors(loss_mask_BS, starts_BS)
    scores = torch.rand(valid.shape, generator=generator, device=valid.device).masked_fill_(
        ~valid, -1.0
    )
    starts = starts_BS
    if starts is None:
        starts = torch.zeros_like(scores, dtype=torch.long)
    by_score = scores.argsort(dim=1, descending=True)
    # The sort is stable, so the tokens of one example stay sorted by score.
    by_example = starts.gather(1, by_score).argsort(dim=1, stable=True)
    order = by_score.gather(1, by_example)
    places = order.argsort(dim=1)  # the place of each token in this order
    # Each example takes up the same places as columns, so its first place is the column at which it begins.
    ranks = places - starts
    return _chosen(valid & (ranks < num_anchors), block_size)


def all_anchors(loss_mask_BS: Tensor, block_size: int, starts_BS: Tensor | None = None) -> Anchors:
    """Returns every valid anchor of every row, in order. The arguments are those of `sample_anchors`."""
    return _chosen(valid_anchors(loss_mask_BS, starts_BS), block_size)


def _chosen(chosen_BS: Tensor, block_size: int) -> Anchors:
    """Returns the chosen tokens as `Anchors`, in ascending order. Entries without an anchor are last, with index 0."""
    num_columns = max(1, int(chosen_BS.sum(dim=1).max()))
    keep, indices = chosen_BS.to(torch.int8).sort(dim=1, descending=True, stable=True)
    keep = keep[:, :num_columns].bool()
    indices = indices[:, :num_columns].masked_fill(~keep, 0)
    return Anchors(indices=indices, keep=keep, block_size=block_size, reach=int(indices.max()))


class BlockMaskRule:
    """Says which of the keys `[context | blocks]` each slot of each block sees. It makes all masks of training.

    Args:
        attention_mask_BS (`torch.Tensor` of shape `[B, S]`, bool): True for real context tokens. Rows are
            right-padded.
        anchors (`Anchors`): The anchors of the blocks.
        starts_BQ (`torch.Tensor` of shape `[B, Q]`, int64, *optional*): In packed rows, the column at which the
            example of each slot begins.
    """

    def __init__(
        self, attention_mask_BS: Tensor, anchors: Anchors, starts_BQ: Tensor | None = None
    ) -> None:
        batch, num_context = attention_mask_BS.shape
        device = attention_mask_BS.device
        columns = torch.arange(num_context, device=device)
        num_blocks = anchors.indices.shape[1]
        self.block_size = anchors.block_size
        self.shape = (
            batch,
            num_blocks * self.block_size,
            num_context + num_blocks * self.block_size,
        )
        self.anchor_BQ = anchors.indices.repeat_interleave(self.block_size, dim=1)
        self.query_BQ = anchors.positions.flatten(1)
        # The tokens of an example are neighbours: all tokens from its start to the anchor belong to it.
        if starts_BQ is None:
            starts_BQ = torch.zeros_like(self.anchor_BQ)
        self.start_BQ = starts_BQ
        self.key_BT = torch.cat([torch.where(attention_mask_BS, columns, -1), self.query_BQ], dim=1)
        blocks = torch.arange(num_blocks, device=device).repeat_interleave(self.block_size)
        self.key_block_T = torch.cat([torch.full_like(columns, -1), blocks])

    def __call__(self, row: Tensor, query: Tensor, key: Tensor, kind: AttentionKind) -> Tensor:
        """Says whether query `[row, query]` sees key `[row, key]` in a layer of this kind. The indices broadcast."""
        key_position = self.key_BT[row, key]
        key_block = self.key_block_T[key]
        in_context = (key_block < 0) & (key_position < self.anchor_BQ[row, query])
        in_context = in_context & (key_position >= self.start_BQ[row, query])
        in_block = key_block == query // self.block_size
        window, causal, from_anchor = kind
        anchor = self.anchor_BQ[row, query]
        seen = visible(
            self.query_BQ[row, query], key_position, window, causal, anchor if from_anchor else None
        )
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

        make = create_block_mask
        if self.key_BT.is_cuda:
            make = _compiled_create_block_mask()
        return make(mask_mod, batch, None, num_queries, num_keys, device=self.key_BT.device)

    def masks(self, config: DFlashConfig, flex: bool) -> dict[AttentionKind, Mask]:
        """Returns the mask of each kind of layer for `DFlashDraftModel.forward`: dense, or a `BlockMask` if `flex`."""
        kinds = {config.attention_kind(index) for index in range(config.num_hidden_layers)}
        return {kind: self.block_mask(kind) if flex else self.dense(kind) for kind in kinds}


@functools.cache
def _compiled_create_block_mask() -> Callable[..., BlockMask]:
    """Returns `create_block_mask` compiled. Uncompiled, it allocates several integer tensors `[B, Q, T]`."""
    return torch.compile(create_block_mask, dynamic=True)
