"""The draft's context kept with a cache: used in the next turn where it fits, left out with a reason where not."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from transformers import DynamicCache

from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.generation import user_cache
from helpers.turns import (
    GREEDY,
    NEW,
    answer_mask,
    arm,
    check_caches,
    first_turn,
    next_turn,
    recording_draft,
    turn,
)
from helpers.whole_blocks import use_whole_blocks
from tiny import prompts, tiny_draft, tiny_target


@pytest.fixture
def reasons(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged about contexts that are left out."""
    messages: list[str] = []

    class Logger:
        warning_once = staticmethod(messages.append)

    monkeypatch.setattr(user_cache, "logger", Logger)
    return messages


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_cache_without_context_gives_the_same_text(family: str, reasons: list[str]) -> None:
    target, draft, caches, ids, mask = first_turn(family, [4, 11, 7])
    del caches[1].dflash_context
    past = [int(row[: ids.shape[1] - 1].sum()) for row in mask]
    for seed in range(2):  # the second of these turns has the context of the first
        ids, mask = next_turn(ids, mask, seed)
        ids, mask = turn(target, draft, caches, ids, mask, seed=seed, offsets=past)
    assert len(reasons) == 1
    assert "not advanced with a draft" in reasons[0]


def test_a_plain_turn_in_between(reasons: list[str]) -> None:
    target, draft, caches, ids, mask = first_turn("qwen3", [4, 11, 7])
    ids, mask = next_turn(ids, mask, 1)
    for cache in caches:
        out = target.generate(input_ids=ids, attention_mask=mask, **GREEDY, **{CACHE_NAME: cache})
    mask = answer_mask(out, mask, None)
    past = mask[:, :-1].sum(dim=1).tolist()
    ids, mask = next_turn(out, mask, 2)
    turn(target, draft, caches, ids, mask, offsets=past)
    assert "changed since" in reasons[0]


@pytest.mark.parametrize(("num", "kept"), [(3, True), (12, False)])
def test_a_cropped_cache(num: int, kept: bool, reasons: list[str]) -> None:
    target, draft, caches, ids, mask = first_turn("qwen3", [4, 11, 7])
    for cache in caches:
        cache.crop(-num)
    past = (mask[:, : -num - 1]).sum(dim=1).tolist()
    ids, mask = next_turn(ids[:, : -num - 1], mask[:, : -num - 1], 3)
    # The draft has a sliding layer, whose ring holds a window and a block: it cannot go back further than that.
    turn(target, draft, caches, ids, mask, offsets=None if kept else past)
    assert bool(reasons) == (not kept)


def test_cropped_to_where_it_had_no_context_yet(reasons: list[str]) -> None:
    # No sliding layer: the draft's rings would have lost what was before.
    target, draft, caches, ids, mask = first_turn(
        "qwen3", [9, 4], layer_types=["full_attention"] * 2
    )
    del caches[1].dflash_context
    past = mask[:, :-1].sum(dim=1).tolist()
    ids, mask = next_turn(ids, mask, 1)
    ids, mask = turn(target, draft, caches, ids, mask, offsets=past)
    num = ids.shape[1] - 9
    for cache in caches:
        cache.crop(9 - int(cache.get_seq_length()))
    ids, mask = ids[:, :-num], mask[:, :-num]
    past = mask.sum(dim=1).tolist()
    ids, mask = next_turn(ids, mask, 2)
    turn(target, draft, caches, ids, mask, offsets=past)
    assert len(reasons) == 2


def test_cropped_and_advanced_to_the_same_length_by_other_tokens(reasons: list[str]) -> None:
    target, draft, caches, ids, mask = first_turn("qwen3", [9])
    for cache in caches:
        cache.crop(-2)
        target(torch.tensor([[5, 7]]), **{CACHE_NAME: cache})
    ids = torch.cat([ids[:, :-3], torch.tensor([[5, 7]])], dim=1)
    past = [ids.shape[1]]
    ids, mask = next_turn(ids, mask[:, :-1], 3)
    turn(target, draft, caches, ids, mask, offsets=past)
    assert "changed since" in reasons[0]


def test_a_row_without_its_context_leaves_the_others_theirs(reasons: list[str]) -> None:
    target, draft, caches, ids, mask = first_turn("qwen3", [4, 11, 7])
    # The second row's first tokens are masked now: all its positions move.
    first = int(mask[1].argmax())
    mask[1, first : first + 2] = 0
    ids, mask = next_turn(ids, mask, 4)
    given = {"input_ids": ids, "attention_mask": mask, **GREEDY}
    ref = target.generate(**given, **{CACHE_NAME: caches[0]})
    arm(draft, [[], [], []], 0)
    assert torch.equal(
        target.generate(**given, **{CACHE_NAME: caches[1]}, assistant_model=draft), ref
    )
    assert len(reasons) == 1
    # It counts from its first new tokens: the last one of the answer before, and the user's five.
    assert draft.blocks[0][0].tolist() == [int(mask[0].sum()), 6, int(mask[2].sum())]


def test_another_drafts_context_is_not_used(reasons: list[str]) -> None:
    target, _, caches, ids, mask = first_turn("qwen3", [9])
    past = [ids.shape[1] - 1]
    ids, mask = next_turn(ids, mask, 3)
    turn(target, recording_draft(target), caches, ids, mask, offsets=past)
    assert "another draft's" in reasons[0]


