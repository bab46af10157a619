"""This module computes the training objective: the label, the loss and the weight of each slot.

The loss is `sum(w * l)` over slots, divided by `loss_weight`. The anchor's slot has no loss, unless it proposes a
token. There are five objectives:

* `"cross_entropy"`: `l = CE` and `w_k = exp(-(k - 1) / gamma)` for the k-th proposal. Source: arXiv 2602.06036,
  section 4.2.
* `"dpace"`: `l = CE`, and instead of a fixed decay `w_j = sum_{m >= j} C_m` with
  `C_m = prod_{i <= m} ((1 - a) q_i + a)` and `q = exp(-CE)`. The weights are constants for the gradient. A weight says
  how much the slot adds to the expected accepted length. Source: arXiv 2605.18810, equations 7 and 8, with its `a` of
  0.5. See also SpecForge pull request 578, speculators 736 and Model Optimizer 1724.
* `"kl"`: `l = KL(p || q)`, with the decay of cross entropy. `p` is the target's distribution at the slot, restricted
  to its most likely tokens and normalised to the sum 1.
* `"tv"`: `l = 1 - a`, the total variation, with the same decay. `a = sum(min(p, q))` over these tokens is the
  probability that sampling accepts a token of the draft. The gradient almost vanishes if the draft is far from the
  target, so this objective is for a draft that is trained already. Source of `a`: arXiv 2211.17192, theorem 3.5.
* `"lk"`: `l = -log(a)`, with the same decay. It has the same aim, and a gradient from the first step on.

A DFlash 2 draft adds the cross entropy of its selector over the candidates of a slot, with the same weights. The
selector gets the correct token before the slot. A slot whose token is not a candidate adds nothing. z-lab has
published no objective for the selector. SpecForge (pull request 772) and speculators (1006) add a missing token to the
candidates instead.

The Markov head of a DSpark draft computes the logits of a slot from the correct token before it. Decoding computes the
same logits up to the first wrong token. Source: DeepSpec `Qwen3DSparkModel.forward`.

Shapes: `B` rows, `A` anchors, `K` block, `N` slots with a loss, `V` vocabulary, `C` candidates, `P` likely tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dflash_hf.draft_model.dflash2 import CandidateSelector
from dflash_hf.draft_model.dspark import Behind
from dflash_hf.training.anchors import Anchors
from dflash_hf.training.collators import Batch

Objective = Literal["cross_entropy", "dpace", "kl", "tv", "lk"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
# These objectives compare the draft with the target's distribution, not with a token.
DISTILLATION: tuple[Objective, ...] = ("kl", "tv", "lk")
DPACE_SMOOTHING = 0.5  # the paper's value. It reports stable results from 0.3 to 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLabels:
    """The tokens that each slot should predict."""

    ids: Tensor  # [B, A, K], int64: the token that the slot should propose
    mask: Tensor  # [B, A, K], bool: slots with a label: after the anchor, in the same answer
    before: Tensor  # [B, A, K], int64: the token before the label in the target's input
    # [B, A, K, P]: the target's most likely tokens in place of the label (int64), and their log-probabilities.
    likely: tuple[Tensor, Tensor] | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> BlockLabels:
        """Returns labels in which `change` has been applied to each tensor."""
        likely = None if self.likely is None else (change(self.likely[0]), change(self.likely[1]))
        return BlockLabels(
            ids=change(self.ids), mask=change(self.mask), before=change(self.before), likely=likely
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLoss:
    """Sums over the slots of a batch. The sums of several batches can be added exactly."""

    loss: Tensor  # scalar: `sum(w * l)`, with a gradient
    # scalar: `sum(w * CE_selector)`, or 0 without a selector. The objective is `loss + selector_loss`.
    selector_loss: Tensor
    weight: Tensor  # scalar: the divisor of both losses. See `loss_weight`
    # [K], int64: the number of correct argmaxes (of the selector, if there is one) and of labels, per slot.
    correct: Tensor
    count: Tensor
    blocks: Tensor  # scalar: number of blocks with a label
    accepted: Tensor  # scalar, int64: correct argmaxes before the first wrong one, over all blocks
    finite: Tensor  # [B], bool: rows whose losses are all finite


def as_they_are(logits: Tensor, before: Tensor) -> Tensor:
    """Returns logits `[..., V]` unchanged, for a draft whose logits do not depend on the token before a slot."""
    return logits


def decay_weights(block_size: int, gamma: float, from_anchor: bool = False) -> Tensor:
    """Returns `w` `[K]`, float64: `exp(-(k - 1) / gamma)` for proposal `k`, and 0 in a slot without a proposal."""
    first = 0 if from_anchor else 1
    weights = torch.exp(
        -(torch.arange(block_size, dtype=torch.float64, device="cpu") - first) / gamma
    )
    weights[:first] = 0
    return weights


def block_labels(
    batch: Batch, anchors: Anchors, ahead: int = 0, likely_BSP: tuple[Tensor, Tensor] | None = None
) -> BlockLabels:
    """Looks up the token that each slot should predict. The labels of a block end at the end of its answer.

    Args:
        ahead (`int`): The index of the token that a slot proposes, minus the index of the slot: 1 for drafts that
            sample from the anchor, else 0.
        likely_BSP (`tuple` of two `torch.Tensor` of shape `[B, S, P]`, *optional*): The target's most likely tokens
            after each token, and their log-probabilities.
    """
    num_rows, num_columns = batch.input_ids.shape
    positions = anchors.positions + ahead
    columns = positions.clamp_max(num_columns - 1)
    before = (columns - 1).clamp_min(0)
    rows = torch.arange(num_rows, device=columns.device)[:, None, None]
    wanted = batch.loss_mask[rows, columns] & (positions < num_columns) & anchors.keep[:, :, None]
    if batch.starts is not None:
        wanted &= batch.starts[rows, columns] == batch.starts[rows, anchors.indices[:, :, None]]
    wanted = wanted.cumprod(dim=-1).bool()
    wanted[:, :, : 1 - ahead] = False
    return BlockLabels(
        ids=batch.input_ids[rows, columns],
        mask=wanted,
        before=batch.input_ids[rows, before],
        likely=None
        if likely_BSP is None
        else (likely_BSP[0][rows, before], likely_BSP[1][rows, before]),
    )


def loss_weight(
    labels: BlockLabels, weights_K: Tensor, objective: Objective = "cross_entropy"
) -> Tensor:
    """Returns the divisor of a batch's sums: `sum(w)`, or the number of blocks for D-PACE. It needs no forward."""
    if objective == "dpace":
        return labels.mask.any(dim=-1).sum()
    return (labels.mask * weights_K.to(labels.mask.device)).sum()


