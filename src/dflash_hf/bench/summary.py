"""This module computes `summary.json`, `acceptance.csv` and `scores.jsonl` from a run's files."""

from __future__ import annotations

import csv
import functools
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_hf.bench.answers import Answer, Which
from dflash_hf.bench.cells import Cell
from dflash_hf.bench.counting import DEFINITIONS, Pair, accuracy, first_difference, measure, speedup
from dflash_hf.bench.questions import Key, Question
from dflash_hf.bench.run_files import Run, by_answer, read_run
from dflash_hf.data.row_files import write_rows, write_whole

Score = Callable[[Question, Answer], float | None]
# By `model_id`, question and repeat. Answers without a score are not in it.
Scores = dict[tuple[str, Which], float]
MAX_BINS = 32  # along a text
SCORES = "scores.jsonl"
CSV_COLUMNS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


def summarize(folder: str | os.PathLike[str], score: Score | None = None) -> dict[str, Any]:
    """Counts a run's answers and writes `scores.jsonl`, `acceptance.csv` and `summary.json` into its folder.

    Each file is written whole or not at all. The numbers are seconds, tokens and ratios. Unknown numbers are `null`.

    Args:
        folder: The folder of the run; see [`dflash_hf.bench.run_files.read_run`].
        score (callable, *optional*): Takes a question and its answer, and returns a score between 0 and 1, or `None`
            if there is no right answer. The default is [`dflash_hf.bench.scores.score`] with the run's own `run_code`.

    Returns:
        `dict`: The content of `summary.json`. `methods` has blocks of counts for each method: under `sets` (per set
        that it was asked) and under `all`.

    Raises:
        ValueError: If the folder contains no run, or files that do not belong to it.
    """
    run = read_run(folder)
    notes = _unfinished(run)
    scores = _score_all(run, score, notes)
    longest = max((turn.new_tokens for a in _every(run) for turn in a.turns), default=0)
    bin_tokens = 16
    while longest > bin_tokens * MAX_BINS:
        bin_tokens *= 2
    summary = {
        "settings": run.settings,
        "provenance": run.provenance,
        "sessions": run.sessions,
        "notes": notes,
        "datasets": {name: _dataset(run, name) for name in run.datasets},
        "text_bin_tokens": bin_tokens,
        "methods": [_method(run, cell, scores, bin_tokens) for cell in run.cells],
        "definitions": DEFINITIONS,
    }
    lines = (
        {
            "model_id": name,
            "dataset": key[0],
            "question_id": key[1],
            "repeat": repeat,
            "score": value,
        }
        for (name, (key, repeat)), value in scores.items()
    )
    write_rows(run.folder / SCORES, lines)
    write_whole(run.folder / "acceptance.csv", _acceptance_csv(summary))
    text = json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False)
    write_whole(run.folder / "summary.json", text + "\n")
    return summary


def read_scores(folder: Path) -> Scores:
    """Reads the scores that `summarize` has written into a run's folder; none without the file."""
    return {which: row["score"] for which, row in by_answer(folder / SCORES, "score").items()}


def _unfinished(run: Run) -> list[str]:
    """Says which method has the fewest answers, if one that has not failed lacks some."""
    asked = len(run.questions) * run.settings.get("repeats", 1)
    counts = {
        cell.model_id: len(run.answers[cell.model_id]) for cell in run.cells if cell.failed is None
    }
    name = min(counts, key=lambda name: counts[name], default=None)
    if name is None or counts[name] >= asked:
        return []
    return [f"The run is not finished: {name} has {counts[name]} of {asked} answers."]


def _every(run: Run) -> Iterable[Answer]:
    return (answer for answers in run.answers.values() for answer in answers.values())


def _score_all(run: Run, score: Score | None, notes: list[str]) -> Scores:
    """Scores every answer. Equal texts to a question are scored once, because running code takes seconds."""
    wanted = [answer for answer in _every(run) if run.questions[answer.key].score]
    if score is None and wanted:
        from dflash_hf.bench.scores import score as score_one

        score = functools.partial(score_one, run_code=bool(run.settings.get("run_code")))
    known: dict[tuple[Key, tuple[tuple[str, bool], ...]], float | None] = {}
    scores: Scores = {}
    for answer in wanted:
        assert score is not None
        # The same text is another answer if the prompt has opened a thought.
        said = (answer.key, tuple((turn.text, turn.begins_in_thought) for turn in answer.turns))
        if said not in known:
            try:
                known[said] = score(run.questions[answer.key], answer)
            except ImportError as error:  # the other counts do not need the scores
                notes.append(f"Answers are not scored: {error}")
                return {}
        value = known[said]
        if value is not None:
            scores[answer.model_id, answer.which] = value
    unscored = {said[0][0] for said, value in known.items() if value is None}
    notes += [f"Not every answer to {name} is scored." for name in run.datasets if name in unscored]
    return scores


def _dataset(run: Run, name: str) -> dict[str, Any]:
    questions = [question for question in run.questions.values() if question.dataset == name]
    return {"questions": len(questions), "categories": dict(Counter(q.category for q in questions))}


