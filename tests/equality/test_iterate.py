"""`iterate` is `generate` one step at a time: its tokens, its statistics, nothing held in between, other rules."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, RepetitionPenaltyLogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import dflash_hf
from dflash_hf.generation import iterate as module
from dflash_hf.generation.newest_context import NewestContext
from dflash_hf.generation.widths import _kept_choosers
from helpers.half import pairs
from helpers.whole_blocks import use_whole_blocks
from tiny import OracleDraft, oracle_draft, prompts, shallow_target, tiny_draft, truth_of

pytestmark = pytest.mark.same_on_every_release

NEW = 18
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


@cache
def target_of(family: str) -> PreTrainedModel:
    return shallow_target(family)


def armed(
    target: PreTrainedModel, inputs: dict[str, Tensor], seed: int, block_size: int = 8
) -> OracleDraft:
    ref = target.generate(**inputs, **GREEDY)
    return oracle_draft(target, truth_of(inputs, ref), seed, block_size)


def joined(steps: list[dflash_hf.DFlashStep]) -> list[list[int]]:
    """Each row's committed tokens over all steps."""
    rows = range(len(steps[0].committed))
    return [[token for step in steps for token in step.committed[row].tolist()] for row in rows]


def new_tokens(sequences: Tensor, inputs: dict[str, Tensor], counts: list[int]) -> list[list[int]]:
    columns = inputs["input_ids"].shape[1]
    return [
        row[columns : columns + count].tolist()
        for row, count in zip(sequences, counts, strict=True)
    ]


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.got: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.got.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize(
    ("family", "sizes", "eos"),
    pairs(["qwen3", "gemma3"], {"one": ([9], 8), "three": ([4, 11, 7], 5)}, [False, True]),
)
def test_committed_tokens_and_statistics_are_those_of_generate(
    family: str, sizes: tuple[list[int], int], eos: bool
) -> None:
    lengths, width = sizes
    target, inputs = target_of(family), prompts(lengths, 3)
    draft = armed(target, inputs, 5)
    draft.generation_config.verify_width = width
    kwargs = dict(GREEDY)
    if eos:
        sequences = target.generate(**inputs, **GREEDY)
        text = sequences[0, inputs["input_ids"].shape[1] :].tolist()
        # The token that the text says first at the latest place: texts differ from processor to processor.
        kwargs["eos_token_id"] = max(text, key=text.index)
    out = target.generate(**inputs, **kwargs, assistant_model=draft)
    stats = draft.last_stats
    draft.random.manual_seed(5)
    steps = list(dflash_hf.iterate(target, draft, **inputs, **kwargs))
    counts = [1 + sum(row) for row in stats.num_committed]
    assert joined(steps) == new_tokens(out, inputs, counts)
    assert draft.last_stats.num_committed == stats.num_committed
    assert draft.last_stats.num_accepted == stats.num_accepted
    for row, accepted in enumerate(stats.num_accepted):
        assert [int(s.num_accepted[row]) for s in steps[1:]][: len(accepted)] == accepted
        assert max(accepted, default=0) > 0, "the oracle has to be partly right"
        assert not any(int(s.num_accepted[row]) for s in steps[1 + len(accepted) :]), (
            "finished rows accept nothing"
        )
    assert bool(steps[-1].done.all())
    assert not any(bool(s.done.all()) for s in steps[:-1])
    assert [s.index for s in steps] == list(range(len(steps)))


