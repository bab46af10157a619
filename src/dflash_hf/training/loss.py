"""The training objective: what each slot should predict, how wrong it is, and how much each slot counts.

`loss = sum(w * CE) / sum(w)`, `w_k = exp(-(k - 1) / gamma)` for the k-th proposal; the anchor's slot has no loss.
Source: arXiv 2602.06036, section 4.2.

A DFlash 2 draft adds the cross entropy of its selector over the candidates of a slot, behind the right token, with the
same weights; a slot whose token is no candidate adds nothing. z-lab has published no objective for it; SpecForge (pull
request 772) and speculators (1006) put a missing token among the candidates instead.

Shapes: `B` rows, `A` anchors, `K` block, `N` slots with a loss, `V` vocabulary, `C` candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dflash_hf.dflash2 import CandidateSelector
from dflash_hf.training.anchors import Anchors
from dflash_hf.training.collators import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLabels:
    """What each slot should predict."""

    ids: Tensor  # [B, A, K], int64: the token that the slot should propose
    mask: Tensor  # [B, A, K], bool: slots with a label: after the anchor, in the same answer
    before: Tensor  # [B, A, K], int64: token in front of that one, as the target was shown it

    def map(self, change: Callable[[Tensor], Tensor]) -> BlockLabels:
        """Returns labels of which each tensor is changed."""
        return BlockLabels(ids=change(self.ids), mask=change(self.mask), before=change(self.before))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLoss:
    """Sums over the slots of a batch, so that batches can be joined exactly."""

    loss: Tensor  # scalar: `sum(w * l)`; carries the gradient
    # scalar: `sum(w * CE_selector)`; 0 without a selector. The objective is the sum of the two.
    selector_loss: Tensor
    weight: Tensor  # scalar: what both are divided by; see `loss_weight`
    # [K], int64: right argmaxes (of the selector, where there is one) and labels per slot
    correct: Tensor
    count: Tensor
    blocks: Tensor  # scalar: number of anchors
    accepted: Tensor  # scalar: right argmaxes before the first wrong one, over all blocks


def decay_weights(block_size: int, gamma: float) -> Tensor:
    """Returns `w` `[K]`, float64: 0 in the anchor's slot, then `exp(-(k - 1) / gamma)`."""
    weights = torch.exp(-(torch.arange(block_size, dtype=torch.float64, device="cpu") - 1) / gamma)
    weights[0] = 0
    return weights


def block_labels(batch: Batch, anchors: Anchors, next_ids_BS: Tensor | None = None) -> BlockLabels:
    """Looks up what each slot should predict; a block's labels stop where its answer stops.

    Args:
        next_ids_BS (`torch.Tensor` of shape `[B, S]`, int64, *optional*): The right token after each token; default
            those of the batch.
    """
    num_rows, num_columns = batch.input_ids.shape
    positions = anchors.positions
    columns = positions.clamp_max(num_columns - 1)
    before = (columns - 1).clamp_min(0)
    rows = torch.arange(num_rows, device=columns.device)[:, None, None]
    wanted = batch.loss_mask[rows, columns] & (positions < num_columns) & anchors.keep[:, :, None]
    wanted = wanted.cumprod(dim=-1).bool()
    wanted[:, :, 0] = False
    return BlockLabels(
        ids=batch.input_ids[rows, columns] if next_ids_BS is None else next_ids_BS[rows, before],
        mask=wanted,
        before=batch.input_ids[rows, before],
    )


def loss_weight(labels: BlockLabels, weights_K: Tensor) -> Tensor:
    """Returns what the sums of a batch are divided by, before any forward: `sum(w)`."""
    return (labels.mask * weights_K.to(labels.mask.device)).sum()