def _method(run: Run, cell: Cell, scores: Scores, bin_tokens: int) -> dict[str, Any]:
    """Returns the description of a method, with its counts per set and over all sets."""
    answers = run.answers[cell.model_id]
    differing = [] if cell.is_sampled else _differing(run, cell)

    def block(own: dict[Which, Answer]) -> dict[str, Any]:
        pairs = baseline_pairs(run, cell, own)
        scored = [
            (which[0], scores[cell.model_id, which])
            for which in own
            if (cell.model_id, which) in scores
        ]
        return {
            **measure(list(own.values()), bin_tokens),
            "speedup": speedup(pairs),
            "own_speedup": speedup(_pairs_with(run, cell.own_baseline, own)),
            "agreement": None if cell.is_sampled else _agreement(pairs, differing),
            "accuracy": accuracy(scored),
        }

    def grouped(own: dict[Which, Answer], name: str) -> dict[str, dict[Which, Answer]]:
        """Groups answers by a field of their questions."""
        groups: dict[str, dict[Which, Answer]] = {}
        for which, answer in own.items():
            groups.setdefault(getattr(run.questions[answer.key], name), {})[which] = answer
        return groups

    def parts(own: dict[Which, Answer], name: str) -> dict[str, Any]:
        """Returns the blocks of each value of a field, if the questions differ in it."""
        groups = grouped(own, name)
        if len(groups) == 1:
            return {}
        return {value: block(part) for value, part in groups.items()}

    by_set = grouped(answers, "dataset")
    sets: dict[str, Any] = {}
    for name in run.datasets:
        if name in by_set:
            own = by_set[name]
            sets[name] = {
                **block(own),
                "categories": parts(own, "category"),
                "subcategories": parts(own, "subcategory"),
            }
    return {
        "model_id": cell.model_id,
        "method": cell.method,
        "options": asdict(cell.options),
        "values": cell.values,
        "baseline": cell.baseline,
        "own_baseline": cell.own_baseline,
        "failed": cell.failed,
        "sets": sets,
        "all": block(answers),
        "differing": differing,
    }


def baseline_pairs(run: Run, cell: Cell, own: dict[Which, Answer]) -> list[Pair]:
    """Returns answers of a cell with its baseline's answers to the same questions and repeats, without failed ones."""
    if cell.baseline == cell.model_id:
        return []
    return _pairs_with(run, cell.baseline, own)


def _pairs_with(run: Run, other_id: str | None, own: dict[Which, Answer]) -> list[Pair]:
    """Returns answers with another cell's answers to the same questions and repeats; none without such a cell."""
    if other_id is None:
        return []
    theirs = run.answers.get(other_id, {})
    pairs = [(answer, theirs[which]) for which, answer in own.items() if which in theirs]
    return [(one, other) for one, other in pairs if not one.has_failed and not other.has_failed]


def _differing(run: Run, cell: Cell) -> list[dict[str, Any]]:
    """Returns where answers first differ from the baseline's, and by how much if the run has recorded it."""
    rows: list[dict[str, Any]] = []
    for answer, other in baseline_pairs(run, cell, run.answers[cell.model_id]):
        found = first_difference(answer, other)
        if found is not None:
            known = run.margins.get((cell.model_id, answer.which), {})
            which = {
                "dataset": answer.dataset,
                "question_id": answer.question_id,
                "repeat": answer.repeat,
            }
            told = {"margin": known.get("margin"), "is_tie": known.get("is_tie")}
            rows.append({**which, "turn": found[0], "token": found[1], **told})
    return rows


def _agreement(pairs: list[Pair], differing: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns how many answers are equal to the baseline's, and the largest margin of the others."""
    if not pairs:
        return None
    asked = {answer.which for answer, _ in pairs}
    rows = [
        row for row in differing if ((row["dataset"], row["question_id"]), row["repeat"]) in asked
    ]
    same = len(pairs) - len(rows)
    margins = [row["margin"] for row in rows if row["margin"] is not None]
    return {
        "compared": len(pairs),
        "identical": same,
        "share": same / len(pairs),
        "max_margin": max(margins, default=None),
        "beyond_ties": sum(row["is_tie"] is False for row in rows),
    }


def _acceptance_csv(summary: dict[str, Any]) -> str:
    """Returns one line per drafting method and set, with vLLM's names and definitions."""
    rows = [
        (method["model_id"], name, block["acceptance"])
        for method in summary["methods"]
        for name, block in method["sets"].items()
        if block["acceptance"] and block["acceptance"]["num_drafts"]
    ]
    width = max((len(counts["acceptance_at_pos"]) for _, _, counts in rows), default=0)
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    positions = [f"acceptance_at_pos_{position}" for position in range(width)]
    writer.writerow(["model_id", "dataset", *CSV_COLUMNS, "acceptance_length", *positions])
    for model_id, name, counts in rows:
        shares = counts["acceptance_at_pos"] + [0.0] * (width - len(counts["acceptance_at_pos"]))
        numbers = [counts[column] for column in CSV_COLUMNS]
        writer.writerow([model_id, name, *numbers, counts["acceptance_length_vllm"], *shares])
    return output.getvalue()
