"""Lines of margins.jsonl: one per answer that differs, at its first turn that does, as a forward by hand has it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dflash_hf.bench import margins as module
from dflash_hf.bench.answers import Answer, Turn
from dflash_hf.bench.margins import margins
from dflash_hf.bench.questions import Question
from tiny import VOCAB, tiny_target

QUESTIONS = [Question(dataset="s", question_id=n, category="c", turns=("one", "two")) for n in range(4)]
NEW = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """A tiny target whose prompts are the bytes of what is said."""

    target: PreTrainedModel

    def encode(self, conversations: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
        """Encodes one conversation."""
        [messages] = conversations
        said = " ".join(message["role"] + message["content"] for message in messages)
        ids = torch.tensor([[3 + byte % (VOCAB - 4) for byte in said.encode()]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def text_of(ids: list[int]) -> str:
    return "".join(chr(97 + token % 26) for token in ids)


def answer(models: Models, question: Question, system: str | None = None) -> Answer:
    """Plain `generate`'s own answer."""
    turns: list[Turn] = []
    for _ in question.turns:
        inputs = models.encode([question.messages([turn.text for turn in turns], system)])
        columns = inputs["input_ids"].shape[1]
        model: Any = models.target
        ids = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[0, columns:].tolist()
        turns.append(
            Turn(text=text_of(ids), token_ids=ids, new_tokens=NEW, prompt_tokens=columns, wall_time=1.0, latency=1.0)
        )
    return named(question, "plain", turns)


def named(question: Question, model_id: str, turns: Sequence[Turn], error: str | None = None) -> Answer:
    return Answer(
        dataset=question.dataset,
        question_id=question.question_id,
        category=question.category,
        model_id=model_id,
        turns=tuple(turns),
        error=error,
        tstamp=0.0,
    )


def other_than(turn: Turn, index: int, token: int) -> Turn:
    ids = [*turn.token_ids[:index], token, *turn.token_ids[index + 1 :]]
    return Turn(text=text_of(ids), token_ids=ids, new_tokens=NEW, prompt_tokens=1, wall_time=1.0, latency=1.0)


@pytest.mark.parametrize("system", [None, "be brief"])
def test_first_turn_that_differs_counts_with_the_float32_margin(system: str | None) -> None:
    models = Models(target=tiny_target("qwen3").to(torch.bfloat16))
    plain = [answer(models, question, system) for question in QUESTIONS]
    first, second = plain[0].turns
    wrong = (second.token_ids[2] + 7) % VOCAB
    drafted = [
        named(QUESTIONS[0], "dflash", [first, other_than(second, 2, wrong)]),
        named(QUESTIONS[1], "dflash", plain[1].turns),
        named(QUESTIONS[2], "dflash", [other_than(turn, 0, 0) for turn in plain[2].turns]),
        named(QUESTIONS[3], "dflash", [], error="it failed"),
    ]
    pairs = list(zip(drafted, plain, strict=True))
    rows = margins(pairs, {question.key: question for question in QUESTIONS}, models, system)
    assert [(row["question_id"], row["turn"], row["token"]) for row in rows] == [(0, 1, 2), (2, 0, 0)]
    inputs = models.encode([QUESTIONS[0].messages([first.text], system)])
    ids = torch.cat([inputs["input_ids"], torch.tensor([second.token_ids[:2]])], dim=1)
    with torch.no_grad():
        copy: Any = tiny_target("qwen3").to(torch.bfloat16).float()
        logits = copy(input_ids=ids).logits[0, -1]
    both = logits[[wrong, second.token_ids[2]]]
    assert rows[0]["margin"] == pytest.approx(float(logits.max() - both.min()), rel=1e-4)
    assert {row["measured_in"] for row in rows} == {"float32"}
    written = json.loads(json.dumps(rows[0]))
    fixed = ["model_id", "dataset", "question_id", "repeat", "turn"]
    assert [written[name] for name in fixed] == ["dflash", "s", 0, 0, 1]
    assert set(written) == {*fixed, "token", "margin", "tolerance", "measured_in", "is_tie", "sentence"}


def test_nothing_is_copied_where_nothing_differs_or_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models(target=tiny_target("qwen3").to(torch.bfloat16))
    plain = answer(models, QUESTIONS[0])
    untold = Turn(text="x", token_ids=[], new_tokens=3, prompt_tokens=1, wall_time=1.0, latency=1.0)
    server = named(QUESTIONS[0], "server", [untold, untold])
    monkeypatch.setattr(module, "reference_for", None)
    assert margins([(plain, plain), (server, plain)], {QUESTIONS[0].key: QUESTIONS[0]}, models) == []
