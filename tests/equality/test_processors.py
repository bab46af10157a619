"""Every processor and warper that `generate` builds from its settings, each alone and mixed; one row and several."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    WatermarkingConfig,
)

from dflash_hf.generation.sampling import BlockProcessors
from helpers.half import half
from helpers.static import Tape, tensor_oracle, use_tapes
from tiny import (
    VOCAB,
    oracle_draft,
    prompts,
    shallow_target,
    tiny_draft,
    tiny_target,
    truth_of,
)

NEW = 18
LENGTHS = [6, 4, 9, 5]


class Shift(LogitsProcessor):
    """One of the user's own, without state: prefers what follows the row's last token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores.scatter_add_(
            1, (input_ids[:, -1:] + 1) % scores.shape[1], torch.full_like(scores[:, :1], 1.5)
        )
        return scores


class Again(LogitsProcessor):
    """One of the user's own that looks up the scores of all tokens of the text, and makes them less likely."""

    is_row_wise = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        return scores.scatter(1, input_ids, scores.gather(1, input_ids) - 1.5)


class Narrow(LogitsProcessor):
    """One of the user's own, which returns the scores of the first tokens alone."""

    def __init__(self, num_tokens: int, is_row_wise: bool, shapes_proposals: bool = False) -> None:
        self.num_tokens = num_tokens
        self.is_row_wise = is_row_wise
        self.shapes_proposals = shapes_proposals

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores[:, : self.num_tokens]


WARPERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 7},
    "top_p": {"top_k": 0, "top_p": 0.8},
    "min_p": {"top_k": 0, "min_p": 0.1},
    "typical": {"top_k": 0, "typical_p": 0.8},
    "epsilon": {"top_k": 0, "epsilon_cutoff": 0.02},
    "eta": {"top_k": 0, "eta_cutoff": 0.02},
    "renormalised": {"top_k": 7, "renormalize_logits": True},
    "all warpers": {
        "temperature": 1.3,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.01,
        "typical_p": 0.97,
        "eta_cutoff": 1e-3,
    },
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "prompt repetition": {"encoder_repetition_penalty": 1.4},
    "ngram": {"no_repeat_ngram_size": 2},
    "prompt ngram": {"encoder_no_repeat_ngram_size": 2},
    "min_length": {"min_length": 16},
    "min_new_tokens": {"min_new_tokens": 8},
    "bad words": {"bad_words_ids": [[5], [7, 8], [11, 12, 13]]},
    "sequence bias": {"sequence_bias": [[[4], 2.0], [[9, 10], -3.0]]},
    # Ids that the target does not have are suppressed too: they hide nothing.
    "suppress": {
        "suppress_tokens": [1, 2, 4, -1, VOCAB],
        "begin_suppress_tokens": [6, 7, 8, 9, 10, 11, VOCAB + 5],
    },
    "forced eos": {"forced_eos_token_id": 9},
    "decay": {"exponential_decay_length_penalty": (3, 1.2)},
    "invalid values": {"remove_invalid_values": True},
    "prefix function": {
        "prefix_allowed_tokens_fn": lambda row, ids: [
            t for t in range(64) if (t + int(ids[-1])) % 4 != row
        ]
    },
    "watermark": {
        "watermarking_config": WatermarkingConfig(
            bias=2.5, seeding_scheme="selfhash", context_width=2
        )
    },
    "own": {"logits_processor": LogitsProcessorList([Shift()])},
    "narrower": {"logits_processor": [Narrow(40, is_row_wise=False)]},
    "narrower by rows": {"logits_processor": [Shift(), Narrow(40, is_row_wise=True)]},
    "narrower proposals": {
        "logits_processor": [Narrow(40, is_row_wise=True, shapes_proposals=True)]
    },
    "one token": {"logits_processor": [Narrow(1, is_row_wise=True)]},
    "mixed": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 6,
        "bad_words_ids": [[5], [7, 8]],
        "sequence_bias": [[[4], 2.0]],
        "logits_processor": LogitsProcessorList([Shift()]),
    },
}


# Each with one row or with several, and sampled with as many as greedily not.
@pytest.mark.parametrize(("case", "rows"), half(list(PROCESSORS), [1, 4]))
def test_greedy_text_is_plain_generates(case: str, rows: int) -> None:
    target = shallow_target("qwen3")
    inputs = prompts(LENGTHS[:rows], 8)
    settings = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "eos_token_id": [9, 33],
        "pad_token_id": 0,
        **PROCESSORS[case],
    }
    ref = target.generate(**inputs, **settings)
    draft = oracle_draft(target, truth_of(inputs, ref), 1, 8)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), ref)
    assert draft.last_stats.acceptance_length > 1