def _distances(logits_NV: Tensor, likely_NP: tuple[Tensor, Tensor], objective: Objective) -> Tensor:
    """Returns how far the draft's distribution at each slot `[N]` is from the target's, over its likely tokens."""
    likely_ids, log_probs = likely_NP
    own = logits_NV.gather(1, likely_ids) - logits_NV.logsumexp(dim=-1, keepdim=True)
    # Tokens outside a reduced vocabulary are no part of p. A draft's NaN stays in the loss, so it is reported.
    known = own.detach() != -torch.inf
    theirs = log_probs.to(logits_NV.dtype).masked_fill(~known, -torch.inf).log_softmax(dim=-1)
    known = theirs > -torch.inf
    theirs = theirs.masked_fill(~known, 0)
    own = own.masked_fill(~known, 0)
    if objective == "kl":
        return (theirs.exp() * (theirs - own) * known).sum(dim=-1)
    # A slot has the distance 0 if the draft knows none of its likely tokens.
    is_any_known = known.any(dim=-1)
    log_least = torch.minimum(theirs, own).masked_fill(~known & is_any_known[:, None], -torch.inf)
    log_accepted = log_least.logsumexp(dim=-1).masked_fill(~is_any_known, 0)
    if objective == "lk":
        return -log_accepted
    return 1 - log_accepted.exp()