def test_copied_and_pickled_caches_keep_their_context(reasons: list[str]) -> None:
    target, draft, caches, ids, mask = first_turn("gemma3", [9, 4])
    buffer = io.BytesIO()
    torch.save(caches[1], buffer)
    buffer.seek(0)
    ids, mask = next_turn(ids, mask, 3)
    for cache in (copy.deepcopy(caches[1]), torch.load(buffer, weights_only=False)):
        turn(target, draft, (copy.deepcopy(caches[0]), cache), ids, mask)
    assert not reasons


@pytest.mark.parametrize("after", ["block_size", "verify_width"])
def test_options_may_change_between_turns(after: str, reasons: list[str]) -> None:
    target, draft, caches, ids, mask = first_turn("gemma3", [9, 4])
    setattr(draft.generation_config, after, 3)
    for seed in range(2):
        ids, mask = next_turn(ids, mask, seed)
        ids, mask = turn(target, draft, caches, ids, mask, seed=seed)
    assert not reasons


def test_windows_and_proposals_that_begin_at_the_anchor(
    reasons: list[str],
) -> None:
    target = tiny_target("qwen3")
    settings = {
        "window_from_anchor": True,
        "sample_from_anchor": True,
        "is_causal": True,
        "sliding_window": 5,
    }
    draft = recording_draft(target, 4, **settings)
    caches = (DynamicCache(), DynamicCache())
    inputs = prompts([9, 15], 3)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for seed in range(3):
        ids, mask = turn(target, draft, caches, ids, mask, seed=seed)
    assert not reasons


def test_a_verify_of_one_token_attaches_nothing(reasons: list[str]) -> None:
    target, draft, caches, ids, mask = first_turn("qwen3", [9])
    draft.generation_config.verify_width = 1
    ids, mask = next_turn(ids, mask, 1)
    given = {"input_ids": ids, "attention_mask": mask, **GREEDY}
    out = [target.generate(**given, **{CACHE_NAME: caches[0]})]
    out.append(target.generate(**given, **{CACHE_NAME: caches[1]}, assistant_model=draft))
    assert torch.equal(*out)
    check_caches(caches[1], caches[0])
    assert caches[1].dflash_context is None


def test_a_prefix_computed_once_serves_many_rows(reasons: list[str]) -> None:
    target = tiny_target("qwen3")
    draft = recording_draft(target)
    prefix = prompts([12], 5)["input_ids"]
    caches = (DynamicCache(), DynamicCache())
    target.generate(prefix, max_new_tokens=1, **{CACHE_NAME: caches[0]})
    target.generate(prefix, max_new_tokens=1, **{CACHE_NAME: caches[1]}, assistant_model=draft)
    check_caches(caches[1], caches[0])
    for cache in caches:
        cache.batch_repeat_interleave(3)
    ids = prefix.repeat(3, 1)
    ids, mask = next_turn(ids, torch.ones_like(ids), 2)
    turn(target, draft, caches, ids, mask)
    assert not reasons


def test_num_return_sequences_with_an_empty_cache() -> None:
    target = tiny_target("qwen3")
    inputs = prompts([9, 4], 5)
    cache, draft = DynamicCache(), tiny_draft(target)
    settings = {**GREEDY, "do_sample": True, "num_return_sequences": 2, "assistant_model": draft}
    torch.manual_seed(3)
    ref = target.generate(**inputs, **settings)
    torch.manual_seed(3)
    assert torch.equal(target.generate(**inputs, **settings, **{CACHE_NAME: cache}), ref)
    assert cache.layers[0].keys.shape[:3:2] == (4, ref.shape[1] - 1)
    with pytest.raises(ValueError, match="batch_repeat_interleave"):
        target.generate(
            **prompts([30, 30], 1), **GREEDY, **{CACHE_NAME: cache}, assistant_model=draft
        )


@pytest.mark.parametrize("proposal", ["argmax", "shared_noise", "sample"])
def test_a_sampled_turn_says_what_it_says_without_a_cache(proposal: str) -> None:
    target = tiny_target("gemma3")
    draft = tiny_draft(target)
    draft.generation_config.proposal = proposal
    use_whole_blocks(draft)
    inputs = prompts([9, 4], 5)
    cache = DynamicCache(config=target.config)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    settings = {"max_new_tokens": NEW, "do_sample": True, "assistant_model": draft}
    for seed in range(3):
        torch.manual_seed(seed)
        ref = target.generate(input_ids=ids, attention_mask=mask, **settings)
        committed = draft.last_stats.num_committed
        torch.manual_seed(seed)
        out = target.generate(input_ids=ids, attention_mask=mask, **settings, **{CACHE_NAME: cache})
        assert torch.equal(out, ref)
        assert draft.last_stats.num_committed == committed
        ids, mask = next_turn(ref, answer_mask(ref, mask, None), seed)


def test_a_cache_that_records_its_past_can_be_rolled_back() -> None:
    target, draft, caches, ids, mask = first_turn("gemma3", [9, 4])
    for cache in caches:
        cache.activate_past_recording()
    ids, mask = next_turn(ids, mask, 1)
    try:
        target.generate(
            ids, attention_mask=mask, **GREEDY, **{CACHE_NAME: copy.deepcopy(caches[0])}
        )
    except RuntimeError:
        pytest.skip(
            "plain generate of this Transformers cannot go on from a cache that records its past"
        )
    ids, mask = turn(target, draft, caches, ids, mask)
    for cache in caches:
        cache.crop(-4)
    ids, mask = next_turn(ids[:, :-5], mask[:, :-5], 2)
    turn(target, draft, caches, ids, mask)
