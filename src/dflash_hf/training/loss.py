"""The training objective: cross entropy on each slot's own token, decaying with the slot, and the accuracy per slot.

`loss = sum(w * CE) / sum(w)` with `w_k = exp(-(k - 1) / gamma)` for slots `k >= 1`; slot 0 holds the anchor and has no
loss. Source: arXiv 2602.06036 section 4.2. A DFlash 2 draft adds the cross entropy of its selector over the candidates
of a slot, behind the right token, with the same weights: `sum(w * (CE + CE_selector)) / sum(w)`; a slot whose token is
no candidate adds nothing. z-lab has published no objective for it; SpecForge (pull request 772) and speculators (1006)
put a missing token among the candidates instead.

Shapes: `B` rows, `A` anchors, `K` block, `N` slots with a label, `V` vocabulary, `C` candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dflash_hf.dflash2 import CandidateSelector
from dflash_hf.training.anchors import Anchors


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLabels:
    """What each slot should predict.

    Args:
        ids (`torch.Tensor` of shape `[B, A, K]`, int64): Token at the slot's own index.
        mask (`torch.Tensor` of shape `[B, A, K]`, bool): Slots with a label: after the anchor, in the same answer.
        before (`torch.Tensor` of shape `[B, A, K]`, int64): Token in front of the slot, as the target was shown it.
    """

    ids: Tensor
    mask: Tensor
    before: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLoss:
    """Sums over the slots of a batch, so that batches can be joined exactly.

    Args:
        loss (`torch.Tensor`, scalar): `sum(w * CE)`; carries the gradient.
        selector_loss (`torch.Tensor`, scalar): `sum(w * CE_selector)`; 0 without a selector. The objective is the sum
            of the two.
        weight (`torch.Tensor`, scalar): `sum(w)`.
        correct, count (`torch.Tensor` of shape `[K]`, int64): Right argmaxes (of the selector, where there is one) and
            labels per slot.
        blocks (`torch.Tensor`, scalar, int64): Number of anchors.
        accepted (`torch.Tensor`, scalar, int64): Right argmaxes before the first wrong one, over all blocks.
    """

    loss: Tensor
    selector_loss: Tensor
    weight: Tensor
    correct: Tensor
    count: Tensor
    blocks: Tensor
    accepted: Tensor


def decay_weights(block_size: int, gamma: float) -> Tensor:
    """Returns `w` of shape `[K]`, float64: 0 in slot 0, then `exp(-(k - 1) / gamma)`."""
    weights = torch.exp(-(torch.arange(block_size, dtype=torch.float64, device="cpu") - 1) / gamma)
    weights[0] = 0
    return weights


def block_labels(
    token_ids_BS: Tensor, loss_mask_BS: Tensor, anchors: Anchors, input_ids_BS: Tensor | None = None
) -> BlockLabels:
    """Looks up what each slot should predict; a block's labels stop where its answer stops.

    Args:
        token_ids_BS (`torch.Tensor` of shape `[B, S]`, int64): The right token at each index.
        loss_mask_BS (`torch.Tensor` of shape `[B, S]`, bool): Tokens that the target wrote.
        anchors (`Anchors`): The blocks.
        input_ids_BS (`torch.Tensor` of shape `[B, S]`, int64, *optional*): The tokens that the target was shown;
            default `token_ids_BS`.
    """
    batch, num_columns = token_ids_BS.shape
    positions = anchors.positions
    inside = (positions < num_columns) & anchors.keep[:, :, None]
    columns = positions.clamp_max(num_columns - 1).view(batch, -1)
    wanted = loss_mask_BS.gather(1, columns).view_as(positions) & inside
    wanted = wanted.cumprod(dim=-1).bool()
    wanted[:, :, 0] = False
    shown = token_ids_BS if input_ids_BS is None else input_ids_BS
    return BlockLabels(
        ids=token_ids_BS.gather(1, columns).view_as(positions),
        mask=wanted,
        before=shown.gather(1, (columns - 1).clamp_min(0)).view_as(positions),
    )


def _chunk_loss(
    hidden_ND: Tensor,
    labels_N: Tensor,
    before_N: Tensor,
    weights_N: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    selector: CandidateSelector | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`sum(w * CE)`, `sum(w * CE_selector)` and the argmaxes of some slots."""
    logits = logits_of(hidden_ND)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = nn.functional.cross_entropy(logits, labels_N, reduction="none")
    weights_N = weights_N.to(losses.dtype)
    loss = (losses * weights_N).sum()
    if selector is None:
        return loss, torch.zeros_like(loss), logits.detach().argmax(dim=-1)
    candidates, scores = selector.score(hidden_ND, before_N[:, None], logits)
    is_label = candidates == labels_N[:, None]
    # The label's log-probability where it is a candidate; elsewhere the sum is empty.
    own = torch.log_softmax(scores[:, 0], dim=-1).masked_fill(~is_label, 0).sum(dim=-1)
    best = candidates.gather(1, scores[:, 0].detach().argmax(dim=-1, keepdim=True))[:, 0]
    return loss, -(own * weights_N).sum(), best


def block_loss(
    hidden_BQD: Tensor,
    labels: BlockLabels,
    weights_K: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    chunk_blocks: int = 128,
    selector: CandidateSelector | None = None,
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
        selector (`CandidateSelector`, *optional*): The draft's selector, trained behind the right token of each slot.
            While all is right so far that token is the drafted one, so `accepted` is what the walk would give.
    """
    block_size = labels.ids.shape[2]
    wanted = labels.mask.flatten()
    hidden_ND = hidden_BQD.flatten(0, 1)[wanted]
    ids_N, before_N = labels.ids.flatten()[wanted], labels.before.flatten()[wanted]
    weights_N = weights_K.to(hidden_ND.device).expand_as(labels.ids).flatten()[wanted]
    right = torch.zeros_like(labels.mask)
    # An empty batch still has to give a loss that can be differentiated.
    loss = selector_loss = hidden_ND.sum() * 0
    best: list[Tensor] = []
    size = chunk_blocks * (block_size - 1)
    for start in range(0, len(ids_N), size):
        rows = slice(start, start + size)
        part = (hidden_ND[rows], ids_N[rows], before_N[rows], weights_N[rows])
        if len(ids_N) > size and torch.is_grad_enabled():
            sums = checkpoint(_chunk_loss, *part, logits_of, selector, use_reentrant=False)
        else:
            sums = _chunk_loss(*part, logits_of, selector)
        partial, selector_partial, argmax = sums
        loss, selector_loss = loss + partial, selector_loss + selector_partial
        best.append(argmax)
    if best:
        right[labels.mask] = torch.cat(best) == ids_N
    accepted = right[:, :, 1:].cumprod(dim=-1).sum()
    return BlockLoss(
        loss=loss,
        selector_loss=selector_loss,
        weight=weights_N.sum(),
        correct=right.sum(dim=(0, 1)),
        count=labels.mask.sum(dim=(0, 1)),
        blocks=labels.mask[:, :, 1].sum(),
        accepted=accepted,
    )


__all__ = ["BlockLabels", "BlockLoss", "block_labels", "block_loss", "decay_weights"]
