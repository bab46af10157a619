"""Greedy decoding with a draft is plain `generate`, token for token, in every family, batch, block and width."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from dflash_hf import DFlashDraftModel
from dflash_hf.generation import prefill
from helpers.whole_blocks import use_whole_blocks
from tiny import DFLASH2, FAMILIES, MIXED, oracle_draft, prompts, tiny_draft, tiny_target, truth_of

NEW = 16
LENGTHS = {"one": [9], "three": [4, 11, 7], "eight": [12, 3, 5, 9, 1, 7, 2, 8]}
# Seed -> block and width; without one it is the default: a tree, or as wide as pays. A case takes two of them: every
# two of family, rows and seed meet in one.
SIZES = [(2, 2), (5, None), (8, 3), (16, 16), (8, None), (16, 9)]


@cache
def target_of(family: str) -> PreTrainedModel:
    return tiny_target(family)


def check_same(
    target: PreTrainedModel, draft: DFlashDraftModel, inputs: dict, ref: torch.Tensor, **kwargs
) -> None:
    attention = target.config._attn_implementation
    out = target.generate(**inputs, **kwargs, assistant_model=draft, return_dict_in_generate=True)
    assert torch.equal(out.sequences, ref)
    assert out.speculative is draft.last_stats
    assert target.config._attn_implementation == attention


def check_partly_right(draft: DFlashDraftModel) -> None:
    """Where verifies are of one width: by default they are of none at all while that pays better."""
    width = draft.generation_config.verify_width
    lengths = draft.last_stats.acceptance_length_per_row
    assert width is None or 1.0 < sum(lengths) / len(lengths) < width, (
        "the oracle has to be partly right"
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", LENGTHS)
def test_greedy_equals_plain_generate(family: str, batch: str) -> None:
    target = target_of(family)
    seen: set[int] = set()
    first = 2 * list(LENGTHS).index(batch) + list(FAMILIES).index(family)
    for seed in (first % len(SIZES), (first + 1) % len(SIZES)):
        block_size, width = SIZES[seed]
        inputs = prompts(LENGTHS[batch], seed)
        ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        seen |= set(ref[:, -NEW:].flatten().tolist())
        assert target(**inputs).logits[:, -1].isfinite().all(), (
            "equal texts made of NaN would mean nothing"
        )
        draft = oracle_draft(target, truth_of(inputs, ref), seed, block_size)
        draft.generation_config.verify_width = width
        check_same(target, draft, inputs, ref, max_new_tokens=NEW, do_sample=False)
        check_partly_right(draft)
    assert len(seen) > 8, "texts that repeat themselves would hide errors"


DFLASH2_FAMILIES = ["qwen3-sliding", "llama", "gemma3", "gpt-oss"]


@pytest.mark.parametrize("family", DFLASH2_FAMILIES)
@pytest.mark.parametrize("batch", ["one", "three"])
def test_greedy_with_dflash2_equals_plain_generate(family: str, batch: str) -> None:
    target = target_of(family)
    first = (list(LENGTHS).index(batch) + DFLASH2_FAMILIES.index(family)) % 2
    inputs = prompts(LENGTHS[batch], first)
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    for seed in (first, first + 2):  # every size meets every family, in one of the two batches
        block_size, width = SIZES[seed]
        draft = oracle_draft(target, truth_of(inputs, ref), seed, block_size, **DFLASH2)
        draft.generation_config.verify_width = width
        if block_size == 8:
            # The selector works in the draft's dtype, the head in the target's
            draft.to(torch.bfloat16)
        check_same(target, draft, inputs, ref, max_new_tokens=NEW, do_sample=False)
        check_partly_right(draft)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_that_is_never_right_changes_nothing(family: str) -> None:
    target = target_of(family)
    inputs = prompts([6, 10], 3)
    ref = target.generate(**inputs, max_new_tokens=8, do_sample=False)
    check_same(target, tiny_draft(target, 6), inputs, ref, max_new_tokens=8, do_sample=False)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt-oss", "mistral"])
def test_eos_inside_a_block_ends_the_row_there(family: str) -> None:
    target = target_of(family)
    for seed in range(2):
        inputs = prompts([4, 11, 7], seed)
        free = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        # Tokens that really occur, so that rows end inside blocks, at different steps, and one perhaps never.
        eos = [int(free[0, -NEW + 3 + seed]), int(free[1, -5])]
        ref = target.generate(
            **inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=eos, pad_token_id=0
        )
        draft = oracle_draft(target, truth_of(inputs, free), seed, 8)
        settings = {
            "max_new_tokens": NEW,
            "do_sample": False,
            "eos_token_id": eos,
            "pad_token_id": 0,
        }
        check_same(target, draft, inputs, ref, **settings)


@pytest.mark.parametrize("new", [1, 2, 7, 8, 9])
def test_length_limits_are_exact(new: int) -> None:
    target = target_of("qwen3")
    inputs = prompts([5, 8], 1)
    free = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = oracle_draft(target, truth_of(inputs, free), 2, 8)
    for limit in ({"max_new_tokens": new}, {"max_length": 8 + new}):
        check_same(target, draft, inputs, free[:, : 8 + new], do_sample=False, **limit)


@pytest.mark.parametrize("new", [7.5, 20.0, math.inf])
def test_a_limit_that_is_no_whole_number(new: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "FIRST_ROOM", 4)
    target = target_of("qwen3")
    inputs = prompts([5, 8], 1)
    free = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    settings: dict[str, Any] = {
        "max_new_tokens": new,
        "do_sample": False,
        "eos_token_id": free[:, -1].tolist(),
        "pad_token_id": 0,
    }
    ref = target.generate(**inputs, **settings)
    draft = oracle_draft(target, truth_of(inputs, free), 2, 8)
    check_same(target, draft, inputs, ref, **settings)


def test_a_batch_accepts_row_by_row() -> None:
    target = target_of("qwen3")
    inputs = prompts([4, 11, 7], 5)
    draft = tiny_draft(target, 8)
    use_whole_blocks(draft)
    target.generate(**inputs, max_new_tokens=20, do_sample=False, assistant_model=draft)
    together = draft.last_stats.num_committed
    for row, length in enumerate([4, 11, 7]):
        alone = {name: tensor[row : row + 1, -length:] for name, tensor in inputs.items()}
        target.generate(**alone, max_new_tokens=20, do_sample=False, assistant_model=draft)
        assert draft.last_stats.num_committed == [together[row]]


def test_prefill_in_chunks_writes_the_same_context() -> None:
    target = target_of("qwen3-sliding")
    inputs = prompts([15, 40], 2)
    draft = tiny_draft(target, 8)
    use_whole_blocks(draft)
    whole = target.generate(**inputs, max_new_tokens=20, do_sample=False, assistant_model=draft)
    committed = draft.last_stats.num_committed
    chunked = target.generate(
        **inputs, max_new_tokens=20, do_sample=False, assistant_model=draft, prefill_chunk_size=7
    )
    assert torch.equal(whole, chunked)
    assert draft.last_stats.num_committed == committed


def test_rows_longer_than_the_ring_keep_only_their_window() -> None:
    target = target_of("qwen3-sliding")
    inputs = prompts([60, 33], 4)
    ref = target.generate(**inputs, max_new_tokens=60, do_sample=False)
    draft = oracle_draft(target, truth_of(inputs, ref), 4, 8)
    check_same(target, draft, inputs, ref, max_new_tokens=60, do_sample=False)
    ring = [7 + 8 if kind == "sliding_attention" else 60 + 60 + 8 for kind in MIXED]
    # Rows, K and V, heads, head size, float64
    target_bytes = sum(n * 2 * 2 * 2 * 16 * 8 for n in ring)
    draft_bytes = sum(n * 2 * 2 * 2 * 8 * 8 for n in (11 + 8, 60 + 60 + 8))
    assert draft.last_stats.cache_bytes == target_bytes + draft_bytes


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_length_dependent_rope_is_exact_or_refused(rope_type: str) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "original_max_position_embeddings": 24}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
        target = tiny_target("phi3", rope_parameters=rope, original_max_position_embeddings=24)
    else:
        target = tiny_target(
            "llama", rope_parameters={**rope, "factor": 2.0}, max_position_embeddings=24
        )
    draft = tiny_draft(target, 4)
    below = prompts([6, 9], 0)
    ref = target.generate(**below, max_new_tokens=12, do_sample=False)
    check_same(target, draft, below, ref, max_new_tokens=12, do_sample=False)
    with pytest.raises(ValueError, match="stays within 24 positions"):
        target.generate(**below, max_new_tokens=13, do_sample=False, assistant_model=draft)
    beyond = prompts([30, 28], 1)
    if rope_type == "dynamic":
        with pytest.raises(ValueError, match="stays within 24 positions"):
            target.generate(**beyond, max_new_tokens=9, do_sample=False, assistant_model=draft)
    else:
        ref = target.generate(**beyond, max_new_tokens=9, do_sample=False)
        check_same(target, draft, beyond, ref, max_new_tokens=9, do_sample=False)
