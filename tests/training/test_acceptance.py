"""The walk over all anchors is what a decoding loop written out by hand commits, verify by verify."""

from collections.abc import Callable

import pytest
import torch
from transformers import Qwen3ForCausalLM

from dflash_hf.generation_config import DFlashGenerationConfig
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import Target, find_target
from dflash_hf.training.anchors import all_anchors
from dflash_hf.training.collators import collate
from dflash_hf.training.example import Example
from dflash_hf.training.forward import run_blocks, target_features
from dflash_hf.training.loss import block_labels, block_loss, decay_weights
from dflash_hf.training.target_answers import regenerate_answers
from dflash_hf.training.walking import accepted_at_anchors, answers_of, walk, walked_acceptance
from helpers.whole_blocks import use_whole_blocks
from tiny import DFLASH2, DSPARK

MakeDraft = Callable[..., DFlashDraftModel]


def propose(
    draft: DFlashDraftModel, hidden: torch.Tensor, target: Target, anchor: int
) -> list[int]:
    """The draft's greedy proposals for slots `[1, K, D]`, one slot after another."""
    before, path = torch.tensor([anchor]), []
    for states, logits in zip(hidden[0], draft.compute_logits(hidden[0], target.head), strict=True):
        candidates, scores = logits.argmax(dim=-1, keepdim=True), torch.zeros(1, 1)
        if draft.candidate_selector is not None:
            candidates, scores = draft.candidate_selector.score(states, before, logits)
        elif draft.markov_head is not None:
            candidates = (logits + draft.markov_head(before)[0]).argmax(dim=-1, keepdim=True)
        before = candidates[scores[0].argmax()][None]
        path.append(int(before))
    return path


def simulate(
    draft: DFlashDraftModel,
    target: Target,
    example: Example,
    limit: int,
    eos: int,
    block: int,
    width: int,
) -> list[int]:
    """Greedy speculative decoding of one prompt with whole forwards and no cache; committed tokens per verify."""
    prompt = example.input_ids[: example.prompt_length()]
    model, config = target.model, draft.config
    tokens = [*prompt, int(model(torch.tensor([prompt])).logits[0, -1].argmax())]
    committed: list[int] = []
    while len(tokens) - len(prompt) < limit and tokens[-1] != eos:
        anchor = len(tokens) - 1
        features = target_features(
            target, config.target_layer_ids, collate([Example.from_pair(tokens, [])])
        ).taps
        ids = torch.tensor([[tokens[-1]] + [config.mask_token_id] * (block - 1)])
        hidden = draft(
            noise_embeds=draft.embed(ids, target.embedding),
            context_hidden_states=features[:, :anchor],
        ).last_hidden_state
        proposals = propose(draft, hidden[:, 1:width], target, tokens[-1])
        best = model(torch.tensor([tokens + proposals])).logits[0, anchor:].argmax(dim=-1).tolist()
        accepted = 0
        while accepted < len(proposals) and proposals[accepted] == best[accepted]:
            accepted += 1
        new = best[: accepted + 1]
        if eos in new:
            new = new[: new.index(eos) + 1]
        new = new[: limit - (len(tokens) - len(prompt))]
        tokens += new
        committed.append(len(new))
    assert tokens == example.input_ids, "the example is not the target's own greedy text"
    return committed


def often_right(
    draft: DFlashDraftModel, target: Qwen3ForCausalLM
) -> tuple[DFlashDraftModel, Target]:
    """A target whose greedy text is repetitive enough that a random draft is sometimes right."""
    # A strong bias towards a few tokens makes a random draft right now and then, and lets some answers end.
    with torch.no_grad():
        target.lm_head.weight[6:] *= 0.05
        draft.norm.weight *= 4
    return draft, find_target(target.double())


