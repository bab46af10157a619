"""Attention of a block of new tokens over a ragged cache: one function for the target's verify and for the draft.

`RaggedBlock` holds where each row stands. Slots and masks are derived from it once per step and not once per layer.
`attend` is the arithmetic; `target_model.reentry` hands it to Transformers.

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

# How newer torch is asked for more than the result; older ones have an argument for it.
AuxRequest: Any = getattr(flex_module, "AuxRequest", None)


# The bound of a block whose rows may be of any length.
NO_BOUND = sys.maxsize
# On a CPU, in float32 and float64, query heads are packed up to so many tokens and from so many keys on, as
# `mask_repeats` says.
MOST_PACKED = 16
LEAST_KEYS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class RaggedBlock:
    """New tokens of every row, the first of row `b` at index `positions[b, 0]`; nothing is read on the host.

    Each token follows the one before it; in a [`TreeBlock`] they are the nodes of a tree.
    """

    # [B, width], int64: index of each token in its row, counting up by one. Keys and values of a tree's nodes go there
    # too. The tensor is not copied: whoever changes it moves the block.
    positions: Tensor
    # A length that no row exceeds after this block, where the host knows one. Keys beyond it are not read.
    bound: int = NO_BOUND
    # Whether the host knows that every row ends exactly at `bound`. A layer in which every query sees all keys needs
    # no mask then; without one SDPA takes half the time on a CPU.
    is_exact: bool = False
    # Derived tensors are made once per step and not once per layer.
    _slots: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)
    _masks: dict[tuple[object, ...], Tensor] = field(default_factory=dict, init=False, repr=False)
    _copies: dict[torch.device, RaggedBlock] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def at(
        cls, lengths: Tensor, width: int, bound: int = NO_BOUND, is_exact: bool = False
    ) -> RaggedBlock:
        """Returns a block of `width` tokens behind rows of these `lengths` `[B]` int64, which are copied."""
        steps = torch.arange(width, device=lengths.device)
        # The first new token stands at the row's length, because indices begin at 0.
        return cls(lengths[:, None] + steps, bound, is_exact)

    @property
    def width(self) -> int:
        """New tokens per row."""
        return self.positions.shape[1]

    @property
    def lengths(self) -> Tensor:
        """Tokens each row already has in its cache, `[B]`."""
        return self.positions[:, 0]

    @property
    def indices(self) -> Tensor:
        """Index that each token has in its row if it is accepted, `[B, width]`: its position is derived from it."""
        return self.positions

    @property
    def tensors_of_tree(self) -> dict[str, Tensor]:
        """Returns what the kernel is given of a tree: nothing, as it knows that a chain's depths count up."""
        return {}

    def on(self, device: torch.device) -> RaggedBlock:
        """Returns the same block on another device; it is copied once per step."""
        if device == self.positions.device:
            return self
        # Layers may be on several devices, and each one asks for the block.
        if device not in self._copies:
            self._copies[device] = self._copied_to(device)
        return self._copies[device]

    def extent(self, ring: int) -> int:
        """Returns how many slots of a buffer of `ring` slots have to be read."""
        # Beyond the ring there is nothing to read: it may have wrapped where the bound is longer. Without a bound all
        # of it is read, and the mask hides what is not written.
        return min(ring, self.bound)

    def slots(self, ring: int) -> Tensor:
        """Returns the slots of the new tokens in a buffer `[B * ring, ...]`: int64 of shape `[B * width]`."""
        # Layers with rings of one size share their slots.
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
        """Returns the additive mask `[B, 1, repeats * width, num_slots]` of a layer of this kind: 0 or -inf.

        The result is `None` where nothing has to be hidden.

        Args:
            num_slots (`int`): Slots that are read: a whole ring, or the first `extent` slots of a longer buffer. No
                index has wrapped in the latter, so that the shorter length gives the same positions.
            kind (`AttentionKind`): Kind of the layer.
            repeats (`int`): Query heads in a row of the mask, see [`mask_repeats`].
            dtype (`torch.dtype`): Dtype of the scores.
        """
        _, causal, _ = kind
        is_plain = self._holds_all(num_slots, kind)
        # A single token, and every token of a layer that is not causal, sees all of it.
        if is_plain and (self.width == 1 or not causal):
            return None
        return self.dense_mask(num_slots, kind, repeats, dtype)

    def dense_mask(
        self, num_slots: int, kind: AttentionKind, repeats: int, dtype: torch.dtype
    ) -> Tensor:
        """Returns [`mask`] as a tensor, also where nothing has to be hidden."""
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
        """Returns True if the host knows what every slot holds, and no token is out of the window."""
        window, _, _ = kind
        if window is not None and window < num_slots:
            return False
        return self.is_exact and num_slots == self.bound

    def _copied_to(self, device: torch.device) -> RaggedBlock:
        """Returns a copy of the block on another device."""
        return RaggedBlock(self.positions.to(device), self.bound, self.is_exact)

    def _held(self, num_slots: int) -> Tensor:
        """Returns the index of the token in each slot `[B, 1, num_slots]`, once the block itself is written."""
        slots = torch.arange(num_slots, device=self.positions.device)
        newest = self.positions[:, -1:, None]
        return slot_positions(newest, slots, num_slots)

    def _seen(self, num_slots: int, kind: AttentionKind) -> Tensor:
        """Returns which slots each new token sees, `[B, width, num_slots]`."""
        return self._visible(self._held(num_slots), kind)

    def _visible(self, held: Tensor, kind: AttentionKind) -> Tensor:
        """Returns which slots each new token sees by the indices that they hold `[B, 1, slots]`."""
        window, causal, from_anchor = kind
        anchor = None
        if from_anchor:
            anchor = self.positions[:, :1, None]
        queries = self.indices[:, :, None]
        return visible(queries, held, window, causal, anchor)

    def _plain_mask(self, num_slots: int, dtype: torch.dtype) -> Tensor:
        """Returns the additive mask `[1, 1, width, num_slots]` of a causal layer where all earlier tokens are seen."""
        before = num_slots - self.width
        # The block's own columns are a triangle; all columns before are seen.
        shape = (self.width, num_slots)
        hidden = torch.full(shape, -math.inf, dtype=dtype, device=self.positions.device)
        return hidden.triu_(before + 1)[None, None]


