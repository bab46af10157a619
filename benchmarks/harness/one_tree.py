"""What `trees.py` runs in a process of its own, with the package of either tree: times of calls and steps, as JSON.

Only what every tree has had is used here: `load_draft`, `generate`, `draft.last_stats`, `draft.write_prompt`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from dflash_hf import load_draft

TOY = Path(__file__).resolve().parents[2] / "demos" / "toy"
NUM_PROMPTS = 6


def milliseconds(call: Callable[[], Any]) -> float:
    """Returns how long a call took."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def measure(calls: int, rounds: int, max_new_tokens: int) -> dict[str, float]:
    """Times the bundled pair.

    Args:
        calls (`int`): Calls of one token, with and without a draft in turn.
        rounds (`int`): Answers to each prompt.
        max_new_tokens (`int`): Tokens of an answer, at most.
    """
    target: Any = AutoModelForCausalLM.from_pretrained(TOY / "target").eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(TOY / "target")
    draft: Any = load_draft(TOY / "draft")
    lines = (TOY / "held_out.jsonl").read_text(encoding="utf-8").splitlines()[:NUM_PROMPTS]
    texts = [json.loads(line)["messages"] for line in lines]
    shared = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    prompts = [dict(tokenizer.apply_chat_template(text, **shared)) for text in texts]
    batch = dict(tokenizer.apply_chat_template(texts[:4], padding=True, **shared))

    def answer(inputs: dict[str, Any], most: int, **options: Any) -> Any:
        return target.generate(**inputs, max_new_tokens=most, do_sample=False, **options)

    def step_ms() -> float:
        stats = draft.last_stats
        return (
            (stats.draft_seconds + stats.verify_seconds + stats.accept_seconds)
            * 1e3
            / (stats.num_target_forwards - 1)
        )

    for inputs in prompts:  # what is done once
        answer(inputs, max_new_tokens, assistant_model=draft)
        answer(inputs, 1)
    pairs = [
        (
            milliseconds(lambda: answer(prompts[0], 1)),
            milliseconds(lambda: answer(prompts[0], 1, assistant_model=draft)),
        )
        for _ in range(calls)
    ]
    write = draft.write_prompt
    forwards: list[float] = []
    draft.write_prompt = lambda *args: forwards.append(milliseconds(lambda: write(*args)))
    for _ in range(calls):
        answer(prompts[0], 1)
        answer(prompts[0], 1, assistant_model=draft)
    del draft.write_prompt
    steps: list[float] = []
    batch_steps: list[float] = []
    tokens = 0
    seconds = 0.0
    for _ in range(rounds):
        for inputs in prompts:
            start = time.perf_counter()
            sequences = answer(inputs, max_new_tokens, assistant_model=draft)
            seconds += time.perf_counter() - start
            tokens += sequences.shape[1] - inputs["input_ids"].shape[1]
            steps.append(step_ms())
        answer(batch, max_new_tokens, assistant_model=draft)
        batch_steps.append(step_ms())
    return {
        "call_ms": statistics.median(drafted - plain for plain, drafted in pairs),
        "draft_forward_ms": statistics.median(forwards),
        "step_ms": statistics.median(steps),
        "step_4_rows_ms": statistics.median(batch_steps),
        "tokens_per_second": tokens / seconds,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print(json.dumps(measure(*map(int, sys.argv[1:]))))
