"""This module finds where a run's answers differ from the baseline's, and measures whether two logits tie there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from dflash_hf.bench.answers import Answer
from dflash_hf.bench.counting import first_difference
from dflash_hf.bench.methods import Models
from dflash_hf.bench.questions import Key, Question
from dflash_hf.bench.run_files import MARGINS, read_run
from dflash_hf.bench.summary import baseline_pairs
from dflash_hf.data.row_files import write_rows
from dflash_hf.pair.agreement import agreement, reference_for


def write_margins(folder: Path, models: Mapping[str, Models]) -> Path:
    """Writes `margins.jsonl`, whole or not at all, for a run with all its answers.

    Sampled answers have other noise than their baseline's and are left out.

    Args:
        models (mapping): The loaded models, by the value of `--dtype`.
    """
    run = read_run(folder)
    rows: list[dict[str, Any]] = []
    for dtype, loaded in models.items():
        cells = [cell for cell in run.cells if cell.options.dtype == dtype and not cell.is_sampled]
        pairs = [
            pair for cell in cells for pair in baseline_pairs(run, cell, run.answers[cell.model_id])
        ]
        rows += margins(pairs, run.questions, loaded, run.settings["system"])
    return write_rows(folder / MARGINS, rows)


def margins(
    pairs: Iterable[tuple[Answer, Answer]],
    questions: Mapping[Key, Question],
    models: Models,
    system: str | None = None,
) -> list[dict[str, Any]]:
    """Measures how far greedy answers are from their baseline's, where they first differ.

    For a question of several turns, only the first turn that differs counts, because later turns answer another
    conversation. Failed answers are left out, and so are answers of servers, which do not report their tokens.

    Args:
        pairs (iterable of two `Answer`): A method's answer and its baseline's, to the same question and repeat.
        models (`Models`): The models that wrote them, in one dtype.
        system (`str`, *optional*): System prompt of every conversation.

    Returns:
        `list[dict]`: Lines of `margins.jsonl`, one per answer that differs. A line has `model_id`, `dataset`,
        `question_id`, `repeat` and `turn`. It also has `token`, `margin`, `tolerance`, `measured_in`, `is_tie` and
        `sentence` of [`~dflash_hf.pair.agreement.Agreement`].
    """
    reference: PreTrainedModel | None = None
    rows: list[dict[str, Any]] = []
    for answer, plain in pairs:
        turn, token = first_difference(answer, plain) or (None, None)
        if turn is None or token is None:
            continue
        if reference is None:
            reference = reference_for(models.target)
        before = [one.text for one in plain.turns[:turn]]
        inputs = models.encode([questions[answer.key].messages(before, system)])
        ids = plain.turns[turn].token_ids, answer.turns[turn].token_ids
        found = agreement(models.target, inputs, *ids, reference=reference, do_sample=False)
        row = {
            "model_id": answer.model_id,
            "dataset": answer.dataset,
            "question_id": answer.question_id,
        }
        rows.append({**row, "repeat": answer.repeat, "turn": turn, **(found.to_dict() or {})})
    return rows
