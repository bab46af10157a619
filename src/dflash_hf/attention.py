"""Attention of a block of new tokens over a ragged cache: one function for the target's verify and for the draft.

`RaggedBlock` says where each row stands and derives slots and masks from it, once per step and not once per layer.
`attend` is the arithmetic; `target_model.reentry` hands it to Transformers.

Shapes: `B` rows, `K` new tokens per row, `H`/`G` query/key heads, `R` slots, `E` head size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash_hf import ops
from dflash_hf.configuration_dflash import AttentionKind
from dflash_hf.positions import slot_positions, visible
from dflash_hf.tree import DraftTree


@dataclass(frozen=True, slots=True, eq=False)
class RaggedBlock:
    """New tokens of every row, the first of row `b` at index `positions[b, 0]`; reads nothing on the host."""

    # [B, width], int64: index of each token in its row, counting up by one. Not copied: the block stands where they
    # say. Of a tree, where each node's keys and values go.
    positions: Tensor
    # A length the host knows no row exceeds after this block; keys beyond it are not read. Purely a saving.
    bound: int | None = None
    # The host knows that every row ends exactly at `bound`, so that a layer in which all see all needs no mask; SDPA
    # without one takes half the time on a CPU.
    is_exact: bool = False
    tree: DraftTree | None = None  # what the new tokens follow, if not each the one before
    # What is derived of it is found once per step and not once per layer.
    _slots: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)
    _masks: dict[tuple[object, ...], Tensor] = field(default_factory=dict, init=False, repr=False)
    _copies: dict[torch.device, RaggedBlock] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def at(cls, lengths: Tensor, width: int, bound: int | None = None, is_exact: bool = False) -> RaggedBlock:
        """Returns a block of `width` tokens behind rows of these `lengths` `[B]` int64, which are copied."""
        return cls(lengths[:, None] + torch.arange(width, device=lengths.device), bound, is_exact)

    @property
    def width(self) -> int:
        """New tokens per row."""
        return self.positions.shape[1]

    @property
    def lengths(self) -> Tensor:
        """Tokens each row already has in its cache, `[B]`."""
        return self.positions[:, 0]

    def on(self, device: torch.device) -> RaggedBlock:
        """Returns the same block counted on another device; copied once per step, not once per layer."""
        if device == self.positions.device:
            return self
        if device not in self._copies:
            tree = None if self.tree is None else self.tree.on(device)
            self._copies[device] = RaggedBlock(self.positions.to(device), self.bound, self.is_exact, tree)
        return self._copies[device]

    @property
    def indices(self) -> Tensor:
        """Index that each token has in its row if it is accepted, `[B, width]`: what its position follows from."""
        return self.positions if self.tree is None else self.positions[:, :1] + self.tree.depths

    def extent(self, ring: int) -> int:
        """Returns how many slots of a buffer of `ring` slots have to be read."""
        return ring if self.bound is None else min(ring, self.bound)

    def slots(self, ring: int) -> Tensor:
        """Returns where the new tokens go in a buffer `[B * ring, ...]`: int64 of shape `[B * width]`."""
        if ring not in self._slots:
            rows = torch.arange(self.positions.shape[0], device=self.positions.device)[:, None] * ring
            self._slots[ring] = (rows + self.positions % ring).reshape(-1)
        return self._slots[ring]

    def mask(self, num_slots: int, kind: AttentionKind, repeats: int, dtype: torch.dtype) -> Tensor | None:
        """Returns the additive mask `[B, 1, repeats * width, num_slots]` (0 or -inf) of a layer of this kind.

        `None` where nothing has to be hidden.

        Args:
            num_slots (`int`): Slots that are read: a whole ring, or the first `extent` slots of a longer buffer (where
                no index has wrapped, so the shorter length gives the same positions).
            kind (`AttentionKind`): Of the layer.
            repeats (`int`): See [`mask_repeats`].
            dtype (`torch.dtype`): Of the scores.
        """
        window, causal, from_anchor = kind
        is_plain = self.is_exact and num_slots == self.bound and (window is None or window >= num_slots)
        # The last token, and what is not causal, see all that is not out of their window.
        if is_plain and (self.width == 1 or not causal):
            return None
        key = (num_slots, kind, repeats, dtype)
        if key not in self._masks:
            if is_plain:
                mask = self._plain_mask(num_slots, dtype)
            else:
                slots = torch.arange(num_slots, device=self.positions.device)
                held = slot_positions(self.positions[:, -1:, None], slots, num_slots)
                anchor = self.positions[:, :1, None]
                is_related = None
                if self.tree is not None:
                    held, is_related = self._of_tree(self.tree, held)
                seen = visible(self.indices[:, :, None], held, window, causal, anchor if from_anchor else None)
                seen = seen if is_related is None else seen & is_related
                mask = additive_mask(~seen, dtype)[:, None]
            self._masks[key] = mask if repeats == 1 else mask.repeat(1, 1, repeats, 1)
        return self._masks[key]

    def _plain_mask(self, num_slots: int, dtype: torch.dtype) -> Tensor:
        """The additive mask `[1, 1, width, num_slots]` of one row that all is known of: what is before it is seen."""
        device = self.positions.device
        before = num_slots - self.width
        if self.tree is None:
            hidden = torch.full((self.width, num_slots), -math.inf, dtype=dtype, device=device).triu_(before + 1)
            return hidden[None, None]
        others = (self.tree.ancestors[:, :, None] >> torch.arange(self.width, device=device)) & 1 == 0
        return nn.functional.pad(additive_mask(others, dtype), (before, 0))[:, None]

    def _of_tree(self, tree: DraftTree, held: Tensor) -> tuple[Tensor, Tensor]:
        """Index `[B, 1, slots]` of what each slot holds, and whether it is a node's ancestor or no node at all.

        `held` `[B, 1, slots]` takes the nodes for a chain.
        """
        node = held - self.positions[:, :1, None]
        is_node = node >= 0
        node = node.clamp_min(0)
        held = torch.where(is_node, self.positions[:, :1, None] + tree.depths.gather(1, node[:, 0])[:, None], held)
        return held, ((tree.ancestors[:, :, None] >> node) & 1).bool() | ~is_node


def additive_mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns what is added to scores: -inf where they are hidden, else 0."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -math.inf)


class RaggedMask(NamedTuple):
    """What a layer of some kind lets a block see (on the device of the keys): a tensor may have to be made of it."""

    block: RaggedBlock
    kind: AttentionKind


def mask_repeats(heads_per_key: int, device: torch.device) -> int:
    """Says how often a mask's rows stand one after another: once, or once per query head of a key head.

    On CUDA the query heads of one key head are laid along the token axis, because a mask together with `enable_gqa`
    is said to leave SDPA only its slowest kernel there (not measured here). On a CPU `enable_gqa` is as fast and
    copies nothing.
    """
    return heads_per_key if device.type == "cuda" else 1


def attend(
    query_BHKE: Tensor,
    key_BGRE: Tensor,
    value_BGRE: Tensor,
    mask: Tensor | BlockMask | RaggedMask | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention with grouped heads, soft cap and sinks; the torch definition everything is tested against.

    Under a `RaggedMask` a kernel computes it where `ops.attends` says so, and no mask is made.

    `softmax(cap(q k^T * scaling) + mask) v`, where `cap(s) = softcap * tanh(s / softcap)` and a sink adds one score
    per head that takes part in the normalisation and has no value. Keys and values are read as they are, never
    repeated.

    Args:
        query_BHKE, key_BGRE, value_BGRE (`torch.Tensor`): `H` is a multiple of `G`. Any strides.
        mask (`torch.Tensor`, `BlockMask` or `RaggedMask`, *optional*): Additive, `[B, 1, repeats * K, R]` with
            `repeats` from [`mask_repeats`]; a `BlockMask` (training on CUDA) goes to FlexAttention; a `RaggedMask` is
            decoding's.
        scaling (`float`): Factor on the scores.
        softcap (`float`, *optional*): Soft cap.
        sinks (`torch.Tensor` of shape `[H]`, *optional*): Sink score per head.
        dropout (`float`): Dropout on the weights.

    Returns `[B, K, H, E]`; raises `ValueError` if a `BlockMask` comes with a soft cap, sinks or dropout.
    """
    repeats = query_BHKE.shape[1] // key_BGRE.shape[1]
    if isinstance(mask, RaggedMask):
        block, kind = mask
        window, causal, from_anchor = kind
        if dropout == 0 and ops.attends(query_BHKE, key_BGRE, value_BGRE):
            return ops.block_attention(
                query_BHKE,
                key_BGRE,
                value_BGRE,
                block.lengths,
                scaling=scaling,
                causal=causal,
                window=window,
                from_anchor=from_anchor,
                softcap=softcap,
                sinks_H=sinks,
                depths_BW=None if block.tree is None else block.tree.depths,
                ancestors_BW=None if block.tree is None else block.tree.ancestors,
            )
        rows = mask_repeats(repeats, key_BGRE.device)
        mask = block.mask(key_BGRE.shape[2], kind, rows, query_BHKE.dtype)
    if isinstance(mask, BlockMask):
        if softcap is not None or sinks is not None or dropout > 0:
            raise ValueError("expected plain attention under a BlockMask, got a soft cap, sinks or dropout; drop them")
        flex = _compiled_flex_attention() if query_BHKE.is_cuda else flex_attention
        out = flex(query_BHKE, key_BGRE, value_BGRE, block_mask=mask, scale=scaling, enable_gqa=repeats > 1)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)
    if softcap is not None or sinks is not None:
        return _attend_explicitly(query_BHKE, key_BGRE, value_BGRE, mask, scaling, softcap, sinks, dropout)
    return _attend_by_sdpa(query_BHKE, key_BGRE, value_BGRE, mask, scaling, dropout)


