"""Every kind of fresh draft learns, and what training says of it is what decoding does, in float64.

Proposals from the anchor's slot, an embedding and a head of the draft's own, a reduced vocabulary, DFlash 2, DSpark.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import find_target
from dflash_hf.training import Example, frequent_tokens, regenerate_answers, walked_acceptance
from dflash_hf.training.anchors import all_anchors
from dflash_hf.training.collators import collate
from dflash_hf.training.forward import batch_loss
from dflash_hf.training.loss import decay_weights
from dflash_hf.training.walking import accepted_at_anchors
from helpers.whole_blocks import use_whole_blocks
from tiny import DFLASH2, DSPARK

OPTIONS: dict[str, Any] = {"max_new_tokens": 21, "eos_token_id": 3, "pad_token_id": 0}
OWN: dict[str, Any] = {"own_embed_tokens": True, "own_lm_head": True}
REDUCED: dict[str, Any] = {"draft_token_ids": 10}  # that many
KINDS: dict[str, dict[str, Any]] = {
    "from the anchor": {"sample_from_anchor": True},
    "own": OWN,
    "reduced": REDUCED,
    "dflash 2": DFLASH2,
    "all of it": {**OWN, **REDUCED, **DFLASH2, "sample_from_anchor": True},
    "dspark": DSPARK,
    "dspark, reduced": {**OWN, **REDUCED, **DSPARK, "sample_from_anchor": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_draft_learns_what_decoding_then_accepts(
    kind: str, target: Qwen3ForCausalLM
) -> None:
    found = find_target(target.double().requires_grad_(False))
    with torch.no_grad():
        target.lm_head.weight[16:] *= 0.05  # answers of few tokens, some of which end
    generator = torch.Generator().manual_seed(6)
    prompts = [
        torch.randint(0, 47, (length,), generator=generator).tolist()
        for length in (3, 8, 1, 5, 6, 2)
    ]
    answers = regenerate_answers(target, prompts, **OPTIONS)
    examples = [Example.from_pair(*row) for row in zip(prompts, answers, strict=True)]
    fields = dict(KINDS[kind])
    if "draft_token_ids" in fields:
        fields["draft_token_ids"] = frequent_tokens(examples, fields["draft_token_ids"])
        assert len({token for answer in answers for token in answer}) > 10, (
            "every token is known: the case shows less"
        )
    torch.manual_seed(1)
    draft = DFlashDraftModel.from_target(
        target,
        num_hidden_layers=2,
        block_size=6,
        target_layer_ids=[0, 2],
        mask_token_id=47,
        **fields,
    ).double()
    before = {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}

    batch = collate(examples)
    anchors, weights = (
        all_anchors(batch.loss_mask, 6),
        decay_weights(6, 4.0, draft.config.sample_from_anchor),
    )
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        result = batch_loss(draft, found, batch, anchors, weights)
        loss = (result.loss + result.selector_loss) / result.weight
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.5
    still = [
        name for name, parameter in draft.named_parameters() if torch.equal(parameter, before[name])
    ]
    assert not still

    draft.eval()
    with torch.no_grad():
        counted = batch_loss(draft, found, batch, anchors, weights)
    assert (
        int(counted.accepted)
        == int(accepted_at_anchors(draft, found, collate(examples)).sum())
        > 10
    )
    walked = walked_acceptance(draft, found, examples)
    use_whole_blocks(draft)
    ids = torch.tensor([[0] * (8 - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (8 - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": mask,
        "do_sample": False,
        **OPTIONS,
    }
    assert torch.equal(target.generate(**inputs, assistant_model=draft), target.generate(**inputs))
    assert walked.committed == draft.last_stats.num_committed
    most = draft.config.num_proposals(6)
    assert 1.1 < walked.acceptance_length < most + 1
    if draft.config.sample_from_anchor:
        assert max(itertools.chain(*walked.committed)) == most + 1, "the last slot is never right"


@pytest.mark.parametrize("second", [DFLASH2, DSPARK], ids=["dflash 2", "dspark"])
@pytest.mark.parametrize("case", ["no label", "labels outside of the vocabulary"])
def test_every_weight_has_a_gradient_without_a_loss(
    case: str, second: dict[str, Any], target: Qwen3ForCausalLM
) -> None:
    """Processes wait for the gradients of all weights, whatever the rows of each hold."""
    found = find_target(target.double().requires_grad_(False))
    draft = DFlashDraftModel.from_target(
        target,
        **{**OWN, **second, "num_hidden_layers": 2, "block_size": 6},
        **{"target_layer_ids": [0, 2], "mask_token_id": 47, "draft_token_ids": [1, 2, 3, 4]},
    ).double()
    examples = [Example.from_pair([5, 6], [7, 8, 9, 10]), Example.from_pair([11], [12, 13])]
    batch = collate(examples)
    anchors = all_anchors(batch.loss_mask, 6)
    if case == "no label":
        batch = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    result = batch_loss(draft, found, batch, anchors, decay_weights(6, 4.0))
    assert (int(result.blocks) > 0) is (case != "no label")
    (result.loss + result.selector_loss).backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in draft.parameters())


def triples(num: int, seed: int) -> list[Example]:
    """Texts of `1 10 20`, `1 11 21` and `1 12 21`, the first in four of ten: its second token is the likeliest one,
    and its third is not."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.tensor([[1, 10, 20], [1, 11, 21], [1, 12, 21]])
    shares = torch.tensor([0.4, 0.3, 0.3])
    drawn = torch.multinomial(shares.expand(num, 3), 10, replacement=True, generator=generator)
    return [Example.from_pair([1, 5], kinds[row].flatten().tolist()) for row in drawn]


def test_a_markov_head_learns_what_slots_alone_cannot(target: Qwen3ForCausalLM) -> None:
    """Same seed, data and steps. Behind a `1` both propose 10; the one proposes 21 next, the other what follows 10."""
    found = find_target(target.double().requires_grad_(False))
    training = collate(triples(16, 0))
    held_out = collate(triples(16, 1))
    right: list[Tensor] = []
    for fields in ({}, DSPARK):
        torch.manual_seed(1)
        draft = DFlashDraftModel.from_target(
            target,
            num_hidden_layers=1,
            block_size=3,
            target_layer_ids=[0, 2],
            mask_token_id=47,
            **fields,
        ).double()
        anchors = all_anchors(training.loss_mask, 3)
        optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-2)
        for _ in range(40):
            result = batch_loss(draft, found, training, anchors, decay_weights(3, 4.0))
            (result.loss / result.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
        draft.eval()
        right.append(accepted_at_anchors(draft, found, held_out))
    is_start = held_out.input_ids == 1
    is_start[:, 0] = False  # the prompt's
    without, with_head = (float(each[is_start].double().mean()) for each in right)
    # 10 is right in four of ten, and with the head the next token is then right too.
    assert with_head > 1.5 * without
    assert float(right[1].double().sum()) > float(right[0].double().sum())