@pytest.mark.parametrize("pad_id", [-1, VOCAB])
def test_a_pad_token_without_a_score_is_shown_to_no_processor(pad_id: int) -> None:
    """As old configs of Llama have it, or as it is in a tokenizer alone."""
    target = shallow_target("qwen3")
    inputs = prompts(LENGTHS, 8)
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": pad_id}
    settings |= {"logits_processor": [Again()], "eos_token_id": None}
    ref = target.generate(**inputs, **settings)
    draft = oracle_draft(target, truth_of(inputs, ref), 1, 8)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), ref)


@pytest.mark.parametrize(("case", "rows"), half([*WARPERS, *PROCESSORS], [1, 4]))
def test_sampled_text_is_the_same_at_every_block_size(case: str, rows: int) -> None:
    target = shallow_target("qwen3")
    inputs = prompts(LENGTHS[:rows], 8)
    settings = {"max_new_tokens": NEW, "do_sample": True, "eos_token_id": [9], "pad_token_id": 0}
    settings |= {**WARPERS, **PROCESSORS}[case]
    truth, texts = [[5] * 60] * rows, []
    for block_size in (1, 3, 8):
        draft = oracle_draft(target, truth, 2, 8)
        draft.generation_config.block_size = block_size
        draft.generation_config.proposal = "argmax" if block_size == 3 else "shared_noise"
        torch.manual_seed(7)
        texts.append(target.generate(**inputs, **settings, assistant_model=draft))
        # From here on the draft knows what will be sampled, but for a random part of each block.
        truth = truth_of(inputs, texts[0])
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])
    assert draft.last_stats.acceptance_length > 1


@pytest.mark.parametrize("case", ["temperature", "top_k", "min_p", "typical", "epsilon", "eta"])
def test_a_warper_changes_what_is_sampled(case: str) -> None:
    # Otherwise the test above would compare texts that the setting never touched.
    target = shallow_target("qwen3")
    inputs = prompts(LENGTHS, 8)
    draft = oracle_draft(target, [[5] * 60] * 4, 2, 8)
    texts = []
    for settings in ({"top_k": 0}, WARPERS[case]):
        torch.manual_seed(7)
        texts.append(
            target.generate(
                **inputs, max_new_tokens=NEW, do_sample=True, **settings, assistant_model=draft
            )
        )
    assert not torch.equal(texts[0], texts[1])


