"""Lines of margins.jsonl: one per answer that differs, at its first turn that does, as a forward by hand has it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dflash_hf.bench import margins as module
from dflash_hf.bench.answers import Answer, Turn
from dflash_hf.bench.margins import margins, write_margins
from dflash_hf.bench.questions import Question
from dflash_hf.bench.summary import summarize
from tiny import VOCAB, shallow_target

QUESTIONS = [
    Question(dataset="s", question_id=n, category="c", turns=("one", "two")) for n in range(4)
]
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
            Turn(
                text=text_of(ids),
                token_ids=ids,
                new_tokens=NEW,
                prompt_tokens=columns,
                wall_time=1.0,
                latency=1.0,
            )
        )
    return named(question, "plain", turns)


def named(
    question: Question, model_id: str, turns: Sequence[Turn], error: str | None = None
) -> Answer:
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
    return Turn(
        text=text_of(ids),
        token_ids=ids,
        new_tokens=NEW,
        prompt_tokens=1,
        wall_time=1.0,
        latency=1.0,
    )


@pytest.mark.parametrize("system", [None, "be brief"])
def test_first_turn_that_differs_counts_with_the_float32_margin(system: str | None) -> None:
    models = Models(target=shallow_target("qwen3").to(torch.bfloat16))
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
    assert [(row["question_id"], row["turn"], row["token"]) for row in rows] == [
        (0, 1, 2),
        (2, 0, 0),
    ]
    inputs = models.encode([QUESTIONS[0].messages([first.text], system)])
    ids = torch.cat([inputs["input_ids"], torch.tensor([second.token_ids[:2]])], dim=1)
    with torch.no_grad():
        copy: Any = shallow_target("qwen3").to(torch.bfloat16).float()
        logits = copy(input_ids=ids).logits[0, -1]
    both = logits[[wrong, second.token_ids[2]]]
    assert rows[0]["margin"] == pytest.approx(float(logits.max() - both.min()), rel=1e-4)
    assert {row["measured_in"] for row in rows} == {"float32"}
    written = json.loads(json.dumps(rows[0]))
    fixed = ["model_id", "dataset", "question_id", "repeat", "turn"]
    assert [written[name] for name in fixed] == ["dflash", "s", 0, 0, 1]
    assert set(written) == {
        *fixed,
        "token",
        "margin",
        "tolerance",
        "measured_in",
        "is_tie",
        "sentence",
    }


def test_nothing_is_copied_where_nothing_differs_or_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = Models(target=shallow_target("qwen3").to(torch.bfloat16))
    plain = answer(models, QUESTIONS[0])
    untold = Turn(text="x", token_ids=[], new_tokens=3, prompt_tokens=1, wall_time=1.0, latency=1.0)
    server = named(QUESTIONS[0], "server", [untold, untold])
    monkeypatch.setattr(module, "reference_for", None)
    assert (
        margins([(plain, plain), (server, plain)], {QUESTIONS[0].key: QUESTIONS[0]}, models) == []
    )


def test_margins_of_a_run_are_what_its_summary_says(tmp_path: Path) -> None:
    """Each dtype is measured by its own target; sampled cells and failed answers are not, and a stale file goes."""
    models = {
        name: Models(target=shallow_target("qwen3").to(getattr(torch, name)))
        for name in ("bfloat16", "float32")
    }
    cells: list[dict[str, Any]] = []
    for dtype in models:
        plain = [
            replace(answer(models[dtype], question), model_id=f"plain-{dtype}")
            for question in QUESTIONS
        ]
        drafted = [replace(one, model_id=f"dflash-{dtype}") for one in plain]
        turns = [plain[0].turns[0], other_than(plain[0].turns[1], 3, 0)]
        drafted[0] = named(QUESTIONS[0], f"dflash-{dtype}", turns)
        drafted[1] = named(QUESTIONS[1], f"dflash-{dtype}", [], error="no room")
        sampled = [
            named(q, f"warm-{dtype}", [other_than(turn, 0, 5) for turn in plain[2].turns])
            for q in QUESTIONS
        ]
        for answers, temperature in ((plain, 0.0), (drafted, 0.0), (sampled, 1.0)):
            name = answers[0].model_id
            lines = "".join(json.dumps(one.to_dict()) + "\n" for one in answers)
            (tmp_path / f"answers-{name}.jsonl").write_text(lines, encoding="utf-8")
            options = {"dtype": dtype, "temperature": temperature}
            baseline = None if answers is plain else f"plain-{dtype}"
            method = name.partition("-")[0]
            cells.append(
                {
                    "model_id": name,
                    "method": method,
                    "options": options,
                    "values": {},
                    "baseline": baseline,
                }
            )
    record = {"methods": cells, "settings": {"system": None}, "provenance": {}, "sessions": []}
    (tmp_path / "run.json").write_text(json.dumps(record), encoding="utf-8")
    asked = "".join(json.dumps(question.to_dict()) + "\n" for question in QUESTIONS)
    (tmp_path / "questions.jsonl").write_text(asked, encoding="utf-8")
    (tmp_path / "margins.jsonl").write_text("of another time", encoding="utf-8")

    written = write_margins(tmp_path, models)
    rows = [json.loads(line) for line in written.read_text(encoding="utf-8").splitlines()]
    assert written == tmp_path / "margins.jsonl"
    assert [(row["model_id"], row["question_id"], row["turn"], row["token"]) for row in rows] == [
        (f"dflash-{dtype}", 0, 1, 3) for dtype in models
    ]
    assert all(row["margin"] > row["tolerance"] for row in rows)
    assert rows[0]["tolerance"] > 100 * rows[1]["tolerance"], "each by its own dtype"
    told = {one["model_id"]: one["all"]["agreement"] for one in summarize(tmp_path)["methods"]}
    for row in rows:
        found = told[row["model_id"]]
        assert (found["compared"], found["identical"], found["beyond_ties"]) == (3, 2, 1)
        assert found["max_margin"] == row["margin"]
