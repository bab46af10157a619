"""The training objective: cross entropy on each slot's own token, decaying with the slot, and the accuracy per slot.

`loss = sum(w * CE) / sum(w)` with `w_k = exp(-(k - 1) / gamma)` for slots `k >= 1`; slot 0 holds the anchor and has no
loss. Source: arXiv 2602.06036 section 4.2. Shapes: `B` rows, `A` anchors, `K` block, `N` slots with a label, `V`
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dflash_hf.training.anchors import Anchors


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLabels:
    """What each slot should predict.

    Args:
        ids (`torch.Tensor` of shape `[B, A, K]`, int64): Token at the slot's own index.
        mask (`torch.Tensor` of shape `[B, A, K]`, bool): Slots with a label: after the anchor, in the same answer.
    """

    ids: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLoss:
    """Sums over the slots of a batch, so that batches can be joined exactly.

    Args:
        loss (`torch.Tensor`, scalar): `sum(w * CE)`; carries the gradient.
        weight (`torch.Tensor`, scalar): `sum(w)`.
        correct, count (`torch.Tensor` of shape `[K]`, int64): Right argmaxes and labels per slot.
        blocks (`torch.Tensor`, scalar, int64): Number of anchors.
        accepted (`torch.Tensor`, scalar, int64): Right argmaxes before the first wrong one, over all blocks.
    """

    loss: Tensor
    weight: Tensor
    correct: Tensor
    count: Tensor
    blocks: Tensor
    accepted: Tensor


def decay_weights(block_size: int, gamma: float) -> Tensor:
    """Returns `w` of shape `[K]`, float64: 0 in slot 0, then `exp(-(k - 1) / gamma)`."""
    weights = torch.exp(-(torch.arange(block_size, dtype=torch.float64) - 1) / gamma)
    weights[0] = 0
    return weights


def block_labels(token_ids_BS: Tensor, loss_mask_BS: Tensor, anchors: Anchors) -> BlockLabels:
    """Looks up what each slot should predict; a block's labels stop where its answer stops.

    Args:
        token_ids_BS (`torch.Tensor` of shape `[B, S]`, int64): The right token at each index.
        loss_mask_BS (`torch.Tensor` of shape `[B, S]`, bool): Tokens that the target wrote.
        anchors (`Anchors`): The blocks.
    """
    batch, num_columns = token_ids_BS.shape
    positions = anchors.positions
    inside = (positions < num_columns) & anchors.keep[:, :, None]
    columns = positions.clamp_max(num_columns - 1).view(batch, -1)
    wanted = loss_mask_BS.gather(1, columns).view_as(positions) & inside
    wanted = wanted.cumprod(dim=-1).bool()
    wanted[:, :, 0] = False
    return BlockLabels(ids=token_ids_BS.gather(1, columns).view_as(positions), mask=wanted)


def _chunk_loss(
    hidden_ND: Tensor, labels_N: Tensor, weights_N: Tensor, logits_of: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """`sum(w * CE)` and the argmaxes of some slots."""
    logits = logits_of(hidden_ND)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = nn.functional.cross_entropy(logits, labels_N, reduction="none")
    return (losses * weights_N.to(losses.dtype)).sum(), logits.detach().argmax(dim=-1)


def block_loss(
    hidden_BQD: Tensor,
    labels: BlockLabels,
    weights_K: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    chunk_blocks: int = 128,
) -> BlockLoss:
    """Sums the weighted cross entropy over all slots with a label.

    The head sees the labelled slots of `chunk_blocks` blocks at a time; with more than one chunk it runs again in the
    backward pass instead of keeping its logits, so memory is `chunk_blocks * K * V` whatever the number of anchors.

    Args:
        hidden_BQD (`torch.Tensor` of shape `[B, A * K, D]`): The draft's output.
        labels (`BlockLabels`): What to predict.
        weights_K (`torch.Tensor` of shape `[K]`): Weight of each slot.
        logits_of (callable): Hidden states `[N, D]` to logits `[N, V]`.
        chunk_blocks (`int`): Blocks per application of the head.
    """
    block_size = labels.ids.shape[2]
    wanted = labels.mask.flatten()
    hidden_ND = hidden_BQD.flatten(0, 1)[wanted]
    ids_N = labels.ids.flatten()[wanted]
    weights_N = weights_K.to(hidden_ND.device).expand_as(labels.ids).flatten()[wanted]
    right = torch.zeros_like(labels.mask)
    # An empty batch still has to give a loss that can be differentiated.
    loss = hidden_ND.sum() * 0
    best: list[Tensor] = []
    size = chunk_blocks * (block_size - 1)
    for start in range(0, len(ids_N), size):
        part = (hidden_ND[start : start + size], ids_N[start : start + size], weights_N[start : start + size])
        if len(ids_N) > size and torch.is_grad_enabled():
            partial, argmax = checkpoint(_chunk_loss, *part, logits_of, use_reentrant=False)
        else:
            partial, argmax = _chunk_loss(*part, logits_of)
        loss = loss + partial
        best.append(argmax)
    if best:
        right[labels.mask] = torch.cat(best) == ids_N
    accepted = right[:, :, 1:].cumprod(dim=-1).sum()
    return BlockLoss(
        loss=loss,
        weight=weights_N.sum(),
        correct=right.sum(dim=(0, 1)),
        count=labels.mask.sum(dim=(0, 1)),
        blocks=labels.mask[:, :, 1].sum(),
        accepted=accepted,
    )


__all__ = ["BlockLabels", "BlockLoss", "block_labels", "block_loss", "decay_weights"]