def test_a_step_says_what_was_proposed_checked_and_kept() -> None:
    target, inputs = target_of("qwen3"), prompts([6, 9], 1)
    draft = armed(target, inputs, 2)
    full = target.generate(**inputs, **GREEDY)
    starts = inputs["attention_mask"].argmax(dim=1)
    with dflash_hf.target_model.hidden_states.Taps(
        target.model.layers, draft.config.target_layer_ids
    ).open() as taps:
        positions = (torch.arange(full.shape[1]) - starts[:, None]).clamp_min(0)
        mask = torch.arange(full.shape[1]) >= starts[:, None]
        whole = target(full, attention_mask=mask.long(), position_ids=positions)
        states = taps.take()
    run = dflash_hf.iterate(
        target, draft, **inputs, **GREEDY, output_logits=True, output_hidden_states=True
    )
    first = next(run)
    assert (first.proposals.shape, first.tokens.shape) == ((2, 0), (2, 1))
    assert torch.equal(first.anchor, inputs["input_ids"][:, -1])
    assert first.logits is first.draft_logits is first.hidden_states is None
    anchor, position = first.tokens[:, -1], first.positions[:, -1]
    for step in run:
        assert step.logits is not None
        assert step.draft_logits is not None
        assert step.hidden_states is not None
        assert torch.equal(step.draft_logits.argmax(-1), step.proposals)
        assert torch.equal(step.logits.argmax(-1), step.tokens)
        for row in range(2):
            if not len(step.committed[row]):
                assert int(step.num_accepted[row]) == 0
                continue
            assert step.anchor[row] == anchor[row]
            assert step.positions[row, 0] == position[row] + 1
            right = (step.proposals[row] == step.tokens[row, :-1]).long().cumprod(0).sum()
            assert step.num_accepted[row] == right
            kept = len(step.committed[row])
            assert torch.equal(step.committed[row], step.tokens[row, :kept])
            at = int(starts[row] + position[row])
            assert torch.allclose(
                step.logits[row, :kept], whole.logits[row, at : at + kept], atol=1e-8
            )
            assert torch.allclose(
                step.hidden_states[row, :kept], states[row, at : at + kept], atol=1e-8
            )
            anchor[row], position[row] = step.committed[row][-1], step.positions[row, kept - 1]
    step.logits.requires_grad_().sum().backward()  # normal tensors: autograd takes them


def test_states_of_a_draft_elsewhere_are_copied_to_the_targets_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, inputs = target_of("qwen3"), prompts([6], 1)
    elsewhere = torch.empty(1, 4, 8, device="meta")
    run_step: Any = module.step

    def step(run: Any) -> Any:
        found = run_step(run)
        monkeypatch.setattr(NewestContext, "states", elsewhere)
        return found

    monkeypatch.setattr(module, "step", step)
    run = dflash_hf.iterate(
        target, tiny_draft(target, 4), **inputs, **GREEDY, output_hidden_states=True
    )
    next(run)
    # There are no numbers that could be copied.
    with pytest.raises(NotImplementedError, match="copy out of meta"):
        next(run)


def test_a_tree_whose_size_is_left_open_follows_the_run() -> None:
    target, inputs = target_of("qwen3"), prompts([6], 1)
    # With random weights it is hardly ever right, so that plain decoding soon costs less.
    draft = tiny_draft(target, 4)
    draft.generation_config.num_tree_nodes = "auto"
    _, *steps = dflash_hf.iterate(target, draft, **inputs, **GREEDY)
    widths = [step.tokens.shape[1] for step in steps]
    assert max(widths) > 1
    assert min(widths) == 1
    assert all(step.node_ids is None for step in steps if step.tokens.shape[1] == 1)