def _slot_losses(
    hidden_ND: Tensor,
    slots: BlockLabels,
    rows: slice,
    logits_of: Callable[[Tensor, Tensor], Tensor],
    selector: CandidateSelector | None,
    objective: Objective,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the loss, the selector's loss and the argmax of some slots, on the device of the states."""
    logits = logits_of(hidden_ND, slots.before[rows])
    slots = slots.map(lambda value: value[rows].to(logits.device))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if slots.likely is None:
        losses = nn.functional.cross_entropy(logits, slots.ids, reduction="none")
    else:
        losses = _distances(logits, slots.likely, objective)
    best = logits.detach().argmax(dim=-1)
    extra = torch.zeros_like(losses)
    if selector is not None:
        candidates, scores = selector.score(hidden_ND, slots.before[:, None], logits)
        is_label = candidates == slots.ids[:, None]
        # The sum is the label's log-probability if the label is a candidate, else 0.
        extra = -torch.log_softmax(scores[:, 0], dim=-1).masked_fill(~is_label, 0).sum(dim=-1)
        best = candidates.gather(1, scores[:, 0].detach().argmax(dim=-1, keepdim=True))[:, 0]
    return losses.to(hidden_ND.device), extra.to(hidden_ND.device), best.to(hidden_ND.device)


class _FrozenHead(torch.autograd.Function):
    """Computes the losses of slots chunk by chunk, with a head that is not trained.

    Each loss depends only on the state of its own slot. So the gradient with respect to the states is computed
    together with the losses. No logits are kept for the backward pass, and the head does not run again for it.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, chunks: list[slice], losses_of: Callable[..., Any]
    ) -> Any:
        parts = []
        gradient = torch.empty_like(hidden_ND)
        for rows in chunks:
            with torch.enable_grad():
                states = hidden_ND[rows].detach().requires_grad_()
                losses, _, best = losses_of(states, rows)
                (gradient[rows],) = torch.autograd.grad(losses.sum(), states)
            parts.append((losses.detach(), best))
        ctx.save_for_backward(gradient)
        losses, best = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.mark_non_differentiable(best)
        return losses, best

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0][:, None].to(gradient.dtype), None, None


def _all_losses(
    hidden_ND: Tensor,
    slots: BlockLabels,
    logits_of: Callable[[Tensor, Tensor], Tensor],
    selector: CandidateSelector | None,
    objective: Objective,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the results of `_slot_losses` for all slots, computed for `size` slots at a time."""
    chunks = [slice(start, start + size) for start in range(0, len(hidden_ND), size)]

    def losses_of(states: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        return _slot_losses(states, slots, rows, logits_of, selector, objective)

    trains = torch.is_grad_enabled() and hidden_ND.requires_grad
    if trains and selector is None:
        # The logits of one slot have a gradient if any weight that is applied to the states is trained.
        logits = logits_of(hidden_ND[:1].detach(), slots.before[:1])
        if not logits.requires_grad:
            losses, best = _FrozenHead.apply(hidden_ND, chunks, losses_of)
            return losses, torch.zeros_like(losses), best
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
    *,
    objective: Objective = "cross_entropy",
    known_V: Tensor | None = None,
    behind: Behind = as_they_are,
) -> BlockLoss:
    """Sums the weighted losses over all slots with a label.

    The head runs over the labelled slots of `chunk_blocks` blocks at a time, and its logits are not kept. So the
    logits take `chunk_blocks * K * V` numbers, for any number of anchors.

    Args:
        hidden_BQD (`torch.Tensor` of shape `[B, A * K, D]`): The draft's output.
        labels ([`BlockLabels`]): The labels of the slots.
        weights_K (`torch.Tensor` of shape `[K]`): The weight of each slot. See `decay_weights`.
        logits_of (callable): Computes logits `[N, V]` from hidden states `[N, D]`, each row from its own state. The
            logits may be on another device.
        chunk_blocks (`int`): Blocks per application of the head.
        selector (`CandidateSelector`, *optional*): The draft's selector. It is trained with the correct token before
            each slot. Up to the first wrong token, this token is the drafted one, so `accepted` is the same as in
            decoding.
        objective (`str`): See this module.
        known_V (`torch.Tensor` of shape `[V]`, bool, *optional*): The tokens that a draft with a reduced vocabulary
            can propose. Slots with other labels count as wrong and add nothing to the loss.
        behind (callable, *optional*): Returns logits `[N, V]` to which the Markov head's vectors for the correct
            tokens `[N]` before the slots are added.

    Raises:
        ValueError: If the objective is a distillation and `labels` has no likely tokens.
    """
    block_size = labels.ids.shape[2]
    device = hidden_BQD.device
    is_distilled = objective in DISTILLATION
    if is_distilled and labels.likely is None:
        raise ValueError(
            f"expected labels with likely tokens for objective={objective!r}, got none; take them of the target"
        )
    scored = labels.mask if known_V is None else labels.mask & known_V[labels.ids]
    places = scored.flatten().nonzero()[:, 0]  # the host waits for the device only here
    slots = labels if is_distilled else replace(labels, likely=None)
    slots = slots.map(lambda value: value.flatten(0, 2)[places])
    hidden_ND = hidden_BQD.flatten(0, 1)[places]
    # A batch without labels still needs a loss that can be differentiated.
    loss = hidden_ND.sum() * 0
    selector_loss = loss
    right = torch.zeros_like(labels.mask)
    finite = torch.ones(len(scored), dtype=torch.bool, device=device)
    if len(hidden_ND):

        def logits_behind(states: Tensor, before: Tensor) -> Tensor:
            return behind(logits_of(states), before)

        losses, extra, best = _all_losses(
            hidden_ND, slots, logits_behind, selector, objective, chunk_blocks * (block_size - 1)
        )
        table = losses.new_full(scored.shape, torch.inf)
        table.view(-1)[places] = losses.detach()
        weights_BAK = weights_K.to(device, losses.dtype).expand_as(table)
        if objective == "dpace":  # `table` is infinite for labels that the draft cannot propose
            smooth = (1 - DPACE_SMOOTHING) * torch.exp(-table) + DPACE_SMOOTHING
            reached = smooth.masked_fill(~labels.mask, 1).cumprod(dim=-1) * labels.mask
            weights_BAK = reached.flip(-1).cumsum(dim=-1).flip(-1)
        weights_N = weights_BAK.flatten()[places]
        loss = (losses * weights_N).sum()
        selector_loss = (extra * weights_N).sum()
        table.view(-1)[places] = (losses + extra).detach()
        finite = (table.isfinite() | ~scored).flatten(1).all(dim=1)
        right.view(-1)[places] = best == slots.ids
    accepted = ((right | ~labels.mask).cumprod(dim=-1).bool() & labels.mask).sum()
    return BlockLoss(
        loss=loss,
        selector_loss=selector_loss,
        weight=loss_weight(labels, weights_K, objective),
        correct=right.sum(dim=(0, 1)),
        count=labels.mask.sum(dim=(0, 1)),
        blocks=labels.mask.any(dim=-1).sum(),
        accepted=accepted,
        finite=finite,
    )
