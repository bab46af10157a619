"""The bundled pair at work, in float32: identical answers, and acceptance above the floors, alone and in batches."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from typer.testing import CliRunner

from dflash_hf import DFlashDraftModel
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.cli.demo import read_prompts
from dflash_hf.cli.main import app
from dflash_hf.data.prompt_files import image_names
from dflash_hf.pair.answers import encode_prompt
from helpers.whole_blocks import use_whole_blocks

TOY = Path(__file__).resolve().parents[2] / "demos" / "toy"
GREEDY: dict[str, Any] = {"max_new_tokens": 320, "do_sample": False}


@cache
def pair() -> tuple[PreTrainedModel, DFlashDraftModel, PreTrainedTokenizerBase]:
    target = AutoModelForCausalLM.from_pretrained(TOY / "target")
    draft = DFlashDraftModel.from_pretrained(TOY / "draft")
    use_whole_blocks(draft)
    return target, draft, AutoTokenizer.from_pretrained(TOY / "target")


def prompts(per_kind: int) -> list[dict[str, Any]]:
    return read_prompts(TOY / "held_out.jsonl", per_kind)


def batch_of(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    tokenizer = pair()[2]
    texts = [
        tokenizer.apply_chat_template(r["messages"], add_generation_prompt=True, tokenize=False)
        for r in rows
    ]
    encoded = tokenizer(
        texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
    )
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def test_the_pair_is_small_float32_and_stored_in_16_bits() -> None:
    target, draft, tokenizer = pair()
    assert target.dtype == draft.dtype == torch.float32
    size = sum(path.stat().st_size for path in TOY.glob("*/model.safetensors"))
    assert size <= 16 * 2**20
    assert draft.config.block_size == 16
    assert draft.config.mask_token_id == tokenizer.mask_token_id


@pytest.mark.parametrize("rows", [1, 3])
def test_acceptance_with_a_kept_cache_is_that_without(rows: int) -> None:
    target, draft, _ = pair()
    inputs = batch_of(prompts(1)[:rows])
    cache = DynamicCache(config=target.config)
    settings = {"do_sample": False, "assistant_model": draft}
    ids = target.generate(**inputs, **settings, max_new_tokens=20, **{CACHE_NAME: cache})
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids[:, -20:])], dim=1)
    whole = {"input_ids": ids, "attention_mask": mask}
    plain = target.generate(**whole, **settings, max_new_tokens=60)
    committed = draft.last_stats.num_committed
    assert draft.last_stats.acceptance_length > 5
    assert torch.equal(
        target.generate(**whole, **settings, max_new_tokens=60, **{CACHE_NAME: cache}), plain
    )
    assert draft.last_stats.num_committed == committed


def chosen() -> list[dict[str, Any]]:
    """One of each kind, answered alone. tests/bench/test_thresholds.py has others of each, in batches."""
    return prompts(5)[4::5]


@cache
def alone(index: int) -> tuple[torch.Tensor, list[int]]:
    """Prompt and drafted answer of one of them, and what its verifies committed."""
    target, draft, tokenizer = pair()
    inputs = encode_prompt(tokenizer, chosen()[index]["messages"], target.device)
    out = target.generate(**inputs, **GREEDY, assistant_model=draft)
    return out, draft.last_stats.num_committed[0]


def test_every_answer_is_identical_and_acceptance_is_high() -> None:
    target, _, tokenizer = pair()
    verifies: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(chosen()):
        out, committed = alone(index)
        assert torch.equal(
            target.generate(**encode_prompt(tokenizer, row["messages"], target.device), **GREEDY),
            out,
        )
        verifies[row["kind"]] += committed
    lengths = {kind: sum(counts) / len(counts) for kind, counts in verifies.items()}
    everything = [count for counts in verifies.values() for count in counts]
    assert sum(everything) / len(everything) >= 4.5, lengths
    assert min(lengths.values()) >= 2.5, lengths


def test_batches_accept_what_the_rows_accept_alone() -> None:
    target, draft, _ = pair()
    inputs = batch_of(chosen())
    plain = target.generate(**inputs, **GREEDY)
    out = target.generate(**inputs, **GREEDY, assistant_model=draft)
    assert torch.equal(out, plain)
    assert draft.last_stats.num_committed == [alone(index)[1] for index in range(len(chosen()))]


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_sampled_texts_are_the_same_at_block_sizes_1_4_and_16(temperature: float) -> None:
    target, _, _ = pair()
    draft = DFlashDraftModel.from_pretrained(TOY / "draft")
    inputs = batch_of(prompts(1))
    settings: dict[str, Any] = {
        "max_new_tokens": 48,
        "do_sample": True,
        "temperature": temperature,
        "top_k": 0,
    }
    texts = []
    for block_size in (1, 4, 16):
        draft.generation_config.block_size = block_size
        torch.manual_seed(3)
        texts.append(target.generate(**inputs, **settings, assistant_model=draft))
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])
    assert draft.last_stats.acceptance_length > 2


def test_the_demo_command_compares_and_succeeds() -> None:
    """Both pairs, texts and images."""
    run = CliRunner().invoke(app, ["demo", "--per-kind", "1", "--max-new-tokens", "8", "--json"])
    assert run.exit_code == 0, run.output
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["all"]["identical"] is True
    assert all(row["num_target_forwards"] < row["num_tokens"] for row in result["rows"])
    images = [tuple(row["images"]) for row in result["rows"]]
    assert images[: len(prompts(1))] == [()] * len(prompts(1))
    shown = read_prompts(TOY / "vision" / "held_out.jsonl", 1)
    assert images[len(prompts(1)) :] == [tuple(image_names(row["messages"])) for row in shown]


def test_a_wrong_folder_is_one_sentence() -> None:
    run = CliRunner().invoke(app, ["demo", "--pair", "/nowhere"])
    assert run.exit_code == 2
    assert "expected held-out prompts in /nowhere" in run.stderr
    assert "Traceback" not in run.output
