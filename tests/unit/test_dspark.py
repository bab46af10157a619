"""DSpark's Markov head from its definition: a row per token, added along a walk; and the paths of its trees."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.draft_model.dspark import MarkovHead, likeliest_transitions, walk
from tiny import DSPARK, draft_config, randomise_heads, tiny_target

VOCAB, RANK, SLOTS = 12, 3, 4
REDUCED: dict[str, Any] = {"own_lm_head": True, "draft_vocab_size": 20}


def random_head() -> MarkovHead:
    """A head in float64, no weight at its initial value."""
    torch.manual_seed(0)
    head = MarkovHead(VOCAB, VOCAB, RANK, 0.02)
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    return head.double()


def row_after(head: MarkovHead, token: int) -> Tensor:
    """What a token says of the next one `[V]`, as DeepSpec defines it: an embedding, then a product without a bias."""
    first, second = head.markov_w1, head.markov_w2
    row = torch.zeros(VOCAB, dtype=torch.float64)
    for candidate, number in itertools.product(range(VOCAB), range(RANK)):
        row[candidate] += first[token, number] * second[candidate, number]
    return row


def naive_walk(head: MarkovHead, logits: Tensor, anchor: int) -> tuple[list[int], list[Tensor]]:
    """DeepSpec's `sample_block_tokens` at temperature 0, of one row."""
    before, tokens, scores = anchor, list[int](), list[Tensor]()
    for slot in range(len(logits)):
        scores.append(logits[slot] + row_after(head, before))
        before = int(scores[-1].argmax())
        tokens.append(before)
    return tokens, scores


@torch.no_grad()
def test_the_walk_is_a_loop_over_slots() -> None:
    head = random_head()
    logits = torch.randn(5, SLOTS, VOCAB, dtype=torch.float64)
    anchors = torch.tensor([0, 11, 5, 5, 3])
    seen: list[Tensor] = []

    def choose(behind: Tensor, slot: slice) -> Tensor:
        assert slot == slice(len(seen), len(seen) + 1)
        seen.append(behind)
        return behind.argmax(dim=-1)

    tokens = walk(logits, anchors, lambda one, before: one + head(before), choose)
    changed = 0
    for row in range(5):
        expected, scores = naive_walk(head, logits[row], int(anchors[row]))
        assert tokens[row].tolist() == expected
        for slot in range(SLOTS):
            torch.testing.assert_close(seen[slot][row, 0], scores[slot], rtol=0, atol=1e-12)
        changed += expected != logits[row].argmax(dim=-1).tolist()
    assert changed > 2, "the head has to change the path"


@torch.no_grad()
@pytest.mark.parametrize("num_candidates", [3, 5, VOCAB])
def test_transitions_hold_the_likeliest_paths(num_candidates: int) -> None:
    """All paths are counted: the best `C` of any length go through candidates alone, with their own probabilities."""
    head = random_head()
    logits = torch.randn(3, 3, VOCAB, dtype=torch.float64)
    anchors = torch.tensor([4, 0, 9])
    candidates, scores = likeliest_transitions(
        logits, anchors, lambda one, before: one + head(before), num_candidates
    )
    assert candidates.shape == (3, 3, num_candidates)
    assert scores.shape == (3, 3, num_candidates, num_candidates)
    for row in range(3):
        known = [candidates[row, slot].tolist() for slot in range(3)]
        totals: dict[tuple[int, ...], float] = {(): 0.0}
        of_any_length: dict[tuple[int, ...], float] = {}
        for slot in range(3):
            longer: dict[tuple[int, ...], float] = {}
            for path, total in totals.items():
                before = path[-1] if path else int(anchors[row])
                log_probs = (logits[row, slot] + row_after(head, before)).log_softmax(dim=-1)
                for token in range(VOCAB):
                    longer[(*path, token)] = total + float(log_probs[token])
                if path and before not in known[slot - 1]:
                    continue
                place = known[slot - 1].index(before) if path else 0
                torch.testing.assert_close(scores[row, slot, place], log_probs[known[slot]])
            totals = longer
            of_any_length |= longer
        best = sorted(of_any_length, key=lambda path: -of_any_length[path])[:num_candidates]
        assert all(token in known[at] for path in best for at, token in enumerate(path))


@torch.no_grad()
@pytest.mark.parametrize("fields", [{}, REDUCED], ids=["whole", "reduced"])
def test_a_fresh_dspark_draft_is_the_dflash_draft(fields: dict[str, Any]) -> None:
    target = tiny_target("qwen3")
    torch.manual_seed(3)
    one = DFlashDraftModel(draft_config(target, **fields)).double().eval()
    two = DFlashDraftModel(draft_config(target, **fields, **DSPARK)).double().eval()
    for draft in (one, two):
        if draft.d2t is not None:
            draft.d2t.copy_(2 * torch.arange(20))  # every third token
    report = two.load_state_dict(one.state_dict(), strict=False)
    assert sorted(report.missing_keys) == [
        "markov_head.markov_w1",
        "markov_head.markov_w2",
    ]
    embeds = torch.randn(3, 8, 32, dtype=torch.float64)
    taps = torch.randn(3, 5, 64, dtype=torch.float64)
    anchors = torch.tensor([4, 9, 20])

    def path(draft: DFlashDraftModel) -> Tensor:
        hidden = draft(embeds, taps).last_hidden_state[:, 1:]
        logits = draft.compute_logits(hidden, target.get_output_embeddings())
        behind = draft.logits_behind(logits, anchors[:, None])
        assert torch.equal(behind.isinf(), logits.isinf())
        return draft.best_path(hidden, logits, anchors)

    assert torch.equal(path(one), path(two))
    randomise_heads(two)
    nn.init.normal_(two.get_parameter("markov_head.markov_w2"), std=4.0)
    assert not torch.equal(path(one), path(two))
    if two.d2t is not None:
        assert bool((path(two) % 3 == 0).all())


def test_low_precision_logits_are_summed_in_float32() -> None:
    target = tiny_target("qwen3")
    draft = DFlashDraftModel(draft_config(target, **DSPARK)).bfloat16()
    logits = torch.randn(1, 2, 64, dtype=torch.bfloat16)
    assert draft.logits_behind(logits, torch.tensor([[1, 2]])).dtype == torch.float32


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"markov_rank": 0}, "markov_rank from 1 to .*, got 0"),
        ({"markov_rank": 4, "vocab_size": None}, "vocab_size beside markov_rank, got None"),
        (
            {"markov_rank": 4, "selector_rank": 8, "selector_top_k": 4},
            "no selector_rank beside markov_rank, got 8",
        ),
    ],
)
def test_contradictions_name_their_field(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=f"expected .*{words}.*; "):
        DFlashConfig(**fields)