@dataclass(frozen=True, slots=True, eq=False)
class TreeBlock(RaggedBlock):
    """New tokens that are the nodes of a tree: a node sees the tokens before the block, and its own path."""

    tree: DraftTree = field(kw_only=True)

    @property
    def indices(self) -> Tensor:
        """Index of each node's token, `[B, width]` int64: the anchor's index plus the node's depth."""
        # Siblings share an index, because only one of them can follow their parent.
        return self.positions[:, :1] + self.tree.depths

    @property
    def tensors_of_tree(self) -> dict[str, Tensor]:
        """Returns what the kernel is given of the tree: depths `[B, W]` and ancestors `[B, W, A]`, both int64."""
        return {"depths_BW": self.tree.depths, "ancestors_BWA": self.tree.ancestors}

    def _copied_to(self, device: torch.device) -> RaggedBlock:
        positions = self.positions.to(device)
        return TreeBlock(positions, self.bound, self.is_exact, tree=self.tree.on(device))

    def _seen(self, num_slots: int, kind: AttentionKind) -> Tensor:
        # A tree's nodes stand in a chain's slots: their indices are put in place of a chain's, and a node sees no
        # other path than its own.
        held, is_related = self._of_tree(self._held(num_slots))
        return self._visible(held, kind) & is_related

    def _plain_mask(self, num_slots: int, dtype: torch.dtype) -> Tensor:
        nodes = torch.arange(self.width, device=self.positions.device)
        is_ancestor = self.tree.are_ancestors(nodes[None])
        of_nodes = additive_mask(~is_ancestor, dtype)
        # The padding is 0: what stands before the block is seen by all nodes.
        mask = nn.functional.pad(of_nodes, (num_slots - self.width, 0))
        return mask[:, None]

    def _of_tree(self, held: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the index of the token in each slot, and whether it is before the block or a node's ancestor.

        The results are `[B, 1, slots]` and `[B, width, slots]`. `held` `[B, 1, slots]` has a chain's indices.
        """
        anchor = self.positions[:, :1, None]
        node = held - anchor
        is_node = node >= 0
        # Slots before the block are looked up at the anchor; what is found there is not used.
        node = node.clamp_min(0)[:, 0]
        depths = self.tree.depths.gather(1, node)
        held = torch.where(is_node, anchor + depths[:, None], held)
        return held, self.tree.are_ancestors(node) | ~is_node


def additive_mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns numbers to add to scores, in the shape of the boolean `hidden`: -inf where it is True, 0 elsewhere."""
    # Numbers and no booleans: SDPA turns a boolean mask into these in every layer.
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, -math.inf)