def _slot_losses(
    hidden_ND: Tensor,
    slots: BlockLabels,
    rows: slice,
    logits_of: Callable[[Tensor], Tensor],
    selector: CandidateSelector | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, loss of the selector and argmax of some slots, on the states' device whatever the head's."""
    logits = logits_of(hidden_ND)
    slots = slots.map(lambda value: value[rows].to(logits.device))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = nn.functional.cross_entropy(logits, slots.ids, reduction="none")
    best, extra = logits.detach().argmax(dim=-1), torch.zeros_like(losses)
    if selector is not None:
        candidates, scores = selector.score(hidden_ND, slots.before[:, None], logits)
        is_label = candidates == slots.ids[:, None]
        # The label's log-probability where it is a candidate; elsewhere the sum is empty.
        extra = -torch.log_softmax(scores[:, 0], dim=-1).masked_fill(~is_label, 0).sum(dim=-1)
        best = candidates.gather(1, scores[:, 0].detach().argmax(dim=-1, keepdim=True))[:, 0]
    return losses.to(hidden_ND.device), extra.to(hidden_ND.device), best.to(hidden_ND.device)


def _all_losses(
    hidden_ND: Tensor,
    slots: BlockLabels,
    logits_of: Callable[[Tensor], Tensor],
    selector: CandidateSelector | None,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`_slot_losses` of all slots, `size` of them at a time."""
    chunks = [slice(start, start + size) for start in range(0, len(hidden_ND), size)]

    def losses_of(states: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        return _slot_losses(states, slots, rows, logits_of, selector)

    trains = torch.is_grad_enabled() and hidden_ND.requires_grad
    parts = [
        checkpoint(losses_of, hidden_ND[rows], rows, use_reentrant=False)
        if trains and len(chunks) > 1
        else losses_of(hidden_ND[rows], rows)
        for rows in chunks
    ]
    losses, extra, best = (torch.cat(part) for part in zip(*parts, strict=True))
    return losses, extra, best


def block_loss(
    hidden_BQD: Tensor,
    labels: BlockLabels,
    weights_K: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    chunk_blocks: int = 128,
    selector: CandidateSelector | None = None,
) -> BlockLoss:
    """Sums the weighted losses over all slots with a label.

    The head sees the labelled slots of `chunk_blocks` blocks at a time, and its logits are not kept, so memory is
    `chunk_blocks * K * V` whatever the number of anchors.

    Args:
        hidden_BQD (`torch.Tensor` of shape `[B, A * K, D]`): The draft's output.
        weights_K (`torch.Tensor` of shape `[K]`): Weight of each slot; see `decay_weights`.
        logits_of (callable): Hidden states `[N, D]` to logits `[N, V]`, each row by itself; they may be on another
            device.
        chunk_blocks (`int`): Blocks per application of the head.
        selector (`CandidateSelector`, *optional*): The draft's selector, trained behind the right token of each slot.
            While all is right so far that token is the drafted one, so `accepted` is what the walk would give.
    """
    block_size, device = labels.ids.shape[2], hidden_BQD.device
    places = labels.mask.flatten().nonzero()[:, 0]  # the one time that the host waits for the device
    slots = labels.map(lambda value: value.flatten(0, 2)[places])
    hidden_ND = hidden_BQD.flatten(0, 1)[places]
    # An empty batch still has to give a loss that can be differentiated.
    loss = selector_loss = hidden_ND.sum() * 0
    right = torch.zeros_like(labels.mask)
    if len(hidden_ND):
        losses, extra, best = _all_losses(hidden_ND, slots, logits_of, selector, chunk_blocks * (block_size - 1))
        weights_N = weights_K.to(device, losses.dtype).expand_as(labels.mask).flatten()[places]
        loss, selector_loss = (losses * weights_N).sum(), (extra * weights_N).sum()
        right.view(-1)[places] = best == slots.ids
    accepted = ((right | ~labels.mask).cumprod(dim=-1).bool() & labels.mask).sum()
    return BlockLoss(
        loss=loss,
        selector_loss=selector_loss,
        weight=loss_weight(labels, weights_K),
        correct=right.sum(dim=(0, 1)),
        count=labels.mask.sum(dim=(0, 1)),
        blocks=labels.mask.any(dim=-1).sum(),
        accepted=accepted,
    )