def _attend_by_sdpa(
    query_BHKE: Tensor, key_BGRE: Tensor, value_BGRE: Tensor, mask: Tensor | None, scaling: float, dropout: float
) -> Tensor:
    """`attend` where SDPA knows all of it."""
    batch, num_heads, width, _ = query_BHKE.shape
    groups = key_BGRE.shape[1]
    repeats = num_heads // groups
    is_packed = mask_repeats(repeats, query_BHKE.device) > 1
    out = nn.functional.scaled_dot_product_attention(
        query_BHKE.reshape(batch, groups, repeats * width, -1) if is_packed else query_BHKE,
        key_BGRE,
        value_BGRE,
        attn_mask=mask,
        scale=scaling,
        dropout_p=dropout,
        enable_gqa=repeats > 1 and not is_packed,
    )
    if not is_packed:
        return out.transpose(1, 2)
    return out.view(batch, groups, repeats, width, -1).permute(0, 3, 1, 2, 4).reshape(batch, width, num_heads, -1)


def _attend_explicitly(
    query_BHKE: Tensor,
    key_BGRE: Tensor,
    value_BGRE: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> Tensor:
    """`attend` with the scores in memory: SDPA knows neither a soft cap nor sinks."""
    batch, num_heads, width, _ = query_BHKE.shape
    groups = key_BGRE.shape[1]
    num_keys = key_BGRE.shape[2]
    repeats = num_heads // groups
    grouped = query_BHKE.reshape(batch, groups, repeats, width, -1)
    scores = (grouped @ key_BGRE[:, :, None].transpose(3, 4)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask.view(mask.shape[0], 1, -1, width, num_keys)
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, groups, repeats, 1, 1).expand(batch, -1, -1, width, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights = weights[..., :num_keys].to(value_BGRE.dtype)
    out = nn.functional.dropout(weights, p=dropout, training=dropout > 0) @ value_BGRE[:, :, None]
    return out.permute(0, 3, 1, 2, 4).reshape(batch, width, num_heads, -1)


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    """FlexAttention as a kernel for any shape: called uncompiled it computes the whole score matrix and saves nothing.

    Past torch's limit of recompilations a call fails (`fullgraph`) where it would go on uncompiled, and the backward
    pass is compiled with the forward one, so that the caller learns of both while SDPA can still stand in.
    """
    from torch._functorch import config as lowering

    compiled = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    if not hasattr(lowering, "force_non_lazy_backward_lowering"):
        return compiled

    def flex(*args: Any, **kwargs: Any) -> Any:
        with lowering.patch(force_non_lazy_backward_lowering=True):
            return compiled(*args, **kwargs)

    return flex
