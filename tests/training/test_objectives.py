"""Every objective equals loops over rows, anchors and slots, with its gradient; non-finite losses are told."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from dflash_hf.training.anchors import Anchors, all_anchors
from dflash_hf.training.collators import Batch
from dflash_hf.training.loss import (
    DISTILLATION,
    DPACE_SMOOTHING,
    OBJECTIVES,
    BlockLabels,
    Objective,
    block_labels,
    block_loss,
    decay_weights,
    loss_weight,
)

BLOCK, WIDTH, VOCAB, GAMMA, LIKELY = 5, 8, 48, 2.5, 6


def defined_loss(
    hidden: Tensor,
    batch: Batch,
    anchors: Anchors,
    logits_of: nn.Module,
    objective: Objective,
    ahead: int,
    likely: tuple[Tensor, Tensor],
    known: Tensor,
) -> tuple[Tensor, float]:
    """`sum(w * l)` and what it is divided by, straight from the definitions, one slot at a time over all of `V`."""
    total, divisor = hidden.sum() * 0, 0.0
    for row, number in anchors.keep.nonzero().tolist():
        anchor = int(anchors.indices[row, number])
        losses: list[Tensor | None] = []
        for slot in range(1 - ahead, BLOCK):
            at = anchor + slot + ahead
            if at >= batch.input_ids.shape[1] or not batch.loss_mask[row, at]:
                break
            logits = logits_of(hidden[row, number * BLOCK + slot]).masked_fill(~known, -torch.inf)
            log_q = torch.log_softmax(logits, dim=-1)
            token = int(batch.input_ids[row, at])
            if not known[token]:
                losses.append(None)
            elif objective in DISTILLATION:
                pairs = zip(
                    likely[0][row, at].tolist(), likely[1][row, at].exp().tolist(), strict=True
                )
                ids = [(i, p) for i, p in pairs if known[i]]
                mass = sum(p for _, p in ids)
                ratios = [p / mass * (math.log(p / mass) - log_q[i]) for i, p in ids]
                common = sum(log_q[i].exp().clamp_max(p / mass) for i, p in ids)
                if not ids:
                    found = log_q.exp()[token] * 0
                elif objective == "kl":
                    found = torch.stack(ratios).sum()
                elif objective == "tv":
                    found = 1 - common
                else:
                    found = -common.log()
                losses.append(found)
            else:
                losses.append(-log_q[token])
        confidence, reached = 1.0, []
        for loss in losses:
            q = 0.0 if loss is None else math.exp(-loss.item())
            confidence *= (1 - DPACE_SMOOTHING) * q + DPACE_SMOOTHING
            reached.append(confidence)
        for place, loss in enumerate(losses):
            decay = math.exp(-place / GAMMA)
            weight = sum(reached[place:]) if objective == "dpace" else decay
            total = total if loss is None else total + weight * loss
            divisor += 0 if objective == "dpace" else decay
        divisor += 1 if objective == "dpace" else 0
    return total, divisor


class Head(nn.Linear):
    """A head over a reduced vocabulary: minus infinity for the others, as a draft's own has it."""

    known: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).masked_fill(~self.known, -torch.inf)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("chunk_blocks", [1, 128])