@pytest.fixture(params=[{}, DFLASH2, DSPARK], ids=["dflash", "dflash 2", "dspark"])
def pair(
    request: pytest.FixtureRequest, target: Qwen3ForCausalLM, make_draft: MakeDraft
) -> tuple[DFlashDraftModel, Target]:
    return often_right(make_draft(**request.param).double().eval(), target)


@torch.no_grad()
@pytest.mark.parametrize(("block", "width"), [(6, 6), (5, 3)])
def test_walk_equals_a_decoding_loop(
    block: int, width: int, pair: tuple[DFlashDraftModel, Target]
) -> None:
    draft, target = pair
    generator = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(0, 47, (length,), generator=generator).tolist() for length in (3, 8, 1, 5)
    ]
    for limit in (8, 13):
        answers = regenerate_answers(
            target.model,
            prompts,
            max_new_tokens=limit,
            eos_token_id=3,
            pad_token_id=0,
            batch_size=4,
        )
        examples = [Example.from_pair(*pair) for pair in zip(prompts, answers, strict=True)]
        walked = walked_acceptance(
            draft, target, examples, block_size=block, verify_width=width, batch_size=4
        )
        expected = [
            simulate(draft, target, example, limit, 3, block, width) for example in examples
        ]
        assert walked.committed == expected
        counts = [count for row in expected for count in row]
        assert walked.acceptance_length == pytest.approx(sum(counts) / len(counts))
        if width > 1:
            assert len(set(counts)) > 1, "the draft is never right: the case shows nothing"


@torch.no_grad()
@pytest.mark.parametrize(("block", "width"), [(6, 6), (6, 3), (4, 4), (6, 1), (2, 2)])
def test_walk_equals_generate(
    block: int, width: int, pair: tuple[DFlashDraftModel, Target]
) -> None:
    """What training reports is what `generate` does, verify by verify, in a left-padded batch."""
    check_walk(*pair, block, width)


@torch.no_grad()
@pytest.mark.parametrize(("block", "width"), [(6, 7), (6, None), (6, 3), (4, 5), (6, 1)])
def test_walk_equals_generate_where_the_anchor_proposes(
    block: int, width: int | None, target: Qwen3ForCausalLM, make_draft: MakeDraft
) -> None:
    draft = make_draft(sample_from_anchor=True).double().eval()
    check_walk(*often_right(draft, target), block, width)


