"""Where answers of a run differ from the baseline's, and whether two logits tie there: measured when all are there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from dflash_hf.bench.answers import Answer
from dflash_hf.bench.questions import Key, Question
from dflash_hf.bench.run_files import read_run
from dflash_hf.bench.summary import baseline_pairs
from dflash_hf.evaluation.agreement import agreement, first_difference, reference_for
from dflash_hf.evaluation.prompt_files import Message
from dflash_hf.evaluation.row_files import write_whole


class Encodes(Protocol):
    """A target and what its prompts were encoded with, as a run has them."""

    @property
    def target(self) -> PreTrainedModel:
        """The target that wrote the answers."""
        ...

    def encode(self, conversations: Sequence[Sequence[Message]]) -> dict[str, Tensor]:
        """Returns the inputs of conversations, one per row."""
        ...


def write_margins(folder: Path, models: Mapping[str, Encodes]) -> Path:
    """Writes `margins.jsonl`, whole or not at all, for a run whose answers are all there.

    Sampled answers have other noise than their baseline's and are left out.

    Args:
        folder (`Path`): Of the run.
        models (mapping): What it has loaded, by the name that `--dtype` gave.
    """
    run = read_run(folder)
    rows: list[dict[str, Any]] = []
    for dtype, loaded in models.items():
        cells = [cell for cell in run.cells if cell.options["dtype"] == dtype and not cell.is_sampled]
        pairs = [pair for cell in cells for pair in baseline_pairs(run, cell)]
        rows += margins(pairs, run.questions, loaded, run.settings["system"])
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
    return write_whole(folder / "margins.jsonl", "".join(lines))


def margins(
    pairs: Iterable[tuple[Answer, Answer]],
    questions: Mapping[Key, Question],
    models: Encodes,
    system: str | None = None,
) -> list[dict[str, Any]]:
    """Measures by how little greedy answers differ from their baseline's.

    Of a question of several turns only the first that differs counts: later ones are answers to another conversation.
    Answers that failed, and those of servers, which do not tell their tokens, are left out.

    Args:
        pairs (iterable of two `Answer`): A method's answer and its baseline's, to the same question and repeat.
        questions (mapping): By their keys.
        models (`Encodes`): What wrote them, in one dtype.
        system (`str`, *optional*): What every conversation began with.

    Returns:
        `list[dict]`: Lines of `margins.jsonl`, one per answer that differs: `model_id`, `dataset`, `question_id`,
        `repeat`, `turn`, and of [`~dflash_hf.evaluation.agreement.Agreement`] `token`, `margin`, `tolerance`,
        `measured_in`, `is_tie` and `sentence`.
    """
    reference: PreTrainedModel | None = None
    rows: list[dict[str, Any]] = []
    for answer, plain in pairs:
        turn = _first_turn(answer, plain)
        if turn is None:
            continue
        if reference is None:
            reference = reference_for(models.target)
        before = [one.text for one in plain.turns[:turn]]
        inputs = models.encode([questions[answer.key].messages(before, system)])
        ids = plain.turns[turn].token_ids, answer.turns[turn].token_ids
        found = agreement(models.target, inputs, *ids, reference=reference, do_sample=False)
        row = {"model_id": answer.model_id, "dataset": answer.dataset, "question_id": answer.question_id}
        rows.append({**row, "repeat": answer.repeat, "turn": turn, **(found.to_dict() or {})})
    return rows


def _first_turn(answer: Answer, plain: Answer) -> int | None:
    """Returns the first turn whose tokens differ, as far as both are told."""
    for number, (mine, theirs) in enumerate(zip(answer.turns, plain.turns, strict=False)):
        if not mine.token_ids or not theirs.token_ids:
            return None
        if first_difference(mine.token_ids, theirs.token_ids) is not None:
            return number
    return None


__all__ = ["Encodes", "margins", "write_margins"]
