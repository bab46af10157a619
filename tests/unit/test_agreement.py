"""Where answers differ and what is a tie there: against logits known by hand, in every dtype, sampled, with images."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dflash_hf import DFlashDraftModel
from dflash_hf.pair import agreement as module
from dflash_hf.pair.agreement import Agreement, agreement, first_difference, reference_for
from tiny import VOCAB, draft_config, prompts, tiny_target

GREEDY: dict[str, Any] = {"do_sample": False}
BEGUN = [9, 10, 11]


def logits_of(target: PreTrainedModel, inputs: dict[str, Tensor], begun: list[int]) -> Tensor:
    """The target's logits behind a prompt of one row and the beginning of an answer `[V]`, by one bare forward."""
    ids = torch.cat([inputs["input_ids"], torch.tensor([begun], dtype=torch.long)], dim=1)
    with torch.no_grad():
        return target(input_ids=ids).logits[0, -1].double()


def part(target: PreTrainedModel, first: int, second: int, **settings: Any) -> Agreement:
    """Compares two answers that go on differently behind `BEGUN`."""
    inputs = prompts([7], 0)
    return agreement(
        target, inputs, [*BEGUN, first, 5], [*BEGUN, second, 6, 7], **{**GREEDY, **settings}
    )


def test_first_differences() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 9, 3], [1, 2, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], []) is None