def test_nothing_is_held_between_steps_and_after_closing() -> None:
    target, inputs = target_of("gemma3"), prompts([8], 4)
    draft = armed(target, inputs, 1)
    attention = target.config._attn_implementation

    ref = target.generate(**inputs, **GREEDY)

    def check() -> None:
        assert target.config._attn_implementation == attention
        assert not any(layer._forward_hooks for layer in target.model.layers)
        got: list[bool] = []
        other = threading.Thread(
            target=lambda: got.append(torch.equal(target.generate(**inputs, **GREEDY), ref))
        )
        other.start()
        other.join()
        assert got == [True]
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()

    run = dflash_hf.iterate(target, draft, **inputs, **GREEDY)
    check()
    next(run), next(run)
    check()
    # Between two steps the target and the draft may do anything, also generate.
    other = prompts([5], 6)
    plain = target.generate(**other, **GREEDY)
    assert torch.equal(
        target.generate(**other, **GREEDY, assistant_model=tiny_draft(target)), plain
    )
    assert not torch.equal(target(**other).logits, target(**inputs).logits[:, :5])
    check()
    next(run)
    run.close()
    check()
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    with pytest.raises(ZeroDivisionError):
        list(dflash_hf.iterate(target, draft, **inputs, **GREEDY, accept=lambda *_: 1 // 0))
    check()


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_run_that_is_left_keeps_the_widths_of_an_earlier_one(num_steps: int) -> None:
    target, inputs = target_of("qwen3"), prompts([6, 9], 1)
    draft = tiny_draft(target, 8)
    draft.generation_config.verify_width = "auto"
    assert list(dflash_hf.iterate(target, draft, **inputs, **GREEDY))
    before = dict(_kept_choosers[draft][target])
    assert before
    for is_closed in (True, False):
        steps = dflash_hf.iterate(target, draft, **inputs, **GREEDY)
        for _ in range(num_steps):
            next(steps)
        if is_closed:
            steps.close()
        del steps
        assert _kept_choosers[draft][target] == before


def test_two_iterators_over_one_pair_do_not_mix() -> None:
    target = target_of("qwen3")
    inputs = [prompts([7, 3], 1), prompts([5], 2)]
    draft = tiny_draft(target, 6)
    runs = [dflash_hf.iterate(target, draft, **given, **GREEDY) for given in inputs]
    steps: list[list[dflash_hf.DFlashStep]] = [[], []]
    waiting = [0, 1]
    while waiting:
        for index in list(waiting):
            step = next(runs[index], None)
            if step is None:
                waiting.remove(index)
            else:
                steps[index].append(step)
    for given, done in zip(inputs, steps, strict=True):
        ref = target.generate(**given, **GREEDY)
        assert joined(done) == new_tokens(ref, given, [NEW] * len(ref))


def test_streamer_criteria_and_processors_are_generates() -> None:
    target, inputs = target_of("qwen3"), prompts([8], 4)
    draft = armed(target, inputs, 3)
    ref = target.generate(**inputs, **GREEDY)
    stop = int(inputs["input_ids"].shape[1]) + 9

    class At(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return torch.full((len(input_ids),), input_ids.shape[1] >= stop)

    streamer = Recorder()
    steps = list(
        dflash_hf.iterate(
            target, draft, **inputs, **GREEDY, stopping_criteria=[At()], streamer=streamer
        )
    )
    assert joined(steps) == [ref[0, 8:stop].tolist()]
    assert ([token for put in streamer.got for token in put], streamer.ended) == (
        ref[0, :stop].tolist(),
        1,
    )
    processors = [RepetitionPenaltyLogitsProcessor(1.7)]
    ref = target.generate(**inputs, **GREEDY, logits_processor=processors)
    draft.arm(truth_of(inputs, ref), 3)
    steps = list(dflash_hf.iterate(target, draft, **inputs, **GREEDY, logits_processor=processors))
    assert joined(steps) == [ref[0, 8:].tolist()]


@pytest.mark.parametrize("proposal", ["argmax", "shared_noise", "sample"])
def test_sampling_is_that_of_generate_under_the_same_seed(proposal: str) -> None:
    target, inputs = target_of("qwen3"), prompts([8, 5], 4)
    draft = tiny_draft(target)
    draft.generation_config.proposal = proposal
    # What is looked at is a chain, and rejection would draw another text of trees
    use_whole_blocks(draft)
    kwargs = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.8, "top_k": 20}
    torch.manual_seed(1)
    out = target.generate(**inputs, **kwargs, assistant_model=draft)
    torch.manual_seed(1)
    steps = list(dflash_hf.iterate(target, draft, **inputs, **kwargs))
    assert joined(steps) == new_tokens(out, inputs, [NEW, NEW])


def second_best(logits: Tensor, anchor: Tensor) -> Tensor:
    """Takes the draft's second choice wherever its first would repeat the token before: a rule over the top 2."""
    top = logits.topk(2, dim=-1).indices
    chosen, before = [], anchor
    for slot in range(logits.shape[1]):
        before = torch.where(top[:, slot, 0] == before, top[:, slot, 1], top[:, slot, 0])
        chosen.append(before)
    return torch.stack(chosen, dim=1)


def test_any_proposal_rule_keeps_the_text() -> None:
    target, inputs = target_of("qwen3"), prompts([8, 5, 12], 4)
    draft = armed(target, inputs, 2)
    ref = target.generate(**inputs, **GREEDY)
    for rule in (second_best, lambda logits, anchor: logits.topk(2, dim=-1).indices[..., 1]):
        steps = list(
            dflash_hf.iterate(target, draft, **inputs, **GREEDY, propose=rule, output_logits=True)
        )
        assert joined(steps) == new_tokens(ref, inputs, [NEW] * 3)
        for step in steps[1:]:
            assert torch.equal(step.proposals, rule(step.draft_logits, step.anchor))


def test_a_proposal_rule_may_keep_the_tokens_before() -> None:
    target, inputs = target_of("qwen3"), prompts([8, 5], 4)
    kept: list[Tensor] = []

    def rule(logits: Tensor, anchor: Tensor) -> Tensor:
        kept.append(anchor)
        return second_best(logits, anchor)

    draft = tiny_draft(target)
    steps = list(dflash_hf.iterate(target, draft, **inputs, **GREEDY, propose=rule))
    assert all(map(torch.equal, kept, [step.anchor for step in steps[1:]]))


def test_a_lossy_rule_commits_proposals_and_the_bonus_token() -> None:
    """Typical acceptance: a proposal stands where the target gives it a good share of its best token's probability."""
    target, inputs = target_of("qwen3"), prompts([8, 5], 4)
    draft = tiny_draft(target)
    share = 0.02

    def typical(proposals: Tensor, tokens: Tensor, logits: Tensor) -> Tensor:
        probs = logits[:, :-1].softmax(dim=-1)
        chosen = probs.gather(-1, proposals[..., None])[..., 0]
        return (chosen >= share * probs.amax(dim=-1)).long().cumprod(dim=1).sum(dim=1)

    exact = list(dflash_hf.iterate(target, draft, **inputs, **GREEDY))
    steps = list(
        dflash_hf.iterate(target, draft, **inputs, **GREEDY, accept=typical, output_logits=True)
    )
    assert joined(steps) != joined(exact)
    assert len(steps) < len(exact), "a laxer rule needs fewer verifies"
    lossy = 0
    for step in steps[1:]:
        assert step.logits is not None
        assert torch.equal(step.tokens, step.logits.argmax(-1)), (
            "the target's tokens, not what was committed"
        )
        for row in range(2):
            kept = len(step.committed[row])
            right = int(typical(step.proposals, step.tokens, step.logits)[row])
            if kept:
                assert int(step.num_accepted[row]) == right
                expected = [*step.proposals[row, :right].tolist(), int(step.tokens[row, right])]
                assert step.committed[row].tolist() == expected[:kept]
                shown = min(right, kept)
                lossy += not torch.equal(step.proposals[row, :shown], step.tokens[row, :shown])
    assert lossy > 2
    # What was committed is what the target goes on from: every last token is its own after the committed prefix.
    rows = joined(steps)
    inputs_of = [
        inputs["input_ids"][row][inputs["attention_mask"][row].bool()].tolist() for row in range(2)
    ]
    for row in range(2):
        logits = target(torch.tensor([inputs_of[row] + rows[row]])).logits[0].argmax(-1).tolist()
        at = len(inputs_of[row])
        for step in steps[:-1]:
            at += len(step.committed[row])
            if len(step.committed[row]) == int(step.num_accepted[row]) + 1:
                assert rows[row][at - len(inputs_of[row]) - 1] == logits[at - 2]


def test_the_exact_rule_given_by_hand_changes_nothing() -> None:
    target, inputs = target_of("gemma3"), prompts([8, 5], 4)
    draft = armed(target, inputs, 2)
    ref = target.generate(**inputs, **GREEDY)
    # What the rule got, which is its own to keep, and what that was.
    kept: list[Tensor] = []
    copies: list[Tensor] = []

    def matching(proposals: Tensor, tokens: Tensor, logits: Tensor) -> Tensor:
        kept.extend([proposals, tokens])
        copies.extend([proposals.clone(), tokens.clone()])
        return (proposals == tokens[:, :-1]).long().cumprod(dim=1).sum(dim=1)

    steps = list(dflash_hf.iterate(target, draft, **inputs, **GREEDY, accept=matching))
    assert all(map(torch.equal, kept, copies))
    assert joined(steps) == new_tokens(ref, inputs, [NEW, NEW])
    assert any(int(step.num_accepted.max()) > 1 for step in steps)


class AfterTokens(StoppingCriteria):
    """Stops a row at a length."""

    def __init__(self, num: int, is_row_wise: bool) -> None:
        self.num = num
        self.is_row_wise = is_row_wise

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.num)


def keep_all(proposals: Tensor, tokens: Tensor, logits: Tensor) -> Tensor:
    return torch.full((len(proposals),), proposals.shape[1])


def test_a_row_wise_criterion_ends_a_row_whose_rule_is_lossy() -> None:
    target, inputs = target_of("qwen3"), prompts([8], 4)
    draft = armed(target, inputs, 2)
    whole = joined(list(dflash_hf.iterate(target, draft, **inputs, **GREEDY, accept=keep_all)))
    for num in (9, 10, 13, 17, 20):
        draft.random.manual_seed(2)
        steps = dflash_hf.iterate(
            target,
            draft,
            **inputs,
            **GREEDY,
            accept=keep_all,
            max_time=1e6,
            stopping_criteria=[AfterTokens(num, is_row_wise=True)],
        )
        assert joined(list(steps)) == [whole[0][: num - 8]]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"propose": lambda logits, anchor: anchor}, r"integers of shape \(1, 7\)"),
        ({"propose": lambda logits, anchor: logits[..., 0]}, r"got torch.float64 \(1, 7\)"),
        ({"propose": lambda logits, anchor: logits.argmax(-1) + 64}, r"values in \[0, 63\]"),
        ({"accept": lambda proposals, tokens, logits: 1}, "got int"),
        (
            {"accept": lambda proposals, tokens, logits: tokens.new_full((1,), 8)},
            r"values in \[0, 7\], got 8",
        ),
    ],
)
def test_rules_that_return_something_else_are_refused(rules: dict[str, Any], message: str) -> None:
    target, inputs = target_of("qwen3"), prompts([8], 4)
    with pytest.raises(ValueError, match=message):
        list(dflash_hf.iterate(target, tiny_draft(target), **inputs, **GREEDY, **rules))


