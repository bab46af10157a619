"""The bundled hybrid pair at work: a Qwen3.5 target, three gated delta nets to one full attention, and its draft.

A rejected token must leave no trace in the recurrent and convolution states: the answers are plain `generate`'s, and
every verify accepts what the walk over whole forwards, which rolls nothing back, says it accepts. In float64, although
Transformers computes the rule itself in float32.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from dflash_hf import DFlashDraftModel
from dflash_hf.cli.demo import read_prompts
from dflash_hf.evaluation.harness import encode_prompt
from dflash_hf.target import find_target
from dflash_hf.training import Example, walked_acceptance

HYBRID = Path(__file__).resolve().parents[2] / "demos" / "toy" / "hybrid"
GREEDY: dict[str, Any] = {"max_new_tokens": 256, "do_sample": False}
KINDS = ("code", "structured", "dialogue")
ROWS = 4
# The walk over these prompts gives more (demos/toy/README.md); a pair that is trained again may be a little worse.
POOLED_FLOOR = 5.0
KIND_FLOOR = 4.0


@cache
def pair() -> tuple[PreTrainedModel, DFlashDraftModel, PreTrainedTokenizerBase]:
    target = AutoModelForCausalLM.from_pretrained(HYBRID / "target", dtype=torch.float64)
    draft = DFlashDraftModel.from_pretrained(HYBRID / "draft", dtype=torch.float64)
    return target, draft, AutoTokenizer.from_pretrained(HYBRID / "target")


def prompts() -> list[dict[str, Any]]:
    return read_prompts(HYBRID / "held_out.jsonl", 10**6)


def encode(row: dict[str, Any]) -> dict[str, Tensor]:
    return encode_prompt(pair()[2], row["messages"], torch.device("cpu"))


@cache
def plain_texts() -> list[Tensor]:
    """Prompt and answer of each held-out prompt, `[1, S]`, alone and without a draft."""
    target = pair()[0]
    return [target.generate(**encode(row), **GREEDY) for row in prompts()]


@cache
def walked() -> list[list[int]]:
    """What each verify of each prompt commits, from whole forwards."""
    target, draft, _ = pair()
    examples = []
    for row, text in zip(prompts(), plain_texts(), strict=True):
        size = encode(row)["input_ids"].shape[1]
        examples.append(Example.from_pair(text[0, :size].tolist(), text[0, size:].tolist()))
    return walked_acceptance(draft, find_target(target), examples).committed


def lengths(committed: list[list[int]]) -> dict[str, float]:
    """Mean tokens per verify of each kind, and of all verifies as `pooled`."""
    verifies: dict[str, list[int]] = defaultdict(list)
    for row, counts in zip(prompts(), committed, strict=True):
        verifies[row["kind"]] += counts
        verifies["pooled"] += counts
    return {kind: sum(counts) / len(counts) for kind, counts in verifies.items()}


def test_the_pair_is_small_hybrid_and_float32() -> None:
    target = AutoModelForCausalLM.from_pretrained(HYBRID / "target")
    draft = DFlashDraftModel.from_pretrained(HYBRID / "draft")
    assert target.dtype == draft.dtype == torch.float32
    assert target.config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2
    files = [path for path in HYBRID.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 6e6
    assert draft.config.block_size == 16
    assert draft.config.mask_token_id == pair()[2].mask_token_id
    assert [row["kind"] for row in prompts()] == [kind for kind in KINDS for _ in range(12)]


def test_the_walk_is_above_the_floors() -> None:
    """Needs no rollback: whole forwards only."""
    measured = lengths(walked())
    assert measured.pop("pooled") >= POOLED_FLOOR, measured
    assert min(measured.values()) >= KIND_FLOOR, measured


def test_every_answer_is_identical_and_every_verify_accepts_what_the_walk_says() -> None:
    target, draft, _ = pair()
    committed = []
    for row, text, steps in zip(prompts(), plain_texts(), walked(), strict=True):
        assert torch.equal(target.generate(**encode(row), **GREEDY, assistant_model=draft), text), row
        assert draft.last_stats.num_committed == [steps], row
        committed += draft.last_stats.num_committed
    measured = lengths(committed)
    assert measured.pop("pooled") >= POOLED_FLOOR, measured
    assert min(measured.values()) >= KIND_FLOOR, measured


@pytest.mark.parametrize("first", range(0, 36, ROWS))
def test_left_padded_batches_are_identical_and_roll_each_row_back_by_itself(first: int) -> None:
    target, draft, tokenizer = pair()
    # One of every kind in a batch, so that rows differ in length and in what they accept.
    chosen = [(first // ROWS + 9 * at) % 36 for at in range(ROWS)]
    rows = [prompts()[at] for at in chosen]
    inputs = tokenizer.apply_chat_template(
        [row["messages"] for row in rows],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        padding=True,
    )
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    assert not inputs["attention_mask"].all(), "no row is padded: the case shows nothing"
    plain = target.generate(**inputs, **GREEDY)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), plain)
    assert draft.last_stats.num_committed == [walked()[at] for at in chosen]
