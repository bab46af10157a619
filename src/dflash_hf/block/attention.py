"""This module computes the attention of a block of new tokens over a ragged cache, for the target and the draft.

`RaggedBlock` holds the positions of the new tokens in each row. Slots and masks are derived from them once per step
and not once per layer. `attend` does the arithmetic. `target_model.reentry` registers it with Transformers.

Shapes: `B` rows, `K` new tokens per row, `H`/`G` query/key heads, `R` slots, `E` head size.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash_hf import ops
from dflash_hf.block.positions import slot_positions, visible
from dflash_hf.block.tree import DraftTree
from dflash_hf.configuration_dflash import AttentionKind

# Newer releases of torch use this class to request more than the result. Older releases have an argument for it.
AuxRequest: Any = getattr(flex_module, "AuxRequest", None)


# The bound of a block if the length of its rows is not limited.
NO_BOUND = sys.maxsize
# Limits for a CPU, in float32 and float64: query heads are packed for at most MOST_PACKED tokens and for at least
# LEAST_KEYS keys, as `mask_repeats` explains.
MOST_PACKED = 16
LEAST_KEYS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class RaggedBlock:
    """A block describes new tokens of every row. The first token of row `b` is at index `positions[b, 0]`.

    Each token follows the token before it. In a [`TreeBlock`] the tokens are the nodes of a tree. Nothing is read on
    the host.
    """

    # [B, width], int64: index of each token in its row, counting up by one. Keys and values of a tree's nodes are
    # written there too. The tensor is not copied, so code that changes it moves the block.
    positions: Tensor
    # A length that no row exceeds after this block, if the host knows one. Keys beyond it are not read.
    bound: int = NO_BOUND
    # Whether the host knows that every row ends exactly at `bound`. Then a layer in which every query sees all keys
    # needs no mask. Without a mask, SDPA takes half the time on a CPU.
    is_exact: bool = False
    # These derived tensors are made once per step and not once per layer.
    _slots: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)
    _masks: dict[tuple[object, ...], Tensor] = field(default_factory=dict, init=False, repr=False)
    _copies: dict[torch.device, RaggedBlock] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def at(
        cls, lengths: Tensor, width: int, bound: int = NO_BOUND, is_exact: bool = False
    ) -> RaggedBlock:
        """Returns a block of `width` tokens behind rows of the given `lengths`, `[B]` int64.

        The lengths are copied.
        """
        steps = torch.arange(width, device=lengths.device)
        # The index of the first new token is the row's length, because indices begin at 0.
        return cls(lengths[:, None] + steps, bound, is_exact)

    @property
    def width(self) -> int:
        """Number of new tokens per row."""
        return self.positions.shape[1]

    @property
    def lengths(self) -> Tensor:
        """Number of tokens that each row already has in its cache, `[B]`."""
        return self.positions[:, 0]

    @property
    def indices(self) -> Tensor:
        """Index of each token in its row if the token is accepted, `[B, width]`.

        The token's position is derived from it.
        """
        return self.positions

    @property
    def tensors_of_tree(self) -> dict[str, Tensor]:
        """Returns the kernel's arguments for a tree.

        A chain has none, because the kernel knows that its depths count up.
        """
        return {}

    def on(self, device: torch.device) -> RaggedBlock:
        """Returns the same block on another device. It is copied once per step."""
        if device == self.positions.device:
            return self
        # Layers may be on several devices, and each layer asks for the block.
        if device not in self._copies:
            self._copies[device] = self._copied_to(device)
        return self._copies[device]

    def extent(self, ring: int) -> int:
        """Returns the number of slots that have to be read in a buffer of `ring` slots."""
        # There are no slots beyond the ring: if the bound is longer, the ring may have wrapped. Without a bound, the
        # whole ring is read, and the mask hides the slots that have not been written.
        return min(ring, self.bound)

    def slots(self, ring: int) -> Tensor:
        """Returns the slots of the new tokens in a buffer `[B * ring, ...]`: int64 of shape `[B * width]`."""
        # Layers with rings of the same size share their slots.
        if ring not in self._slots:
            batch = self.positions.shape[0]
            rows = torch.arange(batch, device=self.positions.device)
            first_slots = rows[:, None] * ring
            slots = first_slots + self.positions % ring
            self._slots[ring] = slots.reshape(-1)
        return self._slots[ring]

    def mask(
        self, num_slots: int, kind: AttentionKind, repeats: int, dtype: torch.dtype
    ) -> Tensor | None:
        """Returns the additive mask `[B, 1, repeats * width, num_slots]` of a layer of this kind, with values 0 or
        -inf.

        The result is `None` if nothing has to be hidden.

        Args:
            num_slots (`int`): Number of slots that are read: a whole ring, or the first `extent` slots of a longer
                buffer. In the latter no index has wrapped, so the shorter length gives the same positions.
            kind (`AttentionKind`): Kind of the layer.
            repeats (`int`): How often the rows of the mask are repeated, see [`mask_repeats`].
            dtype (`torch.dtype`): Dtype of the scores.
        """
        _, causal, _ = kind
        is_plain = self._holds_all(num_slots, kind)
        # A single token sees all slots. So does every token of a layer that is not causal.
        if is_plain and (self.width == 1 or not causal):
            return None
        return self.dense_mask(num_slots, kind, repeats, dtype)

    def dense_mask(
        self, num_slots: int, kind: AttentionKind, repeats: int, dtype: torch.dtype
    ) -> Tensor:
        """Returns the mask of [`mask`] as a tensor, also if nothing has to be hidden."""
        key = (num_slots, kind, repeats, dtype)
        if key not in self._masks:
            if self._holds_all(num_slots, kind):
                mask = self._plain_mask(num_slots, dtype)
            else:
                is_hidden = ~self._seen(num_slots, kind)
                mask = additive_mask(is_hidden, dtype)[:, None]
            self._masks[key] = _repeated(mask, repeats)
        return self._masks[key]

    def _holds_all(self, num_slots: int, kind: AttentionKind) -> bool:
        """Returns True if the host knows the token in every slot, and no token is outside the window."""
        window, _, _ = kind
        if window is not None and window < num_slots:
            return False
        return self.is_exact and num_slots == self.bound

    def _copied_to(self, device: torch.device) -> RaggedBlock:
        """Returns a copy of the block on another device."""
        return RaggedBlock(self.positions.to(device), self.bound, self.is_exact)

    def _held(self, num_slots: int) -> Tensor:
        """Returns the index of the token in each slot after the block itself is written, `[B, 1, num_slots]`."""
        slots = torch.arange(num_slots, device=self.positions.device)
        newest = self.positions[:, -1:, None]
        return slot_positions(newest, slots, num_slots)

    def _seen(self, num_slots: int, kind: AttentionKind) -> Tensor:
        """Returns which slots each new token sees, `[B, width, num_slots]` bool."""
        return self._visible(self._held(num_slots), kind)

    def _visible(self, held: Tensor, kind: AttentionKind) -> Tensor:
        """Returns which slots each new token sees, `[B, width, slots]` bool.

        `held` `[B, 1, slots]` has the slots' indices.
        """
        window, causal, from_anchor = kind
        anchor = None
        if from_anchor:
            anchor = self.positions[:, :1, None]
        queries = self.indices[:, :, None]
        return visible(queries, held, window, causal, anchor)

    def _plain_mask(self, num_slots: int, dtype: torch.dtype) -> Tensor:
        """Returns the additive mask `[1, 1, width, num_slots]` of a causal layer in which all
        earlier tokens are seen.
        """
        before = num_slots - self.width
        # The block's own columns form a triangle. All columns before them are seen.
        shape = (self.width, num_slots)
        hidden = torch.full(shape, -math.inf, dtype=dtype, device=self.positions.device)
        return hidden.triu_(before + 1)[None, None]


@dataclass(frozen=True, slots=True, eq=False)
class TreeBlock(RaggedBlock):
    """A tree block describes new tokens that are the nodes of a tree.

    A node sees the tokens before the block, and its own path.
    """

    tree: DraftTree = field(kw_only=True)

    @property
    def indices(self) -> Tensor:
        """Index of each node's token, `[B, width]` int64: the anchor's index plus the node's depth."""
        # Siblings have the same index, because only one of them can follow their parent.
        return self.positions[:, :1] + self.tree.depths

    @property
    def tensors_of_tree(self) -> dict[str, Tensor]:
        """Returns the kernel's arguments for the tree: depths `[B, W]` and ancestors `[B, W, A]`, both int64."""
        return {"depths_BW": self.tree.depths, "ancestors_BWA": self.tree.ancestors}

    def _copied_to(self, device: torch.device) -> RaggedBlock:
        positions = self.positions.to(device)
        return TreeBlock(positions, self.bound, self.is_exact, tree=self.tree.on(device))

    def _seen(self, num_slots: int, kind: AttentionKind) -> Tensor:
        # The nodes of a tree are stored in the slots of a chain. So their own indices replace the chain's indices, and
        # a node sees only its own path.
        held, is_related = self._of_tree(self._held(num_slots))
        return self._visible(held, kind) & is_related

    def _plain_mask(self, num_slots: int, dtype: torch.dtype) -> Tensor:
        nodes = torch.arange(self.width, device=self.positions.device)
        is_ancestor = self.tree.are_ancestors(nodes[None])
        of_nodes = additive_mask(~is_ancestor, dtype)
        # The padding is 0, because all nodes see the tokens before the block.
        mask = nn.functional.pad(of_nodes, (num_slots - self.width, 0))
        return mask[:, None]

    def _of_tree(self, held: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the index of the token in each slot, and whether the token is before the block or
        a node's ancestor.

        The shapes of the results are `[B, 1, slots]` and `[B, width, slots]`. `held` `[B, 1, slots]` has a chain's
        indices.
        """
        anchor = self.positions[:, :1, None]
        node = held - anchor
        is_node = node >= 0
        # For slots before the block, the anchor is looked up, and the result is not used.
        node = node.clamp_min(0)[:, 0]
        depths = self.tree.depths.gather(1, node)
        held = torch.where(is_node, anchor + depths[:, None], held)
        return held, self.tree.are_ancestors(node) | ~is_node


def additive_mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers to add to scores, in the shape of the boolean `hidden`: -inf where it is True, and 0
    elsewhere.
    """
    # The mask has numbers and not booleans, because SDPA would convert a boolean mask in every layer.
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, -math.inf)