@pytest.mark.parametrize("is_row_wise", [True, False])
def test_tokens_without_a_score_are_never_chosen(is_row_wise: bool) -> None:
    target = shallow_target("qwen3")
    settings = {
        **prompts(LENGTHS, 8),
        "max_new_tokens": NEW,
        "do_sample": False,
        "logits_processor": [Narrow(40, is_row_wise)],
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    ref = target.generate(**settings)
    out = target.generate(**settings, assistant_model=tiny_draft(target))
    assert torch.equal(out.sequences, ref.sequences)
    for ours, theirs in zip(out.scores, ref.scores, strict=True):
        assert ours[:, 40:].isneginf().all()
        torch.testing.assert_close(ours[:, :40], theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("is_row_wise", [True, False])
def test_scores_of_tokens_that_the_target_does_not_have_are_refused(is_row_wise: bool) -> None:
    class Wide(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return torch.cat([scores, scores], dim=1)

    wide = Wide()
    wide.is_row_wise = is_row_wise
    target = shallow_target("qwen3")
    inputs = prompts(LENGTHS, 8)
    with pytest.raises(ValueError, match=r"expected scores of at most 64 tokens .*, got 128; "):
        target.generate(**inputs, logits_processor=[wide], assistant_model=tiny_draft(target))


class Remade(LogitsProcessor):
    """One of the user's own, which returns scores of another shape."""

    def __init__(self, remake: Any, is_row_wise: bool) -> None:
        self.remake = remake
        self.is_row_wise = is_row_wise

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.remake(scores)


@pytest.mark.parametrize("is_row_wise", [True, False])
def test_further_tokens_that_are_never_chosen_change_no_text(is_row_wise: bool) -> None:
    def with_further(scores: Tensor) -> Tensor:
        return torch.nn.functional.pad(scores, (0, 9), value=-math.inf)

    target = shallow_target("qwen3")
    settings = {**prompts(LENGTHS, 8), "max_new_tokens": NEW, "do_sample": False}
    settings["logits_processor"] = [Remade(with_further, is_row_wise)]
    ref = target.generate(**settings)
    assert torch.equal(target.generate(**settings, assistant_model=tiny_draft(target)), ref)


RESHAPED = {
    "no token": (lambda scores: scores[:, :0], r"got torch.Size\(\[4, 0\]\)"),
    "no row": (lambda scores: scores[:0], r"got torch.Size\(\[0, 64\]\)"),
    "one row": (lambda scores: scores[:1], r"got torch.Size\(\[1, 64\]\)"),
    "a row without rows": (lambda scores: scores[0], r"got torch.Size\(\[64\]\)"),
    "more rows": (lambda scores: scores.repeat(2, 1), r"got torch.Size\(\[8, 64\]\)"),
    "nothing": (lambda scores: None, "got 'NoneType'"),
}


@pytest.mark.parametrize("is_row_wise", [True, False])
@pytest.mark.parametrize("case", RESHAPED)
def test_scores_of_another_shape_are_refused(case: str, is_row_wise: bool) -> None:
    remake, got = RESHAPED[case]
    target = shallow_target("qwen3")
    settings = {**prompts(LENGTHS, 8), "logits_processor": [Remade(remake, is_row_wise)]}
    sentence = f"expected scores of 4 rows and at least one token .*, {got}; return"
    with pytest.raises(ValueError, match=sentence):
        target.generate(**settings, assistant_model=tiny_draft(target))


# Processors that go by the length of the text alone.
BY_LENGTH: dict[str, dict[str, Any]] = {
    "min_length": {"min_length": 16},
    "min_new_tokens": {"min_new_tokens": 8},
    "suppress": PROCESSORS["suppress"],
    "all of them": {"min_length": 13, "min_new_tokens": 8, **PROCESSORS["suppress"]},
}


def test_one_end_token_may_be_a_tensor_without_dimensions() -> None:
    end = torch.tensor(2)
    processors: list[Any] = [
        MinLengthLogitsProcessor(9, end),
        MinNewTokensLengthLogitsProcessor(4, 5, end),
    ]
    wanted = [MinLengthLogitsProcessor(9, 2), MinNewTokensLengthLogitsProcessor(4, 5, 2)]
    found = BlockProcessors(LogitsProcessorList(processors)).settings()
    assert found == BlockProcessors(LogitsProcessorList(wanted)).settings()


@pytest.mark.parametrize("case", BY_LENGTH)
@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param(0, id="chain"),
        pytest.param(8, id="tree", marks=pytest.mark.same_on_every_release),
    ],
)
def test_what_goes_by_length_is_decided_in_captured_steps(
    nodes: int, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tapes(monkeypatch)
    target: Any = tiny_target("qwen3")
    inputs = prompts(LENGTHS, 8)
    # End tokens that a random target likes, so that hiding them changes the text.
    free = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=63)
    ends = free[:, inputs["input_ids"].shape[1] + 3].tolist()
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
    short = target.generate(**inputs, **settings)
    settings |= BY_LENGTH[case]
    ref = target.generate(**inputs, **settings, output_scores=True, return_dict_in_generate=True)
    assert not torch.equal(ref.sequences[:, : short.shape[1]], short)
    draft = tensor_oracle(target, truth_of(inputs, ref.sequences), 1, 8)
    draft.generation_config.num_tree_nodes = nodes
    out = target.generate(**inputs, **settings, assistant_model=draft)
    assert torch.equal(out, ref.sequences)
    assert draft.last_stats.engine == "cuda_graph"
    assert Tape.num_replays > 0
    assert draft.last_stats.acceptance_length > 1
    with_scores = target.generate(
        **inputs,
        **settings,
        output_scores=True,
        return_dict_in_generate=True,
        assistant_model=draft,
    )
    # A row that has ended has no scores of its own any more.
    new = ref.sequences[:, inputs["input_ids"].shape[1] :]
    has_ended = torch.isin(new, torch.tensor(ends)).cumsum(dim=1).roll(1, dims=1)
    has_ended[:, 0] = 0
    scores = zip(with_scores.scores, ref.scores, has_ended.T == 0, strict=True)
    for ours, theirs, runs in scores:
        torch.testing.assert_close(ours[runs], theirs[runs], atol=1e-4, rtol=1e-4)
