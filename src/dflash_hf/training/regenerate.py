"""This module is the second stage of training: the target answers prepared conversations, and the answers are written.

A row of the file is a prompt with its answer. Its columns are `id` (of the prompt), `messages`, `images` and
`chat_template_kwargs` if there are any, `answer_ids` (including the end token), `finished` (whether the answer has an
end token) and `num_tokens` (of prompt and answer). The `.meta.json` file beside it names the target and the settings.

Servers answer in any order, with random numbers that depend on the row ([`ServedAnswers`]). The target itself answers
in batches. A batch is on the disk before the next one begins. A batch with a missing row is answered again, with the
same random numbers. So a run that was killed and continued writes the same answers as a run without interruption, and
several processes write the same answers as one process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from dflash_hf.data.openai_client import OpenAIClient
from dflash_hf.data.row_files import RowFile, repair, write_rows
from dflash_hf.errors import require
from dflash_hf.training.answer_rows import (
    NEW_FILE,
    Answering,
    Regenerated,
    RegenerateSettings,
    answers_in,
)
from dflash_hf.training.chat_template import ChatTemplate, Processing
from dflash_hf.training.example_files import meta_path, read_meta
from dflash_hf.training.identity import target_identity, text_identity
from dflash_hf.training.local_answers import ALONE, LocalAnswers, Ranks
from dflash_hf.training.progress import AnswerProgress
from dflash_hf.training.questions import first_questions, next_questions
from dflash_hf.training.served_answers import ServedAnswers

logger = logging.getLogger(__name__)


class NoAnswersError(ValueError):
    """Raised if no prompt has an answer, and no prompt is left to be asked."""


def regenerate(
    settings: RegenerateSettings,
    target: PreTrainedModel | Sequence[OpenAIClient],
    processing_class: Processing,
    draft: PreTrainedModel | None = None,
    ranks: Ranks = ALONE,
) -> Regenerated:
    """Lets the target answer prepared conversations. A file that exists is continued.

    Args:
        target (`PreTrainedModel` or sequence of [`OpenAIClient`]): The target, or servers that run it.
        draft (`PreTrainedModel`, *optional*): A draft for the target, which makes it faster. Greedy answers are the
            same.
        ranks ([`Ranks`]): The processes that share the work. Servers do not use it.

    Raises:
        ValueError: If the prompts cannot be read (the message names the line), the file was begun by another target or
            with other settings, the disk is full, or no server answers. The answers so far are kept.
        NoAnswersError: If no prompt has an answer at the end.
    """
    settings.check()
    common = Answering(
        settings=settings,
        processing_class=processing_class,
        template=ChatTemplate(processing_class),
        prompts=RowFile(settings.prompts),
        report=Regenerated(),
        progress=AnswerProgress(is_shown=ranks.is_first),
    )
    answers: LocalAnswers | ServedAnswers
    if isinstance(target, Sequence):
        answers = ServedAnswers(common, target)
    else:
        answers = LocalAnswers(common, target, draft, ranks)
    made_of = answers.identity()
    if ranks.is_first:
        _begin(common, made_of)
    ranks.wait()
    report = common.report
    done = _done(settings)
    # No process appends to a file before all processes have read it.
    ranks.wait()
    began = time.monotonic()
    with common.progress as progress:
        seen: set[str] = set()
        asked = first_questions(common, seen)
        while len(asked) > 0:
            report.num_prompts += len(asked)
            answers.answer(asked, done)
            asked = next_questions(common, asked, seen)
        report.tokens_per_second = progress.tokens_per_second
    report.seconds = time.monotonic() - began
    _count(common)
    if report.num_answers == 0:
        raise NoAnswersError(
            f"expected prompts in {settings.prompts}, got 'none to answer'; take other data, or see {settings.errors}"
        )
    logger.info("%s", report)
    return report


def check_answers(path: Path, target: PreTrainedModel, processing_class: Processing) -> None:
    """Refuses answers that another target wrote.

    A file that does not name its target is accepted. For answers of a server, only the chat template is compared.

    Raises:
        ValueError: If the target or its chat template has changed since the answers were written.
    """
    if not meta_path(path).is_file():
        logger.info("nothing stands beside %s that says which target wrote its answers", path)
        return
    known = read_meta(path).get("target")
    if not isinstance(known, dict):
        return
    now = {
        **target_identity(target),
        "chat_template": text_identity(ChatTemplate(processing_class).text),
    }
    names = {"config": "settings", "weights": "weights", "chat_template": "chat template"}
    changed = [told for name, told in names.items() if name in known and known[name] != now[name]]
    if changed:
        raise ValueError(
            f"expected the target that wrote the answers of {path}, got one whose {' and '.join(changed)} differ: it "
            "changed since; let it answer again into another file, or load what it was"
        )


def _begin(common: Answering, target: Mapping[str, Any]) -> None:
    """Writes the target and the settings beside the answers, or refuses answers of a run with other ones.

    Args:
        target (mapping): The values that identify the target.
    """
    settings = common.settings
    made = {
        "target": {**target, "chat_template": text_identity(common.template.text)},
        **settings.sampling(),
    }
    files = [path for path in (*settings.files(), settings.errors) if path.is_file()]
    if not files:
        write_rows(meta_path(settings.output), [made])
        return
    defaults = RegenerateSettings(prompts=settings.prompts, output=settings.output)
    known = {**defaults.sampling(), **read_meta(settings.output)}
    changed = [name for name in made if known.get(name) != made[name]]
    what = f"{settings.output} as this target with these settings began it"
    require(not changed, what, f"one with another {' and '.join(changed)}", NEW_FILE)
    for path in files:
        repair(path)


def _done(settings: RegenerateSettings) -> set[str]:
    """Returns the ids of prompts that have an answer, or that no server could answer."""
    answered = {row["id"] for path in settings.files() for row in answers_in(path)}
    return answered | _without_answer(settings)


def _without_answer(settings: RegenerateSettings) -> set[str]:
    """Returns the ids of prompts that no server could answer."""
    if not settings.errors.is_file():
        return set()
    return {row["id"] for row in RowFile(settings.errors)}


def _count(common: Answering) -> None:
    """Counts the answers and errors at the end of a run."""
    report = common.report
    for row in answers_in(common.settings.output):
        report.num_answers += 1
        report.num_tokens += len(row["answer_ids"])
        report.num_unfinished += not row["finished"]
    report.num_errors = len(_without_answer(common.settings))