def test_what_cannot_be_honoured_is_refused_before_any_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, inputs = target_of("qwen3"), prompts([8], 4)
    rows = prompts([8, 5], 4)
    draft = tiny_draft(target)
    monkeypatch.setattr(target, "forward", lambda **_: pytest.fail("a forward ran"))

    def refused(message: str, assistant: Any = draft, **kwargs: Any) -> None:
        with pytest.raises(ValueError, match=message):
            dflash_hf.iterate(target, assistant, **{**inputs, **GREEDY, **kwargs})

    refused("num_beams=1", num_beams=2)
    refused("drop that keyword", assistant_model=draft)
    refused("expected propose that can be called, or None, got 3", propose=3)
    refused("expected accept that can be called, or None, got 3", accept=3)
    refused("got 'Qwen3ForCausalLM'", assistant=target)
    refused("never see what lies behind", accept=keep_all, repetition_penalty=1.2)
    own = [AfterTokens(9, is_row_wise=False)]
    refused("stop iterating instead", accept=keep_all, stopping_criteria=own)
    refused("stop iterating instead", accept=keep_all, max_time=60.0, **rows)
    draft.generation_config.proposal = "sample"
    refused("needs the distribution of the proposals", accept=keep_all)
    refused("needs the distribution of the proposals", propose=second_best)