def test_objective_and_gradient_equal_the_definition(
    objective: Objective, ahead: int, reduced: bool, chunk_blocks: int, batch: Batch
) -> None:
    torch.manual_seed(3)
    anchors = all_anchors(batch.loss_mask, BLOCK)
    head = Head(WIDTH, VOCAB, bias=False).double()
    head.known = torch.rand(VOCAB) < 0.6 if reduced else torch.ones(VOCAB, dtype=torch.bool)
    hidden = torch.randn(3, anchors.indices.shape[1] * BLOCK, WIDTH, dtype=torch.float64)
    log_p, ids = torch.log_softmax(
        torch.randn(*batch.input_ids.shape, VOCAB).double() * 2, dim=-1
    ).topk(LIKELY)
    if reduced:  # among the likely ones some are known, and some are not
        ids[..., 0] = int(head.known.nonzero()[0])
        ids[..., 1] = int((~head.known).nonzero()[0])
    # After each token
    said = None
    if objective in DISTILLATION:
        said = (ids.roll(-1, dims=1), log_p.roll(-1, dims=1))
    labels = block_labels(batch, anchors, ahead, said)
    weights = decay_weights(BLOCK, GAMMA, bool(ahead))
    known = head.known if reduced else None
    wanted_states = hidden.clone().requires_grad_()
    wanted, divisor = defined_loss(
        wanted_states, batch, anchors, head, objective, ahead, (ids, log_p), head.known
    )
    (wanted_gradient,) = torch.autograd.grad(wanted, wanted_states)
    assert math.isclose(loss_weight(labels, weights, objective).item(), divisor, rel_tol=1e-12)
    for is_frozen in (True, False):
        head.requires_grad_(not is_frozen)
        states = hidden.clone().requires_grad_()
        result = block_loss(
            states, labels, weights, head, chunk_blocks, objective=objective, known_V=known
        )
        (gradient,) = torch.autograd.grad(3 * result.loss, states)
        torch.testing.assert_close(result.loss.item(), wanted.item(), rtol=1e-12, atol=0)
        torch.testing.assert_close(gradient, 3 * wanted_gradient, rtol=1e-10, atol=1e-13)
        with torch.no_grad():
            again = block_loss(
                hidden, labels, weights, head, chunk_blocks, objective=objective, known_V=known
            )
        torch.testing.assert_close(again.loss.item(), wanted.item(), rtol=1e-12, atol=0)
        assert bool(labels.mask[:, :, 0].any()) == bool(ahead)