def _repeated(mask: Tensor, repeats: int) -> Tensor:
    """Returns a mask `[B, 1, K, R]` with repeated rows: `[B, 1, repeats * K, R]`."""
    if repeats == 1:
        return mask
    return mask.repeat(1, 1, repeats, 1)


class CombinedMasks:
    """An instance holds the masks of a forward over context and blocks together, made once per kind of layer.

    Args:
        given (`torch.Tensor`, `dict` or `None`): The padding mask `[B, total]`, which is 1 where a token is real. Or a
            ready mask for each kind of layer, which is boolean `[B, 1, Q, R]` or a `BlockMask`.
        num_queries (`int`): Number of tokens of the block. They are the newest keys.
        device (`torch.device`): Device of the states.
    """

    def __init__(
        self,
        given: Tensor | Mapping[AttentionKind, Mask] | None,
        num_queries: int,
        device: torch.device,
    ) -> None:
        self._given = given
        self._num_queries = num_queries
        self._device = device
        # Layers of one kind share their mask, because it is as large as the scores of one head.
        self._masks: dict[tuple[object, ...], Mask] = {}

    def of(
        self, kind: AttentionKind, num_keys: int, heads_per_key: int, dtype: torch.dtype
    ) -> Mask:
        """Returns the mask of a layer of this kind over `num_keys` keys. It is additive, or a given `BlockMask`.

        `dtype` is the dtype of the queries. Under autocast it may differ from the dtype of the embeddings.
        """
        key = (kind, num_keys, heads_per_key, dtype)
        if key not in self._masks:
            if isinstance(self._given, Mapping):
                mask = self._ready(self._given[kind], heads_per_key, dtype)
            else:
                mask = self._built(self._given, kind, num_keys, heads_per_key, dtype)
            self._masks[key] = mask
        return self._masks[key]

    def _ready(self, mask: Mask, heads_per_key: int, dtype: torch.dtype) -> Mask:
        """Returns the additive form of a boolean mask, or a `BlockMask` unchanged."""
        if not isinstance(mask, Tensor):
            return mask
        num_queries = mask.shape[-2]
        num_keys = mask.shape[-1]
        repeats = mask_repeats(heads_per_key, num_queries, num_keys, mask.device, dtype)
        additive = additive_mask(~mask, dtype)
        return _repeated(additive, repeats)

    def _built(
        self,
        padding: Tensor | None,
        kind: AttentionKind,
        num_keys: int,
        heads_per_key: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Returns the mask of one block behind its context, in which padding is hidden."""
        # Padding counts as tokens here. So all rows are alike, and the last key is the block's last token.
        keys = torch.arange(num_keys, device=self._device)
        block = RaggedBlock(keys[None, -self._num_queries :])
        repeats = mask_repeats(heads_per_key, self._num_queries, num_keys, self._device, dtype)
        mask = block.dense_mask(num_keys, kind, repeats, dtype)
        if padding is None:
            return mask
        # Only the newest columns are used, because a padding mask may be longer than the keys that a sliding cache
        # returns.
        is_padding = ~padding[:, None, None, -num_keys:].bool()
        return mask.masked_fill(is_padding, -math.inf)


class RaggedMask(NamedTuple):
    """An instance describes the mask of a block in a layer of some kind. [`attend`] makes a tensor
    from it if needed.

    The block is on the device of the keys.
    """

    block: RaggedBlock
    kind: AttentionKind


Mask = Tensor | BlockMask | RaggedMask


def mask_repeats(
    heads_per_key: int, width: int, num_keys: int, device: torch.device, dtype: torch.dtype
) -> int:
    """Returns how often the rows of a mask are repeated: once, or as often as query heads share a key head.

    The mask belongs to `width` tokens over `num_keys` keys, for queries of this dtype.

    If rows are repeated, the query heads of one key head are packed along the token axis. On CUDA they are always
    packed, because SDPA is said to have only its slowest kernel there for a mask together with `enable_gqa` (not
    measured here). On a CPU, the products of a few queries with many keys are slow. In half precision, with three
    query heads per key head, packed attention of one token takes an eighth to a fifth of the time, and of eight tokens
    two thirds (docs/log-archive.md). In float32, packed steps of SmolLM2 take 0.95 of the time over 2,100 keys, 0.89
    over 4,800 keys, and the same time over 560 keys (docs/log.md).
    """
    if device.type == "cuda" or dtype.itemsize < 4:
        return heads_per_key
    # A single token is not packed, so that its sums are the same as in plain decoding.
    if 1 < width <= MOST_PACKED and num_keys >= LEAST_KEYS:
        return heads_per_key
    return 1


def attend(
    query_BHKE: Tensor,
    key_BGRE: Tensor,
    value_BGRE: Tensor,
    mask: Mask | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Returns softmax attention with grouped heads, soft cap and sinks.

    Every kernel is tested against this function.

    With a `RaggedMask`, a kernel computes the attention if `ops.use_kernel` decides so, and then no mask is made.

    The definition is `softmax(cap(q k^T * scaling) + mask) v`, where `cap(s) = softcap * tanh(s / softcap)`. A sink
    adds one score per head, which takes part in the normalisation and has no value. Keys and values are read without
    being repeated.

    Args:
        query_BHKE, key_BGRE, value_BGRE (`torch.Tensor`): Queries, keys and values with any strides. `H` is a multiple
            of `G`.
        mask (`torch.Tensor`, `BlockMask` or `RaggedMask`, *optional*): An additive tensor `[B, 1, repeats * K, R]`
            with `repeats` from [`mask_repeats`]. Or a `BlockMask`, with which FlexAttention runs (training on CUDA).
            Or a `RaggedMask` (decoding).
        scaling (`float`): Factor on the scores.
        softcap (`float`, *optional*): Soft cap on the scores.
        sinks (`torch.Tensor` of shape `[H]`, *optional*): Sink score per head.
        dropout (`float`): Dropout probability of the attention weights.

    Returns `[B, K, H, E]`. Raises `ValueError` if a `BlockMask` comes with a soft cap or dropout.
    """
    if isinstance(mask, RaggedMask):
        block, kind = mask
        if dropout == 0 and ops.use_kernel(ops.block_attention, query_BHKE, key_BGRE, value_BGRE):
            return _attend_by_kernel(
                query_BHKE, key_BGRE, value_BGRE, mask, scaling, softcap, sinks
            )
        # No kernel runs here, so the block makes the mask, once for all layers of this kind.
        _, num_groups, num_slots, _ = key_BGRE.shape
        _, num_heads, width, _ = query_BHKE.shape
        heads_per_key = num_heads // num_groups
        repeats = mask_repeats(heads_per_key, width, num_slots, key_BGRE.device, query_BHKE.dtype)
        mask = block.mask(num_slots, kind, repeats, query_BHKE.dtype)
    # FlexAttention skips hidden blocks, which SDPA would compute. This package passes neither a soft cap nor dropout
    # to it.
    if isinstance(mask, BlockMask):
        if softcap is not None or dropout > 0:
            raise ValueError(
                "expected attention without a soft cap or dropout under a BlockMask, got one; drop it"
            )
        return _attend_by_flex(query_BHKE, key_BGRE, value_BGRE, mask, scaling, sinks)
    if softcap is None and sinks is None:
        return _attend_by_sdpa(query_BHKE, key_BGRE, value_BGRE, mask, scaling, dropout)
    return _attend_explicitly(
        query_BHKE, key_BGRE, value_BGRE, mask, scaling, softcap, sinks, dropout
    )


def _attend_by_kernel(
    query_BHKE: Tensor,
    key_BGRE: Tensor,
    value_BGRE: Tensor,
    mask: RaggedMask,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Returns the result of `attend`, computed by the kernel.

    It finds from the rows' lengths which keys each token sees.
    """
    block, (window, causal, from_anchor) = mask
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
        **block.tensors_of_tree,
    )


def _attend_by_flex(
    query_BHKE: Tensor,
    key_BGRE: Tensor,
    value_BGRE: Tensor,
    mask: BlockMask,
    scaling: float,
    sinks: Tensor | None,
) -> Tensor:
    """Returns the result of `attend`, computed by FlexAttention."""
    flex = flex_attention
    # Training uses FlexAttention on CUDA. Uncompiled, as on other devices, it computes the whole score matrix.
    if query_BHKE.is_cuda:
        flex = _compiled_flex_attention()
    options: dict[str, Any] = {
        "block_mask": mask,
        "scale": scaling,
        "enable_gqa": query_BHKE.shape[1] > key_BGRE.shape[1],
    }
    if sinks is None:
        out: Any = flex(query_BHKE, key_BGRE, value_BGRE, **options)
        return out.transpose(1, 2)
    # FlexAttention has no sinks, but it returns the logarithm of the sum by which the weights were divided. A sink is
    # one more term of this sum.
    if AuxRequest is None:
        out, log_sums = flex(query_BHKE, key_BGRE, value_BGRE, **options, return_lse=True)
    else:
        request = AuxRequest(lse=True)
        out, aux = flex(query_BHKE, key_BGRE, value_BGRE, **options, return_aux=request)
        log_sums = aux.lse
    shares = torch.sigmoid(log_sums - sinks.to(log_sums.dtype)[:, None])
    out = out * shares[..., None].to(out.dtype)
    return out.transpose(1, 2)


def _attend_by_sdpa(
    query_BHKE: Tensor,
    key_BGRE: Tensor,
    value_BGRE: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float,
) -> Tensor:
    """Returns the result of `attend`, computed by SDPA, which has neither a soft cap nor sinks."""
    batch, num_heads, width, _ = query_BHKE.shape
    _, groups, num_keys, _ = key_BGRE.shape
    repeats = num_heads // groups
    is_packed = mask_repeats(repeats, width, num_keys, query_BHKE.device, query_BHKE.dtype) > 1
    query = query_BHKE
    if is_packed:
        # The query heads of a key head follow each other, each with all its tokens, in the same order as in the
        # repeated mask.
        query = query_BHKE.reshape(batch, groups, repeats * width, -1)
    out = nn.functional.scaled_dot_product_attention(
        query,
        key_BGRE,
        value_BGRE,
        attn_mask=mask,
        scale=scaling,
        dropout_p=dropout,
        enable_gqa=repeats > 1 and not is_packed,
    )
    # The result is token-major, because output projections need this form.
    if not is_packed:
        return out.transpose(1, 2)
    by_head = out.view(batch, groups, repeats, width, -1)
    return by_head.permute(0, 3, 1, 2, 4).reshape(batch, width, num_heads, -1)


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
    """Returns the result of `attend`, computed with the whole score matrix in memory, for soft caps and sinks."""
    batch, num_heads, width, _ = query_BHKE.shape
    groups = key_BGRE.shape[1]
    num_keys = key_BGRE.shape[2]
    repeats = num_heads // groups
    # With a dimension for the query heads of a key head, the product reads the keys without repeating them.
    grouped = query_BHKE.reshape(batch, groups, repeats, width, -1)
    keys = key_BGRE[:, :, None].transpose(3, 4)
    scores = (grouped @ keys) * scaling
    # The cap is applied before the mask, because the cap would turn -inf into its lowest score.
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        # The rows of a repeated mask are split into one part per query head. Other masks are the same for all heads.
        scores = scores + mask.view(mask.shape[0], 1, -1, width, num_keys)
    if sinks is not None:
        # The sink is one more column, as a key that every query sees.
        sink = sinks.to(scores.dtype).view(1, groups, repeats, 1, 1)
        sink = sink.expand(batch, -1, -1, width, 1)
        scores = torch.cat([scores, sink], dim=-1)
    # The softmax is computed in float32 or wider, as in Transformers' eager attention.
    dtype = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=dtype)
    # The sink has no value, so its column is dropped after the softmax.
    weights = weights[..., :num_keys].to(value_BGRE.dtype)
    # The probability of dropout is above 0 only in training.
    weights = nn.functional.dropout(weights, p=dropout, training=dropout > 0)
    by_head = weights @ value_BGRE[:, :, None]
    token_major = by_head.permute(0, 3, 1, 2, 4)
    return token_major.reshape(batch, width, num_heads, -1)


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    """Returns FlexAttention, compiled to one kernel for all shapes. Uncompiled, it computes the whole score matrix.

    The first call raises any error of the compiler, in the forward or the backward pass. At this time the caller can
    still use SDPA.
    """
    from torch._functorch import config as lowering

    # With `fullgraph`, a call past torch's limit of recompilations fails. Without it, the call would run uncompiled.
    compiled = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    # If torch has this setting, the backward pass is compiled together with the forward pass.
    if not hasattr(lowering, "force_non_lazy_backward_lowering"):
        return compiled

    def flex(*args: Any, **kwargs: Any) -> Any:
        with lowering.patch(force_non_lazy_backward_lowering=True):
            return compiled(*args, **kwargs)

    return flex
