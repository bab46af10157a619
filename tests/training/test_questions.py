"""What regenerate asks: conversations stay on the disk until they are asked about."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from dflash_hf.data.row_files import RowFile, write_rows
from dflash_hf.training.answer_rows import RegenerateSettings
from dflash_hf.training.conversations import content_id
from dflash_hf.training.local_answers import LocalAnswers
from dflash_hf.training.questions import Questions
from dflash_hf.training.regenerate import regenerate
from helpers.templates import FAMILIES
from tiny import tiny_target

NUM_ROWS = 2_000
TEXT = "many words " * 500
# Of each question in memory: an id, its places in three tables, where its line begins; measured 190
MOST_BYTES = 300


def test_conversations_stay_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = FAMILIES["smollm2"].tokenizer()
    target: Any = tiny_target("qwen3", 0, vocab_size=len(tokenizer))
    settings = RegenerateSettings(prompts=tmp_path / "in.jsonl", output=tmp_path / "out.jsonl")
    rows = [{"messages": [{"role": "user", "content": f"{n} {TEXT}"}]} for n in range(NUM_ROWS)]
    write_rows(settings.prompts, rows)
    held: list[int] = []

    def answer(self: LocalAnswers, questions: Questions, done: set[str]) -> None:
        held.append(tracemalloc.get_traced_memory()[0])
        prompts = RowFile(settings.prompts)
        assert len(questions) == NUM_ROWS
        for index in (0, NUM_ROWS // 2, NUM_ROWS - 1):
            at, question = questions[index]
            assert at == index
            assert question == {**prompts[index], "id": content_id(prompts[index])}
        assert done == set()

    monkeypatch.setattr(LocalAnswers, "answer", answer)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        with pytest.raises(ValueError, match="got 'none to answer'"):
            regenerate(settings, target, tokenizer)
    finally:
        tracemalloc.stop()
    assert len(held) == 1
    assert held[0] - before < NUM_ROWS * MOST_BYTES
