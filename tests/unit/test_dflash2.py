"""DFlash 2's convolution and selector from their definitions, written as loops over single numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.draft_model.dflash2 import CandidateSelector, GroupedDynamicConvolution, follow_path
from tiny import DFLASH2, draft_config, randomise_heads, tiny_target

HIDDEN, GROUP, VOCAB, RANK, TOP = 8, 4, 12, 3, 5


def randomised(module: nn.Module) -> nn.Module:
    """The module in float64, no weight at its initial value."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.double()


def naive_convolution(
    inputs: Tensor, states: Tensor, conv: GroupedDynamicConvolution, half: int
) -> Tensor:
    """Convolves one block `[K, D]` with the kernels that belong to `inputs`."""
    kernels = conv.kernel_projection(inputs).view(len(inputs), 2, conv.kernel_size, HIDDEN // GROUP)
    out = torch.zeros_like(states)
    for slot, channel, tap in itertools.product(
        range(len(states)), range(HIDDEN), range(conv.kernel_size)
    ):
        if tap <= slot:
            factor = (
                conv.base_kernel[half, tap, channel] + kernels[slot, half, tap, channel // GROUP]
            )
            out[slot, channel] += factor * states[slot - tap, channel]
    return out


@torch.no_grad()
@pytest.mark.parametrize(("block_size", "kernel_size"), [(5, 2), (4, 3), (2, 3), (1, 2)])
def test_convolution_is_its_formula_and_stays_in_its_block(
    block_size: int, kernel_size: int
) -> None:
    conv = randomised(GroupedDynamicConvolution(HIDDEN, kernel_size, GROUP))
    assert isinstance(conv, GroupedDynamicConvolution)
    states = torch.randn(2, 3 * block_size, HIDDEN, dtype=torch.float64)
    got = conv(states, torch.tanh, block_size).view(2, 3, block_size, HIDDEN)
    for row, number in itertools.product(range(2), range(3)):
        block = states.view(2, 3, block_size, HIDDEN)[row, number]
        expected = naive_convolution(
            block, torch.tanh(naive_convolution(block, block, conv, 0)), conv, 1
        )
        torch.testing.assert_close(got[row, number], expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_selector_walk_is_a_loop_over_slots() -> None:
    selector = randomised(CandidateSelector(VOCAB, HIDDEN, RANK, TOP, 0.02))
    assert isinstance(selector, CandidateSelector)
    hidden = torch.randn(4, 6, HIDDEN, dtype=torch.float64)
    logits = torch.randn(4, 6, VOCAB, dtype=torch.float64)
    anchors = torch.tensor([0, 11, 5, 5])
    candidates, scores = selector(hidden, logits, anchors)
    path, path_scores = follow_path(candidates, scores, scores.argmax(dim=-1))
    differs = 0
    for row in range(4):
        before = int(anchors[row])
        for slot in range(6):
            gate = selector.predecessor_codebook[before] * selector.hidden_projection(
                hidden[row, slot]
            )
            best = sorted(range(VOCAB), key=lambda token: -float(logits[row, slot, token]))[:TOP]
            total = [
                float(logits[row, slot, b] + gate @ selector.successor_codebook[b]) for b in best
            ]
            assert candidates[row, slot].tolist() == best
            torch.testing.assert_close(
                path_scores[row, slot], torch.tensor(total, dtype=torch.float64)
            )
            before = best[total.index(max(total))]
            assert path[row, slot] == before
            differs += before != best[0]
    assert differs > 6, "the pairs have to change the path"


@torch.no_grad()
def test_teacher_forced_scores_are_those_of_the_walk() -> None:
    """Training scores a slot behind the right token; behind the walked one it must be what the walk saw."""
    selector = randomised(CandidateSelector(VOCAB, HIDDEN, RANK, TOP, 0.02))
    assert isinstance(selector, CandidateSelector)
    hidden = torch.randn(2, 4, HIDDEN, dtype=torch.float64)
    logits = torch.randn(2, 4, VOCAB, dtype=torch.float64)
    anchors = torch.tensor([3, 7])
    candidates, scores = selector(hidden, logits, anchors)
    path, path_scores = follow_path(candidates, scores, scores.argmax(dim=-1))
    before = torch.cat([anchors[:, None], path[:, :-1]], dim=1)
    again, forced = selector.score(hidden, before[..., None], logits)
    assert torch.equal(again, candidates)
    torch.testing.assert_close(forced[:, :, 0], path_scores)


@torch.no_grad()
def test_a_fresh_dflash2_draft_is_the_dflash1_draft() -> None:
    """Identity convolutions and a successor codebook of zeros: bit for bit the same states, logits and proposals."""
    target = tiny_target("qwen3")
    torch.manual_seed(3)
    one = DFlashDraftModel(draft_config(target)).double().eval()
    two = DFlashDraftModel(draft_config(target, **DFLASH2)).double().eval()
    report = two.load_state_dict(one.state_dict(), strict=False)
    assert not report.unexpected_keys
    assert all(
        "_conv." in key or key.startswith("candidate_selector.") for key in report.missing_keys
    )
    embeds = torch.randn(3, 8, 32, dtype=torch.float64)
    taps = torch.randn(3, 5, 64, dtype=torch.float64)
    anchors = torch.tensor([4, 9, 20])

    def outcome(draft: DFlashDraftModel) -> tuple[Tensor, Tensor]:
        hidden = draft(embeds, taps).last_hidden_state[:, 1:]
        logits = draft.compute_logits(hidden, target.get_output_embeddings())
        return logits, draft.best_path(hidden, logits, anchors)

    fresh = outcome(two)
    assert all(torch.equal(a, b) for a, b in zip(outcome(one), fresh, strict=True))
    randomise_heads(two)
    assert not any(torch.equal(a, b) for a, b in zip(outcome(two), fresh, strict=True))


def test_low_precision_scores_are_compared_in_float32() -> None:
    selector = CandidateSelector(VOCAB, HIDDEN, RANK, TOP, 0.5).bfloat16()
    hidden = torch.randn(1, 2, HIDDEN, dtype=torch.bfloat16)
    _, scores = selector(hidden, torch.randn(1, 2, VOCAB, dtype=torch.bfloat16), torch.tensor([1]))
    assert scores.dtype == torch.float32


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"conv_kernel_size": 2}, "conv_kernel_size and conv_group_size"),
        ({"selector_top_k": 4}, "selector_rank and selector_top_k"),
        (
            {**DFLASH2, "conv_group_size": 5},
            "conv_group_size that divides hidden_size = 4096, got 5",
        ),
        ({**DFLASH2, "conv_group_size": 0}, "conv_group_size from 1 to"),
        ({**DFLASH2, "selector_rank": -1}, "selector_rank from 1 to .*, got -1"),
        ({**DFLASH2, "selector_top_k": 0}, "selector_top_k from 1 to .*, got 0"),
        ({**DFLASH2, "selector_top_k": 200_000}, "selector_top_k from 1 to 1024, got 200000"),
        (
            {**DFLASH2, "selector_top_k": 200, "vocab_size": 100, "mask_token_id": 9},
            "selector_top_k up to 100, got 200",
        ),
        ({**DFLASH2, "vocab_size": None}, "vocab_size beside selector_top_k, got None"),
    ],
)
def test_contradictions_name_their_field(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=f"expected .*{words}.*; "):
        DFlashConfig(**fields)
