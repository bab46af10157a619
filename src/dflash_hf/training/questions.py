"""This module lists the questions of prepared conversations, round by round. It keeps no conversation in memory."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_hf.data.prompt_files import SOURCES, blocks_of
from dflash_hf.data.row_files import RowFile
from dflash_hf.errors import require
from dflash_hf.training.answer_rows import Answering, Question, answers_in
from dflash_hf.training.conversations import content_id, resolved

NO_ANSWERS: Sequence[Mapping[str, Any]] = ()


class Questions:
    """The questions of one round, in the order of their conversations. Each question is built when it is read.

    Only the id of a question, the number of its row, and the places of the target's earlier answers in it are in
    memory.

    Args:
        common ([`Answering`]): The prompts' file, and the settings of the answers.
        answers (`RowFile`): The answers that existed when the round began. The first round has none.
    """

    def __init__(
        self, common: Answering, answers: RowFile | Sequence[Mapping[str, Any]] = NO_ANSWERS
    ) -> None:
        self.ids: list[str] = []
        self.rows = array("Q")
        self.answers_before: list[tuple[int, ...]] = []
        self.common = common
        self._answers = answers

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Question:
        at = self.rows[index]
        question = self.built(self.common.prompts[at], self.answers_before[index])
        return at, {"id": self.ids[index], **question}

    def add(self, name: str, row: int, answers_before: tuple[int, ...]) -> None:
        """Adds a question.

        Args:
            name (`str`): The id of the question.
            row (`int`): The number of the row in the prompts' file.
            answers_before (`tuple[int, ...]`): The numbers of the rows in the answers' file whose answers the question
                contains, one for each earlier turn.
        """
        self.ids.append(name)
        self.rows.append(row)
        self.answers_before.append(answers_before)

    def built(self, row: Mapping[str, Any], answers_before: tuple[int, ...]) -> dict[str, Any]:
        """Returns the question of a prompt's row after some answers of the target, without an id."""
        messages = self._messages(row["messages"], answers_before)
        question: dict[str, Any] = {"messages": messages}
        images = _images_up_to(row, messages)
        if images:
            question["images"] = images
        for name in ("chat_template_kwargs", "prompt_date"):
            if row.get(name):
                question[name] = row[name]
        return question

    def _messages(
        self, messages: list[dict[str, Any]], answers_before: tuple[int, ...]
    ) -> list[dict[str, Any]]:
        """Returns the messages up to the turn to answer, with the target's own answers to the earlier turns."""
        users = _users(messages)
        if self.common.settings.turns == "last":
            return messages[: users[-1] + 1]
        tokenizer = self.common.template.tokenizer
        asked = messages[: users[0] + 1]
        for number, place in enumerate(answers_before, 1):
            ids = self._answers[place]["answer_ids"]
            said = tokenizer.decode(ids, skip_special_tokens=True)
            asked += [{"role": "assistant", "content": said}, messages[users[number]]]
        return asked


class PlacedQuestions(Sequence[Mapping[str, Any]]):
    """Some questions with full paths of their images. A message about one of them names its line in the prompts' file.

    Args:
        prompts (`RowFile`): The prompts' file.
        asked (sequence of `Question`): The questions.
    """

    def __init__(self, prompts: RowFile, asked: Sequence[Question]) -> None:
        self.prompts = prompts
        self.rows = [row for row, _ in asked]
        self.placed = [resolved(question, prompts.path.parent) for _, question in asked]

    def __len__(self) -> int:
        return len(self.placed)

    def __getitem__(self, index: Any) -> Any:
        return self.placed[index]

    def where(self, index: int) -> str:
        """Returns the name of a question for a message."""
        return self.prompts.where(self.rows[index])


def first_questions(common: Answering, seen: set[str]) -> Questions:
    """Returns the first question of each conversation, in the order of the conversations.

    Args:
        seen (set of `str`): The ids of earlier questions. The ids of this round are added.

    Raises:
        ValueError: If a row is no conversation. The message names its line.
    """
    rows = common.prompts
    asked = Questions(common)
    for at, row in enumerate(rows):
        messages = row.get("messages")
        is_list = isinstance(messages, list)
        good = is_list and all(isinstance(m, dict) and "role" in m for m in messages)
        require(good, f"messages in {rows.where(at)}", row, "run `prepare`")
        what = f"a turn of the user's in {rows.where(at)}"
        require(bool(_users(row["messages"])), what, row, "leave the row out")
        _add_unless_seen(asked, at, row, (), seen)
    return asked


def next_questions(common: Answering, asked: Questions, seen: set[str]) -> Questions:
    """Returns the questions that follow the answers to the questions of a round. With `turns="last"` there are none.

    Args:
        asked ([`Questions`]): The questions of this round.
        seen (set of `str`): The ids of earlier questions. The ids of the next round are added.
    """
    output = common.settings.output
    if common.settings.turns == "last" or not output.is_file():
        return Questions(common)
    rows = common.prompts
    more = Questions(common, RowFile(output))
    places = {
        answer["id"]: place for place, answer in enumerate(answers_in(output)) if answer["finished"]
    }
    for index, name in enumerate(asked.ids):
        if name not in places:
            continue
        at = asked.rows[index]
        row = rows[at]
        answers_before = (*asked.answers_before[index], places[name])
        if _has_turn_behind(row["messages"], len(answers_before)):
            _add_unless_seen(more, at, row, answers_before, seen)
    return more


def _add_unless_seen(
    asked: Questions,
    at: int,
    row: Mapping[str, Any],
    answers_before: tuple[int, ...],
    seen: set[str],
) -> None:
    """Adds the question of a row after some answers, unless the same question has been asked already."""
    name = content_id(asked.built(row, answers_before))
    if name in seen:
        asked.common.report.left_out["duplicates"] += 1
        return
    seen.add(name)
    asked.add(name, at, answers_before)


def _users(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the indices of the user's messages."""
    return [at for at, message in enumerate(messages) if message["role"] == "user"]


def _has_turn_behind(messages: Sequence[Mapping[str, Any]], num_answered: int) -> bool:
    """Says whether another user turn follows the answered turns, with only assistant messages between them."""
    users = _users(messages)
    if num_answered >= len(users):
        return False
    between = messages[users[num_answered - 1] + 1 : users[num_answered]]
    return all(message["role"] == "assistant" for message in between)


def _images_up_to(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> Any:
    """Returns the images of a row's column whose places are in the first messages.

    If the number of images is not the number of places, all images are returned. Images without places are put into
    the user's first turn. Other mismatches raise an error when the row is read.
    """
    images: Any = row.get("images")
    is_placed = isinstance(images, list) and len(images) == _num_places(row["messages"])
    if is_placed:
        return images[: _num_places(messages)]
    return images


def _num_places(messages: Sequence[Mapping[str, Any]]) -> int:
    """Returns the number of image blocks in some messages that have no image of their own."""
    images = [block for block in blocks_of(messages) if block["type"] == "image"]
    return sum(block.keys().isdisjoint(SOURCES) for block in images)