def test_identical_answers_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("qwen3").to(torch.bfloat16)
    monkeypatch.setattr(target, "generate", None)
    monkeypatch.setattr(module, "reference_for", None)
    found = agreement(target, prompts([7, 4], 0), [1, 2], [1, 2])
    assert (found.identical, found.holds, found.sentence, found.to_dict()) == (
        True,
        True,
        "identical",
        None,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_margins_are_of_logits_and_ties_within_tolerance(
    dtype: torch.dtype,
) -> None:
    """Half precision is measured in float32; every pair of tokens is a tie or not by the one rule."""
    target = tiny_target("qwen3").to(dtype)
    is_half = dtype.itemsize == 2
    logits = logits_of(reference_for(target) if is_half else target, prompts([7], 0), BEGUN)
    size = max(float(logits.max().abs()), float(logits.max() - logits.median()))
    best = int(logits.argmax())
    ties = 0
    for other in [int(token) for token in logits.argsort(descending=True)[1::7]]:
        found = part(target, best, other)
        assert part(target, other, best).margin == found.margin
        assert found.margin == pytest.approx(
            float(logits[best] - logits[other]), rel=1e-5, abs=1e-5
        )
        assert found.tolerance == pytest.approx(
            (2 if is_half else 16) * torch.finfo(dtype).eps * size, rel=1e-4
        )
        assert found.margin is not None
        assert found.tolerance is not None
        assert found.is_tie == found.holds == (found.margin <= found.tolerance)
        assert (found.token, found.identical) == (3, False)
        assert found.measured_in == ("float64" if dtype == torch.float64 else "float32")
        assert found.sentence.startswith("differs from token 4 on, where two logits ")
        assert ("do not tie" in found.sentence) == (not found.is_tie)
        assert json.loads(json.dumps(found.to_dict()))["token"] == 3
        ties += found.holds
    assert ties == 0, "random logits are far apart"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@torch.no_grad()
def test_logits_one_step_apart_tie_in_that_dtype_only(dtype: torch.dtype) -> None:
    target = tiny_target("qwen3")
    best = int(logits_of(target, prompts([7], 0), BEGUN).argmax())
    other = (best + 20) % VOCAB
    head: Any = target.get_output_embeddings()
    wide = 0.125 if dtype == torch.bfloat16 else 2.0**-7  # one step of bfloat16
    for step, is_tie in ((0.0, True), (float(torch.finfo(dtype).eps), True), (wide, False)):
        head.weight.data[other] = head.weight.data[best] * (1 - step)
        found = part(target.to(dtype), best, other)
        assert found.is_tie is is_tie, (step, found)
        assert found.holds is is_tie
        target.double()


def test_worse_of_both_counts_where_a_third_token_is_best() -> None:
    target = tiny_target("qwen3")
    logits = logits_of(target, prompts([7], 0), BEGUN)
    best, _, third, fourth = logits.argsort(descending=True)[:4].tolist()
    found = part(target, third, fourth)
    assert found.margin == pytest.approx(float(logits[best] - logits[fourth]))


def test_answer_that_ends_early_is_no_tie() -> None:
    target = tiny_target("qwen3")
    for plain, drafted in ((BEGUN, [*BEGUN, 4]), ([*BEGUN, 4], BEGUN)):
        found = agreement(target, prompts([7], 0), plain, drafted, **GREEDY)
        assert (found.token, found.margin, found.is_tie, found.holds) == (3, None, False, False)
        assert (
            found.sentence == "differs from token 4 on, where one answer ends and the other goes on"
        )


def test_size_is_not_that_of_best_logits_near_zero() -> None:
    """As of targets whose logits were held near 0 in training: the others are far below."""
    target = tiny_target("qwen3")
    logits = logits_of(target, prompts([7], 0), BEGUN)
    head: Any = target.get_output_embeddings()
    with torch.no_grad():
        state: list[Tensor] = []
        hook = head.register_forward_hook(lambda _, args, __: state.append(args[0]))
        logits_of(target, prompts([7], 0), BEGUN)
        hook.remove()
        direction = state[0][0, -1]
        # The same for all tokens: gaps stay, and the best logit becomes 0.
        head.weight -= logits.max() * direction / direction.square().sum()
    best, second = logits.argsort(descending=True)[:2].tolist()
    found = part(target, best, second)
    assert found.margin == pytest.approx(float(logits[best] - logits[second]))
    spread = float(logits.max() - logits.median())
    assert found.tolerance == pytest.approx(16 * torch.finfo(torch.float64).eps * spread)


def test_float32_copy_is_exact_and_leaves_the_target_alone() -> None:
    target = tiny_target("llama", tie_word_embeddings=True).to(torch.bfloat16)
    before = {
        name: (tensor.data_ptr(), tensor.clone()) for name, tensor in target.state_dict().items()
    }
    copied = reference_for(target)
    assert copied.dtype == torch.float32
    assert copied.get_output_embeddings().weight is copied.get_input_embeddings().weight
    for name, tensor in target.state_dict().items():
        assert (tensor.data_ptr(), tensor.dtype) == (before[name][0], torch.bfloat16)
        assert torch.equal(tensor, before[name][1])
        assert torch.equal(copied.state_dict()[name], tensor.float())
    assert reference_for(copied) is copied


def test_no_copy_is_said_in_the_log_and_in_the_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("qwen3").to(torch.bfloat16)
    said: list[str] = []
    monkeypatch.setattr(module.logger, "warning", said.append)
    needed = 4 * sum(weight.numel() for weight in target.parameters())
    monkeypatch.setattr(module, "free_memory", lambda _: 2 * needed)
    assert reference_for(target).dtype == torch.float32
    assert said == []
    monkeypatch.setattr(module, "free_memory", lambda _: 2 * needed - 1)
    logits = logits_of(target, prompts([7], 0), BEGUN)
    found = part(target, int(logits.argmax()), int(logits.argmin()))
    assert found.measured_in == "bfloat16"
    assert found.margin == pytest.approx(float(logits.max() - logits.min()), rel=0.05)
    assert found.sentence.endswith(f"(margin {found.margin:.2g} in bfloat16)")
    [sentence] = said
    assert "Margins are measured in bfloat16" in sentence
    assert "more than half" in sentence


def test_padded_row_and_processors_are_plain_generate_s() -> None:
    """A left-padded row, and scores that a processor has changed by looking at the prefix."""
    target = tiny_target("qwen3")
    inputs = prompts([4, 9], 3)
    settings: dict[str, Any] = {**GREEDY, "repetition_penalty": 1.8, "no_repeat_ngram_size": 2}
    kept = {"return_dict_in_generate": True, "output_scores": True}
    out = target.generate(**inputs, **settings, **kept, max_new_tokens=12)
    row = {name: value[:1] for name, value in inputs.items()}
    plain = out.sequences[0, 9:].tolist()
    for index in (0, 5, 11):
        scores = out.scores[index][0].double()
        second = int(scores.argsort(descending=True)[1])
        found = agreement(target, row, plain, [*plain[:index], second], **settings)
        assert found.margin == pytest.approx(float(scores.max() - scores[second]), abs=1e-9)
        ruled_out = scores.isneginf().nonzero()[:, 0].tolist()
        for token in ruled_out[:1]:
            found = agreement(target, row, plain, [*plain[:index], token], **settings)
            assert (found.margin, found.is_tie) == (None, False)
    assert any(scores[0].isneginf().any() for scores in out.scores), "nothing was ruled out"


@pytest.mark.parametrize(("temperature", "top_k"), [(0.7, 0), (1.6, 0), (1.0, 8)])
def test_sampled_answers_are_compared_by_scores_with_their_noise(
    temperature: float, top_k: int
) -> None:
    target = tiny_target("qwen3")
    torch.manual_seed(0)
    draft = DFlashDraftModel(draft_config(target)).to(target.dtype).eval()
    draft.generation_config.block_size = 1
    inputs = prompts([7], 1)
    settings: dict[str, Any] = {
        "do_sample": True,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": 1.0,
    }
    torch.manual_seed(11)
    plain = target.generate(**inputs, **settings, max_new_tokens=10, assistant_model=draft)[
        0, 7:
    ].tolist()
    state = torch.get_rng_state()
    for index in (0, 4, 9):
        scores, size = module._scores(target, inputs, plain[:index], 11, settings)
        assert int(scores.argmax()) == plain[index], "it is another noise"
        second, last = scores.argsort(descending=True)[1].item(), int(scores.argmin())
        found = agreement(target, inputs, plain, [*plain[:index], second], seed=11, **settings)
        assert found.margin == pytest.approx(float(scores.max() - scores[second]))
        assert found.tolerance == pytest.approx(16 * torch.finfo(torch.float64).eps * size)
        logits = logits_of(target, inputs, plain[:index])
        assert size * temperature == pytest.approx(
            max(float(logits.max().abs()), float(logits.max() - logits.median()))
        )
        found = agreement(target, inputs, plain, [*plain[:index], last], seed=11, **settings)
        # What top-k has cut off may be what rounding has let in.
        assert found.is_tie is (None if top_k else False)
        assert not found.holds
        assert ("cannot be said" in found.sentence) == bool(top_k)
        assert json.dumps(found.to_dict()).count("Infinity") == 0
    assert torch.equal(torch.get_rng_state(), state), "it has drawn from the user's generator"


def test_wrong_input_is_refused_before_any_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("qwen3")
    monkeypatch.setattr(target, "generate", None)
    with pytest.raises(
        ValueError, match=r"expected the inputs of one prompt, got those of 2; compare"
    ):
        agreement(target, prompts([7, 4], 0), [1], [2], **GREEDY)
    with pytest.raises(ValueError, match=r"expected the seed of sampled answers, got none; give"):
        agreement(target, prompts([7], 0), [1], [2], do_sample=True)
