"""Templates that write the day of today: a row keeps the day of its prompt, however long a run takes."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import chat_template_utils

from dflash_hf.training import chat_template as module
from dflash_hf.training import read_examples
from dflash_hf.training.answer_rows import RegenerateSettings
from dflash_hf.training.prepare import PrepareSettings, prepare
from dflash_hf.training.regenerate import regenerate
from helpers.templates import FAMILIES
from tiny import tiny_target

FAMILY = FAMILIES["smollm2"]
CHAT = [{"role": "user", "content": "how many?"}, {"role": "assistant", "content": "two"}]


def set_day(monkeypatch: pytest.MonkeyPatch, day: int) -> None:
    """Makes it another day, in this package and in Transformers."""

    class Day(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(2026, 11, day, tzinfo=tz)

    for place in (module, chat_template_utils):
        monkeypatch.setattr(place, "datetime", Day)


@pytest.fixture
def tokenizer() -> Any:
    found = FAMILY.tokenizer()
    found.chat_template = "{{ strftime_now('%d %b %Y') }}" + FAMILY.template
    return found


@pytest.mark.parametrize("turns", ["last", "none"])
def test_a_row_keeps_the_day_of_its_prompt(
    turns: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"messages": CHAT}) + "\n")
    prepared = tmp_path / "prepared.jsonl"
    set_day(monkeypatch, 9)
    options: dict[str, Any] = {"datasets": [str(source)], "output": prepared, "turns": turns}
    prepare(PrepareSettings(**options), tokenizer)
    answered = prepared
    if turns == "none":
        set_day(monkeypatch, 10)
        answered = tmp_path / "answered.jsonl"
        target: Any = tiny_target("qwen3", vocab_size=len(tokenizer))
        target.generation_config.eos_token_id = tokenizer.eos_token_id
        asked = RegenerateSettings(prompts=prepared, output=answered, max_new_tokens=4)
        regenerate(asked, target, tokenizer)
        (row,) = map(json.loads, answered.read_text().splitlines())
        (example,) = read_examples(answered, tokenizer)
        prompt = example.input_ids[: example.prompt_length()]
        written = target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=4)
        assert written[0, len(prompt) :].tolist() == row["answer_ids"]
    set_day(monkeypatch, 11)
    (example,) = read_examples(answered, tokenizer)
    assert tokenizer.decode(example.input_ids).startswith("09 Nov 2026")


def test_a_template_without_a_day_leaves_rows_without(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"messages": CHAT}) + "\n")
    prepared = tmp_path / "prepared.jsonl"
    prepare(PrepareSettings(datasets=[str(source)], output=prepared), FAMILY.tokenizer())
    assert "prompt_date" not in prepared.read_text()
