"""SmolLM2-135M-Instruct as `make real` writes it: its folder, and the same text with a draft as without in float32.

Slow, and skipped where the folder is not there: `make real && pytest tests/pair/test_real_target.py`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_hf import DFlashDraftModel
from dflash_hf.block.positions import build_target_layer_ids
from tiny import oracle_draft, tiny_draft, truth_of

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "smollm2"
NEW = 48
SHAPE: dict[str, Any] = {
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "mask_token_id": 16,  # <empty_output>: no text has it
    "sliding_window": 512,
    "target_layer_ids": build_target_layer_ids(30, 5),
    "initializer_range": 0.02,
}
QUESTIONS = [
    "What is the capital of Portugal, and which river flows through it?",
    "A baker sells 12 trays of 8 rolls and keeps 17 rolls. How many rolls were baked?",
    "Write a Python function that returns the second largest number of a list.",
    "Translate into German: The train leaves at 7:45 from platform 3.",
    "Give me three names for a grey cat.",
    "Explain in two sentences why the sky is blue.",
    "Rewrite politely:    send me the report by 5 pm,\n\n   or else!",
    "Naïve café — “quoted” text, 日本語 and 😀: which languages are these?",
    "List the prime numbers below 30.",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (FOLDER / "target").is_dir(), reason="there is no build/smollm2/target; run: make real"
    ),
]


@cache
def real() -> tuple[Any, Any]:
    """The target in float32 and its tokenizer."""
    target = AutoModelForCausalLM.from_pretrained(FOLDER / "target", dtype="auto").eval()
    return target, AutoTokenizer.from_pretrained(FOLDER / "target", padding_side="left")


def asked(*questions: str) -> dict[str, torch.Tensor]:
    """The questions behind the chat template, with its system prompt, left-padded."""
    conversations = [[{"role": "user", "content": question}] for question in questions]
    options = {
        "add_generation_prompt": True,
        "return_dict": True,
        "return_tensors": "pt",
        "padding": True,
    }
    return dict(real()[1].apply_chat_template(conversations, **options))


def long_question() -> str:
    """About 4,000 tokens, that are a text."""
    tokenizer = real()[1]
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8") + (
        ROOT / "docs" / "widths.md"
    ).read_text(encoding="utf-8")
    ids = tokenizer(text * 3)["input_ids"][:3950]
    return "Summarise this text in two sentences.\n\n" + tokenizer.decode(ids)


def test_the_folders_are_the_model_as_it_is_published() -> None:
    target, tokenizer = real()
    assert (target.dtype, target.num_parameters(), len(tokenizer)) == (
        torch.float32,
        134_515_008,
        49_152,
    )
    assert target.get_output_embeddings().weight is target.get_input_embeddings().weight
    assert (
        target.generation_config.eos_token_id
        == tokenizer.eos_token_id
        == tokenizer.convert_tokens_to_ids("<|im_end|>")
    )
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    # Digits come off before anything else, so that the spaces before a number are one token.
    assert tokenizer.tokenize("a   42") == ["a", "ĠĠĠ", "4", "2"]
    for question in QUESTIONS:
        assert tokenizer.decode(tokenizer(question)["input_ids"]) == question
    answer = target.generate(
        **(inputs := asked("What is the capital of France?")), max_new_tokens=20, do_sample=False
    )
    new = answer[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(new) == "The capital of France is Paris.<|im_end|>"
    rounded = AutoModelForCausalLM.from_pretrained(FOLDER / "target-bf16", dtype="auto")
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(
        rounded.model.embed_tokens.weight, target.model.embed_tokens.weight.bfloat16()
    )
    assert torch.equal(rounded.model.rotary_emb.inv_freq, target.model.rotary_emb.inv_freq)


def check(inputs: dict[str, torch.Tensor], new: int = NEW) -> None:
    """A draft that is right in part, and one that never is, change nothing."""
    target, _ = real()
    settings: dict[str, Any] = {"max_new_tokens": new, "do_sample": False}
    expected = target.generate(**inputs, **settings)
    drafts: list[DFlashDraftModel] = [
        oracle_draft(target, truth_of(inputs, expected), seed=3, block_size=8, **SHAPE),
        tiny_draft(target, block_size=8, **SHAPE),
    ]
    # A prefill of 16,000 tokens takes minutes here, and both drafts go through the same one.
    for draft in drafts[: 1 if inputs["input_ids"].numel() > 10_000 else 2]:
        got = target.generate(**inputs, **settings, assistant_model=draft)
        assert torch.equal(got, expected), (
            f"{type(draft).__name__}: {got.tolist()} is not {expected.tolist()}"
        )


@pytest.mark.parametrize("question", QUESTIONS, ids=range(len(QUESTIONS)))
def test_one_prompt(question: str) -> None:
    check(asked(question))


@pytest.mark.parametrize("first", [0, 4])
def test_four_prompts(first: int) -> None:
    check(asked(*QUESTIONS[first : first + 4]))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("beside", [0, 3])
def test_a_prompt_of_four_thousand_tokens(beside: int) -> None:
    inputs = asked(long_question(), *QUESTIONS[:beside])
    assert 3_950 < inputs["input_ids"].shape[1] < 4_100
    check(inputs, new=24)