def check_walk(draft: DFlashDraftModel, target: Target, block: int, width: int | None) -> None:
    """Compares the walk with the statistics of `generate`."""
    generator = torch.Generator().manual_seed(6)
    prompts = [
        torch.randint(0, 47, (length,), generator=generator).tolist()
        for length in (3, 8, 1, 5, 6, 2)
    ]
    options = {"max_new_tokens": 21, "eos_token_id": 3, "pad_token_id": 0}
    answers = regenerate_answers(target.model, prompts, **options)
    examples = [Example.from_pair(*row) for row in zip(prompts, answers, strict=True)]
    assert {len(answer) for answer in answers} > {21}, (
        "no answer ends before the limit: a case is not covered"
    )
    walked = walked_acceptance(draft, target, examples, block_size=block, verify_width=width)
    draft.generation_config = DFlashGenerationConfig(block_size=block, verify_width=width)
    if width is None:
        use_whole_blocks(draft)
    ids = torch.tensor([[0] * (8 - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (8 - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    target.model.generate(
        input_ids=ids, attention_mask=mask, do_sample=False, assistant_model=draft, **options
    )
    assert walked.committed == draft.last_stats.num_committed
    assert walked.acceptance_length == draft.last_stats.acceptance_length
    assert width == 1 or walked.acceptance_length > 1, (
        "the draft is never right: the case shows nothing"
    )


@torch.no_grad()
def test_the_loss_counts_what_the_walk_would_accept(pair: tuple[DFlashDraftModel, Target]) -> None:
    """The loss scores a selector behind right tokens, the walk behind its own: the same until the first wrong one."""
    draft, target = pair
    generator = torch.Generator().manual_seed(6)
    prompts = [
        torch.randint(0, 47, (length,), generator=generator).tolist() for length in (3, 8, 1, 5)
    ]
    answers = regenerate_answers(
        target.model, prompts, max_new_tokens=21, eos_token_id=3, pad_token_id=0
    )
    examples = [Example.from_pair(*row) for row in zip(prompts, answers, strict=True)]
    batch = collate(examples)
    anchors = all_anchors(batch.loss_mask, 6)
    features = target_features(target, draft.config.target_layer_ids, batch).taps
    result = block_loss(
        run_blocks(draft, target, batch, features, anchors),
        block_labels(batch, anchors),
        decay_weights(6, 3.0),
        lambda hidden: draft.compute_logits(hidden, target.head),
        selector=draft.candidate_selector,
        behind=draft.logits_behind,
    )
    assert int(result.accepted) == int(accepted_at_anchors(draft, target, batch).sum()) > 3


@torch.no_grad()
def test_every_answer_of_a_conversation_is_walked(pair: tuple[DFlashDraftModel, Target]) -> None:
    """Each as `generate` goes over it behind all that was said before."""
    draft, target = pair
    options = {"max_new_tokens": 15, "eos_token_id": 3, "pad_token_id": 0}
    ids, mask, expected = [5, 9, 4], [0, 0, 0], list[int]()
    for question in ([], [7, 2, 8], [1]):
        ids, mask = ids + question, mask + [0] * len(question)
        (answer,) = regenerate_answers(target.model, [ids], **options)
        example = Example.from_pair(ids, answer)
        expected += simulate(draft, target, example, 15, 3, 6, 6)
        ids, mask = ids + answer, mask + [1] * len(answer)
    whole = Example(input_ids=ids, loss_mask=mask)
    first = Example(input_ids=[5, 9, 4, 6], loss_mask=[0, 0, 0, 1])
    assert len(answers_of(whole)) == 3
    walked = walked_acceptance(draft, target, [whole, first])
    assert walked.committed == [expected, []]


def test_a_walk_that_fails_restores_the_mode(pair: tuple[DFlashDraftModel, Target]) -> None:
    draft, target = pair
    example = Example(input_ids=[5, 9, 4, 6], loss_mask=[0, 0, 1, 1])

    def fail(num_done: int) -> None:
        raise KeyboardInterrupt

    was_training = draft.training
    draft.train()
    try:
        with pytest.raises(KeyboardInterrupt):
            walked_acceptance(draft, target, [example], on_batch=fail)
        assert draft.training
    finally:
        draft.train(was_training)


def test_the_cases_of_the_walk() -> None:
    accepted = [0, 0, 2, 9, 0, 1, 0, 0]
    assert walk(accepted, 2, 7) == [3, 2]
    assert walk(accepted, 3, 7) == [4], "what lies beyond the end is cut off"
    assert walk(accepted, 4, 7) == [1, 2]
    assert walk(accepted, 7, 7) == [], "an answer of one token comes from the prefill"
    assert walk(accepted, 8, 7) == []


@torch.no_grad()
def test_chunks_of_anchors_do_not_matter(
    pair: tuple[DFlashDraftModel, Target], examples: list[Example]
) -> None:
    draft, target = pair
    whole, parts = (
        accepted_at_anchors(draft, target, collate(examples), chunk_anchors=size)
        for size in (64, 3)
    )
    assert torch.equal(whole, parts)


def test_widths_out_of_range_are_refused(
    pair: tuple[DFlashDraftModel, Target], examples: list[Example]
) -> None:
    for widths in (
        {"block_size": 7},
        {"block_size": 1},
        {"block_size": 4, "verify_width": 5},
        {"verify_width": 0},
    ):
        with pytest.raises(ValueError, match="expected 2 <= block_size <= 6"):
            accepted_at_anchors(*pair, collate(examples), **widths)
