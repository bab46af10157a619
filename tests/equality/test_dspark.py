"""DSpark drafts decode as others do: plain text, greedy and sampled, in every kind of run."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from dflash_hf import RunningBatch, iterate
from helpers.half import pairs
from helpers.running import answer_alone, asked, drive
from tiny import DSPARK, oracle_draft, prompts, shallow_target, tiny_draft, truth_of

pytestmark = pytest.mark.same_on_every_release

NEW = 16
LENGTHS = {"one": [9], "three": [4, 11, 7]}
KINDS: dict[str, dict[str, Any]] = {
    "anchor kept": DSPARK,
    "anchor proposes": {**DSPARK, "sample_from_anchor": True},
    "reduced": {**DSPARK, "own_lm_head": True, "draft_vocab_size": 30},
}


@cache
def target_of(family: str) -> PreTrainedModel:
    return shallow_target(family)


@pytest.mark.parametrize(
    ("family", "kind", "batch", "nodes"),
    pairs(["qwen3-sliding", "gemma3", "qwen3.5"], KINDS, list(LENGTHS), [0, 9]),
)
def test_greedy_equals_plain_generate(
    family: str, kind: dict[str, Any], batch: str, nodes: int
) -> None:
    target = target_of(family)
    if target.config.model_type.startswith("qwen3_5"):
        nodes = 0  # recurrent layers follow one path
    for seed, block_size in enumerate((3, 8)):
        inputs = prompts(LENGTHS[batch], seed)
        ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        draft = oracle_draft(target, truth_of(inputs, ref), seed, block_size, **kind)
        if draft.d2t is not None:
            draft.d2t.copy_(torch.arange(30))  # every second token
        draft.generation_config.num_tree_nodes = nodes
        out = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft)
        assert torch.equal(out, ref)
        assert draft.last_stats.acceptance_length > 1


@pytest.mark.parametrize(("proposal", "nodes"), [("argmax", 0), ("argmax", 9), ("shared_noise", 0)])
def test_rows_of_a_running_batch_are_those_alone(proposal: Any, nodes: int) -> None:
    target = shallow_target("qwen3", max_position_embeddings=2048)
    kinds = (
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.8, "top_k": 12, "top_p": 0.9},
        {"do_sample": True, "top_k": 0, "repetition_penalty": 1.2},
    )
    requests = asked([5, 30, 1, 12, 40, 7], 3, (4, 24), kinds)
    draft = tiny_draft(target, **KINDS["anchor proposes"])
    draft.generation_config.proposal = proposal
    draft.generation_config.num_tree_nodes = nodes
    answer_alone(target, requests, draft)
    found = drive(RunningBatch(target, draft), requests, 3)
    assert found["answered"] == 6
    assert found["most"] > 2


def test_steps_one_by_one_are_those_of_a_call() -> None:
    target = target_of("llama")
    inputs = prompts(LENGTHS["three"], 2)
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = oracle_draft(target, truth_of(inputs, ref), 1, 6, **DSPARK)
    rows = [row[row >= 0].tolist() for row in inputs["input_ids"]]
    for step in iterate(target, draft, **inputs, max_new_tokens=NEW, do_sample=False):
        for row, tokens in enumerate(step.committed):
            rows[row] += tokens.tolist()
    assert rows == ref.tolist()
