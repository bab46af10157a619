"""The bundled pair under every engine: every verify accepts the same, so the draft sees the same."""

from __future__ import annotations

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

from dflash_hf import DFlashDraftModel
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.cli.demo import read_prompts
from helpers.half import half
from helpers.static import set_engine, use_tapes
from helpers.whole_blocks import use_whole_blocks

TOY = Path(__file__).resolve().parents[2] / "demos" / "toy"


@cache
def pair() -> tuple[PreTrainedModel, DFlashDraftModel, PreTrainedTokenizerBase]:
    """In float64, so that a longer sum of zeros changes no proposal."""
    target = AutoModelForCausalLM.from_pretrained(TOY / "target").double()
    draft = DFlashDraftModel.from_pretrained(TOY / "draft").double()
    use_whole_blocks(draft)
    return target, draft, AutoTokenizer.from_pretrained(TOY / "target")


def batch_of(num_rows: int) -> dict[str, torch.Tensor]:
    tokenizer = pair()[2]
    rows = read_prompts(TOY / "held_out.jsonl", 1)[:num_rows]
    texts = [
        tokenizer.apply_chat_template(r["messages"], add_generation_prompt=True, tokenize=False)
        for r in rows
    ]
    encoded = tokenizer(
        texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
    )
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


@pytest.mark.parametrize(
    ("sampling", "num_rows", "engine"), half([False, True], [1, 3], ["static", "cuda_graph"])
)
def test_every_verify_accepts_what_it_accepts_eagerly(
    sampling: bool, num_rows: int, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tapes(monkeypatch, smallest_bucket=32)
    target, draft, _ = pair()
    settings: dict[str, Any] = {"max_new_tokens": 48, "do_sample": False}
    if sampling:
        settings |= {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
    inputs, runs = batch_of(num_rows), []
    for chosen in ("eager", engine, engine):
        set_engine(draft, chosen)
        torch.manual_seed(1)
        text = target.generate(**inputs, **settings, assistant_model=draft)
        runs.append((text.tolist(), draft.last_stats.num_committed, draft.last_stats.num_accepted))
        assert draft.last_stats.engine == chosen
        assert draft.last_stats.acceptance_length > 2.0
    set_engine(draft, "auto")
    assert runs[0] == runs[1]
    assert runs[0] == runs[2]


@pytest.mark.parametrize("engine", ["static", "cuda_graph"])
@pytest.mark.parametrize("host_decides", [False, True])
def test_the_next_turn_accepts_what_it_accepts_eagerly(
    host_decides: bool, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tapes(monkeypatch, smallest_bucket=32)
    target, draft, _ = pair()
    settings: dict[str, Any] = {
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": host_decides,
    }
    inputs, found = batch_of(3), []
    for chosen in ("eager", engine):
        set_engine(draft, chosen)
        cache = DynamicCache(config=target.config)
        kept = {CACHE_NAME: cache, "assistant_model": draft}
        first = target.generate(**inputs, **settings, max_new_tokens=16, **kept)
        counts = [draft.last_stats.num_committed]
        mask = torch.ones_like(first.sequences)
        mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
        second = target.generate(
            input_ids=first.sequences, attention_mask=mask, **settings, max_new_tokens=32, **kept
        )
        counts.append(draft.last_stats.num_committed)
        assert draft.last_stats.engine == chosen
        found.append((second.sequences.tolist(), counts))
    set_engine(draft, "auto")
    assert found[0] == found[1]