def _repeated(mask: Tensor, repeats: int) -> Tensor:
    """Returns a mask `[B, 1, K, R]` with its rows repeated: `[B, 1, repeats * K, R]`."""
    if repeats == 1:
        return mask
    return mask.repeat(1, 1, repeats, 1)


class CombinedMasks:
    """Masks of a forward over context and blocks together, made once per kind of layer.

    Args:
        given (`torch.Tensor`, `dict` or `None`): The padding mask `[B, total]`, 1 where a token is real; or a ready
            mask per kind of layer, boolean `[B, 1, Q, R]` or a `BlockMask`.
        num_queries (`int`): Tokens of the block, the newest of all keys.
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
        # Layers of one kind share their mask, which is as large as the scores of one head.
        self._masks: dict[tuple[object, ...], Mask] = {}

    def of(
        self, kind: AttentionKind, num_keys: int, heads_per_key: int, dtype: torch.dtype
    ) -> Mask:
        """Returns the mask of a layer of this kind over `num_keys` keys, additive unless it is a `BlockMask`.

        `dtype` is the queries', which under autocast need not be the embeddings'.
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
        """Returns the additive form of a boolean mask, and a `BlockMask` as it is."""
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
        """Returns the mask of one block behind its context, without what is padding."""
        # Padding counts as a token here, so that all rows are alike and the last key is the block's last.
        keys = torch.arange(num_keys, device=self._device)
        block = RaggedBlock(keys[None, -self._num_queries :])
        repeats = mask_repeats(heads_per_key, self._num_queries, num_keys, self._device, dtype)
        mask = block.dense_mask(num_keys, kind, repeats, dtype)
        if padding is None:
            return mask
        # The newest columns: a mask may be longer than what a sliding cache hands out.
        is_padding = ~padding[:, None, None, -num_keys:].bool()
        return mask.masked_fill(is_padding, -math.inf)


class RaggedMask(NamedTuple):
    """The mask of a block in a layer of some kind, on the device of the keys, of which [`attend`] makes a tensor."""

    block: RaggedBlock
    kind: AttentionKind


Mask = Tensor | BlockMask | RaggedMask


