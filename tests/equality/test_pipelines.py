"""Transformers' text-generation pipeline with a draft: the same answers as without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from dflash_hf import DFlashDraftModel

CHATS = [
    [{"role": "user", "content": text}] for text in ("Hello! How are you today?", "Count to ten.", "What is 3+4?")
]


@pytest.fixture(scope="module")
def pair() -> tuple[Any, DFlashDraftModel, Any]:
    target = AutoModelForCausalLM.from_pretrained("demos/toy/target")
    draft = DFlashDraftModel.from_pretrained("demos/toy/draft")
    tokenizer = AutoTokenizer.from_pretrained("demos/toy/target", padding_side="left")
    return target, draft, tokenizer


@pytest.mark.parametrize("batch_size", [1, 3])
def test_answers_are_the_same(pair: tuple[Any, DFlashDraftModel, Any], batch_size: int) -> None:
    target, draft, tokenizer = pair
    settings = {"max_new_tokens": 30, "do_sample": False, "batch_size": batch_size}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    ours = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=draft)
    draft.last_stats = None
    assert ours(CHATS, **settings) == plain(CHATS, **settings)
    assert draft.last_stats is not None
    assert len(draft.last_stats.num_committed) == batch_size
    texts = ["Hello there", "One two three", "Once"]
    assert ours(texts, **settings) == plain(texts, **settings)
    assert plain(texts, **settings, assistant_model=draft) == plain(texts, **settings)


def test_a_draft_that_states_no_vocabulary_takes_the_targets_tokenizer(
    pair: tuple[Any, DFlashDraftModel, Any],
) -> None:
    target, draft, tokenizer = pair
    torch.manual_seed(0)
    config = type(draft.config)(**{**draft.config.to_dict(), "vocab_size": None})
    unstated = DFlashDraftModel(config).eval()
    names = {"model": target, "tokenizer": tokenizer, "assistant_model": unstated}
    with pytest.raises(ValueError, match="assistant tokenizer"):
        pipeline("text-generation", **names)
    ours = pipeline("text-generation", **names, assistant_tokenizer=tokenizer)
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    assert ours("Hello there", max_new_tokens=20) == plain("Hello there", max_new_tokens=20)


def test_special_tokens_are_the_targets_and_never_saved(pair: tuple[Any, DFlashDraftModel, Any]) -> None:
    target, draft, _ = pair
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(target.config, name) == getattr(draft.config, name)
        assert name not in draft.config.to_dict()