def test_all_likely_tokens_are_the_whole_distribution() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(1, 3, WIDTH, dtype=torch.float64), nn.Linear(WIDTH, VOCAB).double()
    log_p, ids = torch.randn(1, 1, 3, VOCAB, dtype=torch.float64).log_softmax(dim=-1).topk(VOCAB)
    full = torch.empty_like(log_p).scatter_(-1, ids, log_p)
    mask = torch.tensor([[[False, True, True]]])
    labels = BlockLabels(ids=ids[..., 0], mask=mask, before=ids[..., 1], likely=(ids, log_p))
    result = block_loss(hidden, labels, torch.ones(3), head, objective="kl")
    own = torch.log_softmax(head(hidden[0, 1:]), dim=-1)
    wanted = nn.functional.kl_div(own, full[0, 0, 1:], log_target=True, reduction="sum")
    torch.testing.assert_close(result.loss, wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("objective", ["tv", "lk"])
def test_a_slot_without_a_known_likely_token_has_no_loss(objective: Objective) -> None:
    head = Head(WIDTH, VOCAB, bias=False).double()
    head.known = torch.arange(VOCAB) < 4
    hidden = torch.randn(1, 2, WIDTH, dtype=torch.float64, requires_grad=True)
    likely = (torch.tensor([[[[7, 8], [7, 8]]]]), torch.tensor([[[[-0.1, -2.0]] * 2]]))
    ids = torch.tensor([[[1, 2]]])
    mask = torch.tensor([[[False, True]]])
    labels = BlockLabels(ids=ids, mask=mask, before=ids, likely=likely)
    result = block_loss(
        hidden, labels, torch.ones(2), head, objective=objective, known_V=head.known
    )
    (gradient,) = torch.autograd.grad(result.loss, hidden)
    assert result.loss.item() == 0
    assert not gradient.any()


def test_the_draft_that_is_the_target_is_always_accepted() -> None:
    """Over the whole vocabulary: all of these losses are 0 there; elsewhere exp(-lk) is 1 - tv."""
    torch.manual_seed(0)
    hidden, head = torch.randn(1, 3, WIDTH, dtype=torch.float64), nn.Linear(WIDTH, VOCAB).double()
    head.requires_grad_(False)
    own = head(hidden).log_softmax(dim=-1)[:, None]
    mask = torch.tensor([[[False, True, True]]])
    every = torch.arange(VOCAB).expand_as(own)
    same = BlockLabels(ids=every[..., 0], mask=mask, before=every[..., 1], likely=(every, own))
    other = replace(same, likely=(every, own.roll(1, dims=-1)))
    for labels, is_same in ((same, True), (other, False)):
        values = [
            float(block_loss(hidden, labels, torch.ones(3), head, objective=objective).loss)
            for objective in DISTILLATION
        ]
        assert all(abs(value) < 1e-12 for value in values) is is_same
    slots = replace(other, mask=torch.tensor([[[False, True, False]]]))
    tv, lk = (
        float(block_loss(hidden, slots, torch.ones(3), head, objective=objective).loss)
        for objective in ("tv", "lk")
    )
    assert math.isclose(math.exp(-lk), 1 - tv, rel_tol=1e-12)


def test_kl_without_the_targets_distribution_is_refused(batch: Batch) -> None:
    anchors = all_anchors(batch.loss_mask, BLOCK)
    labels = block_labels(batch, anchors)
    hidden = torch.randn(3, anchors.indices.shape[1] * BLOCK, WIDTH)
    with pytest.raises(
        ValueError, match=r"expected labels with likely tokens for objective='kl', got none; "
    ):
        block_loss(
            hidden, labels, decay_weights(BLOCK, GAMMA), nn.Linear(WIDTH, VOCAB), objective="kl"
        )


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_losses_that_are_no_numbers_are_told_by_row(objective: Objective, batch: Batch) -> None:
    anchors = all_anchors(batch.loss_mask, BLOCK)
    log_p, ids = torch.log_softmax(torch.randn(*batch.input_ids.shape, VOCAB), dim=-1).topk(LIKELY)
    labels = block_labels(batch, anchors, likely_BSP=(ids, log_p))
    hidden = torch.randn(3, anchors.indices.shape[1] * BLOCK, WIDTH)
    head, weights = nn.Linear(WIDTH, VOCAB), decay_weights(BLOCK, GAMMA)
    good = block_loss(hidden, labels, weights, head, objective=objective)
    hidden[1, 1] = torch.nan
    bad = block_loss(hidden, labels, weights, head, objective=objective)
    assert (good.finite.tolist(), bad.finite.tolist()) == ([True, True, True], [True, False, True])
    empty = replace(labels, mask=torch.zeros_like(labels.mask))
    nothing = block_loss(hidden, empty, weights, head, objective=objective)
    assert nothing.finite.all()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_frozen_head_has_the_same_gradient_under_autocast(
    objective: Objective, batch: Batch
) -> None:
    """But for rounding to bfloat16: one multiplies by a slot's weight before the head, the other behind it."""
    torch.manual_seed(3)
    anchors, head = all_anchors(batch.loss_mask, BLOCK), nn.Linear(WIDTH, VOCAB)
    log_p, ids = torch.log_softmax(torch.randn(*batch.input_ids.shape, VOCAB), dim=-1).topk(LIKELY)
    labels = block_labels(batch, anchors, likely_BSP=(ids, log_p))
    hidden = torch.randn(3, anchors.indices.shape[1] * BLOCK, WIDTH)
    found: list[tuple[Tensor, Tensor]] = []
    for is_frozen in (True, False):
        head.requires_grad_(not is_frozen)
        states = hidden.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            result = block_loss(states, labels, torch.ones(BLOCK), head, 2, objective=objective)
        result.loss.backward()
        assert states.grad is not None
        assert states.grad.dtype == torch.float32
        found.append((result.loss.detach(), states.grad))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=2e-2, atol=2e-3)