def mask_repeats(
    heads_per_key: int, width: int, num_keys: int, device: torch.device, dtype: torch.dtype
) -> int:
    """Returns how often the rows of a mask are repeated: once, or once per query head of a key head.

    The mask is of `width` tokens over `num_keys` keys, for queries of this dtype.

    Repeated rows mean that the query heads of one key head are laid along the token axis. On CUDA that is done because
    a mask together with `enable_gqa` is said to leave SDPA only its slowest kernel there (not measured here). On a CPU
    the products of a few queries with many keys are slow. Packed, three heads to a key head, in half precision one
    token takes an eighth to a fifth of the time and eight tokens two thirds (docs/log-archive.md). In float32 steps of
    SmolLM2 take 0.95 of the time over 2,100 keys, 0.89 over 4,800, and as long over 560 (docs/log.md).
    """
    if device.type == "cuda" or dtype.itemsize < 4:
        return heads_per_key
    # A single token is added up as plain decoding adds it up, which is not packed.
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
    """Returns softmax attention with grouped heads, soft cap and sinks; every kernel is tested against it.

    Under a `RaggedMask` a kernel computes it where `ops.use_kernel` decides so, and no mask is made.

    The definition is `softmax(cap(q k^T * scaling) + mask) v`, where `cap(s) = softcap * tanh(s / softcap)`. A sink
    adds one score per head, which takes part in the normalisation and has no value. Keys and values are read as they
    are, never repeated.

    Args:
        query_BHKE, key_BGRE, value_BGRE (`torch.Tensor`): `H` is a multiple of `G`. Any strides.
        mask (`torch.Tensor`, `BlockMask` or `RaggedMask`, *optional*): An additive tensor `[B, 1, repeats * K, R]`
            with `repeats` from [`mask_repeats`]; a `BlockMask`, which goes to FlexAttention (training on CUDA); or a
            `RaggedMask` (decoding).
        scaling (`float`): Factor on the scores.
        softcap (`float`, *optional*): Soft cap.
        sinks (`torch.Tensor` of shape `[H]`, *optional*): Sink score per head.
        dropout (`float`): Dropout on the weights.

    Returns `[B, K, H, E]`; raises `ValueError` if a `BlockMask` comes with a soft cap or dropout.
    """
    if isinstance(mask, RaggedMask):
        block, kind = mask
        if dropout == 0 and ops.use_kernel(ops.block_attention, query_BHKE, key_BGRE, value_BGRE):
            return _attend_by_kernel(
                query_BHKE, key_BGRE, value_BGRE, mask, scaling, softcap, sinks
            )
        # No kernel runs here: the block makes the mask, once for all layers of this kind.
        _, num_groups, num_slots, _ = key_BGRE.shape
        _, num_heads, width, _ = query_BHKE.shape
        heads_per_key = num_heads // num_groups
        repeats = mask_repeats(heads_per_key, width, num_slots, key_BGRE.device, query_BHKE.dtype)
        mask = block.mask(num_slots, kind, repeats, query_BHKE.dtype)
    # FlexAttention skips blocks that are hidden, where SDPA would compute them; it is given neither of these two.
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
    """Returns `attend` by the kernel, which finds from the rows' lengths what each token sees."""
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
    """Returns `attend` by FlexAttention."""
    flex = flex_attention
    # Training asks for it on CUDA. Uncompiled, as elsewhere, it computes the whole score matrix.
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
    # FlexAttention knows no sinks, but says by what it has divided the weights. A sink is one more term of that sum.
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
    """Returns `attend` by SDPA, which knows neither a soft cap nor sinks."""
    batch, num_heads, width, _ = query_BHKE.shape
    _, groups, num_keys, _ = key_BGRE.shape
    repeats = num_heads // groups
    is_packed = mask_repeats(repeats, width, num_keys, query_BHKE.device, query_BHKE.dtype) > 1
    query = query_BHKE
    if is_packed:
        # The query heads of a key head follow each other, each with all its tokens, as in the repeated mask.
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
    # Token-major, as output projections take it.
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
    """Returns `attend` with the whole score matrix in memory, for soft caps and sinks."""
    batch, num_heads, width, _ = query_BHKE.shape
    groups = key_BGRE.shape[1]
    num_keys = key_BGRE.shape[2]
    repeats = num_heads // groups
    # A dimension for the query heads of a key head lets the product read the keys as they are.
    grouped = query_BHKE.reshape(batch, groups, repeats, width, -1)
    keys = key_BGRE[:, :, None].transpose(3, 4)
    scores = (grouped @ keys) * scaling
    # The cap comes before the mask: -inf would become the cap's lowest score.
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        # The rows of a repeated mask fall into one part per query head; others are alike for all heads.
        scores = scores + mask.view(mask.shape[0], 1, -1, width, num_keys)
    if sinks is not None:
        # One more column, which is a key that every query sees.
        sink = sinks.to(scores.dtype).view(1, groups, repeats, 1, 1)
        sink = sink.expand(batch, -1, -1, width, 1)
        scores = torch.cat([scores, sink], dim=-1)
    # In float32 or wider, as Transformers' eager attention normalises.
    dtype = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=dtype)
    # The sink has taken its share and has no value.
    weights = weights[..., :num_keys].to(value_BGRE.dtype)
    # The probability is above 0 in training alone.
    weights = nn.functional.dropout(weights, p=dropout, training=dropout > 0)
    by_head = weights @ value_BGRE[:, :, None]
    token_major = by_head.permute(0, 3, 1, 2, 4)
    return token_major.reshape(batch, width, num_heads, -1)


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    """Returns FlexAttention as one kernel for all shapes; uncompiled it computes the whole score matrix.

    A failure of the compiler, in the forward or the backward pass, is raised by the first call, while SDPA can still
    stand in.
    """
    from torch._functorch import config as lowering

    # `fullgraph` makes a call past torch's limit of recompilations fail; it would go on uncompiled otherwise.
    compiled = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    # The backward pass is compiled with the forward one, where torch has this setting.
    if not hasattr(lowering, "force_non_lazy_backward_lowering"):
        return compiled

    def flex(*args: Any, **kwargs: Any) -> Any:
        with lowering.patch(force_non_lazy_backward_lowering=True):
            return compiled(*args, **kwargs)

    return flex
