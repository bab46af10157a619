"""A run's folder that no model has written: plausible answers of several methods, from a seed."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash_hf.bench.answers import Answer, Turn
from dflash_hf.bench.questions import Question

PROVENANCE: dict[str, Any] = {
    "date": "2026-11-22T17:30:00+00:00",
    "command": "python -m dflash_hf bench --target build/smollm2/target --draft build/draft --data gsm8k",
    "commit": "695b0a8a29d0a2f4d4e7a6e1c40a1b0d3c5f7e91+dirty",
    "versions": {
        "python": "3.11.9",
        "torch": "2.13.0+cpu",
        "transformers": "5.23.0",
        "triton": None,
    },
    "machine": {"cpu": "AMD EPYC 9B14", "cores": 2, "gpus": [], "platform": "Linux-6.1-x86_64"},
    "threads": 1,
    "processes": 1,
    "models": {
        "bfloat16": {
            "dtype": "bfloat16",
            "device": "cpu",
            "attention": "sdpa",
            "draft_options": {"block_size": 8},
        }
    },
}
SETTINGS: dict[str, Any] = {
    "target": "build/smollm2/target",
    "draft": "build/draft",
    "data": ["gsm8k", "humaneval", "mt-bench", "mmstar"],
    "dtype": ["bfloat16"],
    "temperature": [0.0],
    "max_new_tokens": [256],
    "repeats": 2,
    "seed": 0,
    "run_code": False,
}
SESSIONS = [{"seconds": 640.0, "method_seconds": 631.0, "harness_seconds": 9.0}]
# method -> chance that a proposal is right, milliseconds per verify; None: nothing is drafted
METHODS: dict[str, tuple[float | None, float]] = {
    "plain": (None, 30.0),
    "plain-static": (None, 26.0),
    "dflash": (0.85, 46.0),
    "undrafted": (None, 28.0),
    "stock": (0.85, 55.0),
    "lookup": (0.35, 38.0),
    "zlab": (None, 30.0),
}
WHY = (
    "ModuleNotFoundError: expected z-lab's package, got no module named 'dflash'; "
    "pip install --no-deps dflash==0.1.0"
)


def questions(per_set: int = 12) -> list[Question]:
    """Questions of four sets: mathematics, code, two turns, and options by letter in subcategories."""
    found: list[Question] = []
    for i in range(per_set):
        math = {"turns": (f"What is {i} + {i}?",), "reference": str(2 * i), "score": "math"}
        code = {"turns": (f"Write `f{i}`.",), "reference": {"test": "assert f()"}, "score": "code"}
        talk = {"turns": (f"Tell me about {i}.", "And shorter?")}
        seen = {
            "turns": ("Which? A: <b>one</b> B: two",),
            "reference": "A",
            "score": "letter",
            "subcategory": "abc"[i % 3],
        }
        found += [
            Question(dataset="gsm8k", question_id=i, category="gsm8k", **math),  # type: ignore[arg-type]
            Question(
                dataset="humaneval", question_id=f"HumanEval/{i}", category="humaneval", **code
            ),  # type: ignore[arg-type]
            Question(
                dataset="mt-bench", question_id=80 + i, category=("writing", "math")[i % 2], **talk
            ),  # type: ignore[arg-type]
            Question(dataset="mmstar", question_id=i, category=("chart", "logical")[i % 2], **seen),  # type: ignore[arg-type]
        ]
    return sorted(found, key=lambda question: question.dataset)


def turn(
    rng: random.Random, text: str, share: float | None, step_ms: float, tokens: int = 0
) -> Turn:
    """One answer: so many tokens, decoded in blocks of 8 whose proposals are right with this chance."""
    tokens = tokens or rng.randint(40, 250)
    committed: list[int] = []
    accepted: list[int] = []
    left = tokens - 1
    while share is not None and left > 0:
        right = next((k for k in range(7) if rng.random() > share), 7)
        accepted.append(right)
        committed.append(min(right + 1, left))
        left -= committed[-1]
    ttft = 0.05 * rng.uniform(0.9, 1.2)
    steps = tokens - 1 if share is None else len(committed)
    latency = ttft + steps * step_ms / 1000 * rng.uniform(0.95, 1.05)
    return Turn(
        text=text,
        token_ids=[rng.randrange(3, 999) for _ in range(tokens)],
        new_tokens=tokens,
        prompt_tokens=rng.randint(20, 90),
        wall_time=latency,
        latency=latency,
        ttft=ttft,
        finish_reason="length" if tokens == 256 else "stop",
        committed=None if share is None else committed,
        accepted=None if share is None else accepted,
        proposed=None if share is None else [7] * len(accepted),
    )


def answers_of(
    asked: Sequence[Question], repeats: int = 2, seed: int = 0
) -> dict[str, list[Answer]]:
    """What every method of `METHODS` answers: the same texts, but for some of `dflash` and `stock`."""
    found: dict[str, list[Answer]] = {name: [] for name in METHODS}
    for question in asked:
        for repeat in range(repeats):
            for name, (share, step_ms) in METHODS.items():
                rng = random.Random(repr((seed, question.key, name, repeat)))
                same = random.Random(repr((seed, question.key)))
                fields: dict[str, Any] = {
                    "model_id": name,
                    "repeat": repeat,
                    "tstamp": 1.8e9 + repeat,
                }
                fields |= {"dataset": question.dataset, "question_id": question.question_id}
                fields |= {"category": question.category, "subcategory": question.subcategory}
                if name == "zlab" or (name == "lookup" and question.dataset == "mmstar"):
                    why = (
                        WHY
                        if name == "zlab"
                        else "ValueError: expected text, got an image; leave the method out"
                    )
                    found[name].append(Answer(**fields, error=why))
                    continue
                turns = []
                for _ in question.turns:
                    tokens, ids = (
                        same.randint(40, 250),
                        [same.randrange(3, 999) for _ in range(250)],
                    )
                    right = (
                        "A" if question.score == "letter" else f"so \\boxed{{{question.reference}}}"
                    )
                    text = right if same.random() < 0.7 else "I <i>do not</i> know"
                    if name in ("dflash", "stock") and rng.random() < 0.1:
                        ids[17] = 1
                    made = turn(rng, text, share, step_ms, tokens)
                    turns.append(Turn(**{**_as_dict(made), "token_ids": ids[:tokens]}))
                found[name].append(Answer(**fields, turns=tuple(turns)))
    return found


def _as_dict(made: Turn) -> dict[str, Any]:
    return {name: getattr(made, name) for name in Turn.__slots__}


def simple_score(question: Question, answer: Answer) -> float | None:
    """1 for the reference somewhere in the last text; code is not run."""
    if question.score in (None, "code"):
        return None
    return float(any(str(question.reference) in turn.text for turn in answer.turns[-1:]))


def write_run(
    folder: Path,
    asked: Sequence[Question] | None = None,
    answers: dict[str, list[Answer]] | None = None,
    change: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """Writes a run's folder; `change` may change `run.json` before it is written."""
    asked = questions() if asked is None else asked
    answers = answers_of(asked) if answers is None else answers
    folder.mkdir(parents=True, exist_ok=True)
    methods = [
        {
            "model_id": name,
            "method": name,
            "options": {"batch": 1, "max_new_tokens": 256, "temperature": 0.0, "dtype": "bfloat16"},
            "values": {},
            "baseline": None if name == "plain" or "plain" not in answers else "plain",
            "own_baseline": "undrafted" if name == "dflash" else None,
            "failed": WHY if name == "zlab" else None,
        }
        for name in answers
    ]
    record = {
        "methods": methods,
        "provenance": {**PROVENANCE},
        "settings": {**SETTINGS},
        "sessions": SESSIONS,
    }
    if change is not None:
        change(record)
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    (folder / "questions.jsonl").write_text(_lines(asked), encoding="utf-8")
    for number, (name, given) in enumerate(answers.items()):
        safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name) or str(number)
        (folder / f"answers-{safe[:60]}.jsonl").write_text(_lines(given), encoding="utf-8")
    return folder


def write_margins(folder: Path, summary: dict[str, Any], seed: int = 0) -> None:
    """Writes `margins.jsonl` for every answer that a summary says differs from the baseline's."""
    rng = random.Random(seed)
    rows = [
        {
            **row,
            "model_id": method["model_id"],
            "margin": round(rng.expovariate(12), 4),
            "is_tie": rng.random() < 0.9,
        }
        for method in summary["methods"]
        for row in method["differing"]
    ]
    (folder / "margins.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )


def _lines(rows: Sequence[Any]) -> str:
    return "".join(json.dumps(row.to_dict(), ensure_ascii=False) + "\n" for row in rows)
