"""This module is the first stage of training: it writes conversations in one form, checked and without duplicates.

A file of prepared rows is JSON Lines with one conversation per line. The columns are `id` (of the content),
`messages`, `images` and `chat_template_kwargs` if there are any, `prompt_date` if the chat template writes the day,
and `sequences`. These are the sequences to train on: `{"turns": [1, 3], "num_tokens": 9}`. The next stage,
[`dflash_hf.training.regenerate`], writes the same rows with `answer_ids` instead of `sequences`.
[`dflash_hf.training.example_files`] reads both kinds of files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from dflash_hf.data.row_files import line_of, write_whole
from dflash_hf.data.rows import Row
from dflash_hf.data.sources import Origin, RowMap, full_name, is_no_room, open_source
from dflash_hf.errors import is_ours, listed, one_line, require
from dflash_hf.training.chat_dataset import ChatDataset
from dflash_hf.training.chat_template import ChatTemplate, Processing, template_options, today
from dflash_hf.training.conversations import (
    NO_LIMIT,
    content_id,
    conversation_of,
    resolved,
    weigh_as_prepared,
)
from dflash_hf.training.example_files import meta_path, read_meta
from dflash_hf.training.masks import check_turns, groups_in_place, turns_to_train

logger = logging.getLogger(__name__)

Turns = Literal["all", "last", "none"]
# The result for one row, as columns of a table. The types are those of `datasets.Value`.
COLUMNS = {
    "where": "string",  # the name of the row in messages
    "id": "string",
    "line": "string",  # the line to write, as JSON
    "left_out": "string",  # why the row is not written
    "malformed": "string",  # the message about a malformed row
    "num_sequences": "int64",
    "num_tokens": "int64",
    "num_cut": "int64",
}
NOTHING = {name: "" if kind == "string" else 0 for name, kind in COLUMNS.items()}
# Settings that say which rows are written. They do not change the line of a row.
WHICH_ROWS = ("datasets", "num_rows", "whole", "streaming", "skip_bad_rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareSettings:
    """The data to prepare, and the settings of their preparation.

    Args:
        datasets (sequence of `str`): Files (`.jsonl`, `.json`, `.parquet`, `.txt` with one prompt per line), folders
            or Hub sets that `datasets` loads: `ORG/NAME`, `ORG/NAME:CONFIG`, `ORG/NAME:CONFIG:SPLIT`. The default
            split is `train`.
        output (`Path`): The file to write.
        turns (`str`): Which answers of the data are trained on: `"all"`, `"last"`, or `"none"` if the target will give
            its own answers ([`regenerate`]).
        needs_answers (`bool`): Whether rows without an answer to train on are left out. Otherwise these rows are
            prompts, which the target may answer.
        max_length (`int`, *optional*): The maximum number of tokens of a sequence. Longer sequences are cut when they
            are read. A longer sequence is left out if its prompt alone has this length, or if it has images.
        template (`str`, *optional*): For rows with other columns, the text of the user's turn: `"{question}"`.
        num_rows (`int`, *optional*): The number of rows to read from each set.
        whole (sequence of `str`): Sets of `datasets` that are read to their end, for every value of `num_rows`.
        streaming (`bool`): Whether sets of the Hub are fetched row by row, without storing them.
        skip_bad_rows (`bool`): Whether malformed rows are left out and counted. Otherwise the first one is refused.
        chat_template_kwargs (mapping): Further options of the chat template: `{"enable_thinking": False}`.
        max_image_pixels (`int`, *optional*): The maximum product of an image's width and height. Larger images are
            shrunk and written into a folder beside `output`.
    """

    datasets: Sequence[str]
    output: Path
    turns: Turns = "all"
    needs_answers: bool = False
    max_length: int | None = None
    template: str | None = None
    num_rows: int | None = None
    whole: Sequence[str] = ()
    streaming: bool = False
    skip_bad_rows: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    max_image_pixels: int | None = None


@dataclass(slots=True)
class Prepared:
    """Counts of the rows that were read, written and left out.

    Args:
        num_rows (`int`): Number of rows that were read.
        num_kept (`int`): Number of conversations that were written.
        num_sequences (`int`): Number of sequences to train on.
        num_tokens (`int`): Number of tokens in these sequences.
        num_cut (`int`): Number of sequences that will be cut at the greatest length.
        left_out (`dict[str, tuple[int, str]]`): For each reason, the number of rows that were left out, and the place
            or message of the first of them.
    """

    num_rows: int = 0
    num_kept: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_cut: int = 0
    left_out: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])

    def takes(self, made: Mapping[str, Any], seen: set[str]) -> bool:
        """Counts the result for a row (`COLUMNS`), and returns True if its line is written. Duplicates are not."""
        self.num_rows += 1
        if made["malformed"]:
            self.leave_out("malformed", made["malformed"])
            return False
        is_known = made["id"] in seen
        if made["id"]:
            seen.add(made["id"])
        if is_known:
            self.leave_out("a duplicate", made["where"])
            return False
        if made["left_out"]:
            self.leave_out(made["left_out"], made["where"])
            return False
        self.num_kept += 1
        self.num_sequences += made["num_sequences"]
        self.num_tokens += made["num_tokens"]
        self.num_cut += made["num_cut"]
        return True

    def leave_out(self, reason: str, where: str) -> None:
        """Counts a row that is not written."""
        count, first = self.left_out.get(reason, (0, where))
        self.left_out[reason] = (count + 1, first)

    def sentences(self) -> list[str]:
        """Returns sentences that report the counts to a user."""
        told = [
            f"{self.num_kept} of {self.num_rows} rows kept: {self.num_sequences} sequences, {self.num_tokens} tokens"
        ]
        if self.num_cut:
            told.append(
                f"{self.num_cut} sequences are longer than the greatest length and will be cut"
            )
        told += [
            f"{count} left out: {reason} (first: {where})"
            for reason, (count, where) in self.left_out.items()
        ]
        return told


def prepare(
    settings: PrepareSettings, processing_class: Processing, *, replaces: bool = False
) -> Prepared:
    """Writes conversations of data sets to a file, in one form. A file with the same settings is not written again.

    There is one process per core. Until the file is complete, a folder `.parts` beside it holds the finished parts. A
    run that was killed or that refused a row continues after these parts.

    Args:
        replaces (`bool`): Whether a file with other data or settings is written again. Otherwise it is refused.

    Raises:
        ValueError: If a set or row cannot be read (the message names it), the assistant's text cannot be found, the
            chat template does not read an option, no row is left, the file exists and was written with other settings,
            or the disk is full. In these cases the file is not written.
    """
    what = "none of turns, all, last"
    require(settings.turns in ("all", "last", "none"), what, settings.turns, "choose one of them")
    has_answers = settings.turns != "none" or not settings.needs_answers
    what = "turns all or last with needs_answers"
    require(has_answers, what, settings.turns, "leave one of them out")
    require(bool(settings.datasets), "data sets to prepare", list(settings.datasets), "name one")
    # Names become independent of the working folder, because a killed run may be continued in another one.
    datasets = [full_name(name) for name in settings.datasets]
    whole = [full_name(name) for name in settings.whole]
    settings = replace(settings, datasets=datasets, whole=whole)
    _check_num_rows(settings.num_rows)
    template = ChatTemplate(processing_class, settings.chat_template_kwargs)
    template.check_options()
    asked = _asked(settings, template.text)
    parts = settings.output.with_suffix(".parts")
    is_there = settings.output.exists()
    if is_there and replaces:
        is_there = read_meta(settings.output).get("prepare") == asked
    if is_there:
        report = _written_before(settings.output, asked)
        shutil.rmtree(parts, ignore_errors=True)
        return report
    report = Prepared()

    def lines() -> Iterator[str]:
        yield from _kept_lines(settings, processing_class, parts, asked, report)
        none = f"rows to train on in {listed(settings.datasets)}"
        got = "; ".join(report.sentences())
        require(report.num_kept > 0, none, got, "use other data, or a greater max_length")
        counts = asdict(report)
        told = {"prepare": asked, "left_out": counts.pop("left_out"), "prepared": counts}
        # The settings are written before the file is complete, so there is no file without its settings.
        write_whole(meta_path(settings.output), json.dumps(told, indent=2) + "\n")

    try:
        write_whole(settings.output, lines())
    except BaseException:
        _keep_whole_parts(parts)
        raise
    shutil.rmtree(parts, ignore_errors=True)
    for sentence in report.sentences():
        logger.info(sentence)
    return report


def _asked(settings: PrepareSettings, chat_template: str) -> dict[str, Any]:
    """Returns the data and settings of a file in a form that can be compared with an existing file."""
    asked = asdict(settings)
    del asked["output"]
    asked["datasets"] = [(name, _digest(name)) for name in settings.datasets]
    asked["chat_template"] = chat_template
    return json.loads(json.dumps(asked))


def _digest(name: str) -> str | None:
    """Returns a digest of a file, or of all files in a folder, or `None` for a set of the Hub."""
    # `Path.is_file` of Python 3.11 raises an error for a text that is too long for a path.
    if os.path.isfile(name):
        return _file_digest(Path(name))
    folder = Path(name.partition(":")[0])
    if not os.path.isdir(folder):
        return None
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        place = file.relative_to(folder)
        # `datasets` does not read hidden files.
        is_hidden = any(part.startswith(".") for part in place.parts)
        if file.is_file() and not is_hidden:
            found.update(f"{place} {_file_digest(file)}\n".encode())
    return found.hexdigest()


def _file_digest(path: Path) -> str:
    """Returns a digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _written_before(output: Path, asked: Mapping[str, Any]) -> Prepared:
    """Returns the report of an existing file. Raises `ValueError` if its data or settings were other ones."""
    known = read_meta(output)
    is_same = known.get("prepare") == asked
    what = f"{output} as these settings make it, or no such file"
    require(is_same, what, "one that was made otherwise", "remove it, or name another")
    counts: dict[str, int] = known["prepared"]
    left_out = {reason: (count, first) for reason, (count, first) in known["left_out"].items()}
    return Prepared(**counts, left_out=left_out)


def _keep_whole_parts(parts: Path) -> None:
    """Removes incomplete files from the folder of parts, and the folder itself if it is then empty."""
    if not parts.is_dir():
        return
    for path in parts.iterdir():
        if path.suffix != ".arrow":
            path.unlink()
    if not any(parts.iterdir()):
        parts.rmdir()


def _kept_lines(
    settings: PrepareSettings,
    processing_class: Processing,
    parts: Path,
    asked: Mapping[str, Any],
    report: Prepared,
) -> Iterator[str]:
    """Yields the line of each row that is kept, and counts all rows. Of equal rows, the first one is kept."""
    made_from = {name: value for name, value in asked.items() if name not in WHICH_ROWS}
    seen: set[str] = set()
    for name in settings.datasets:
        source = open_source(name, streaming=settings.streaming)
        options = {
            "origin": source.origin,
            "settings": settings,
            "processing_class": processing_class,
        }
        row_map = RowMap(
            function=prepare_row,
            options=options,
            columns=COLUMNS,
            folder=parts,
            key=json.dumps(made_from, sort_keys=True),
        )
        limit = settings.num_rows
        if name in settings.whole:
            limit = None
        for made in source.mapped(row_map, limit):
            if not made["where"]:
                continue
            if made["malformed"] and not settings.skip_bad_rows:
                raise ValueError(
                    f"{made['malformed']}, or leave such rows out with --skip-bad-rows"
                )
            if report.takes(made, seen):
                yield made["line"]


def prepare_row(
    values: Mapping[str, Any],
    number: int,
    rank: int | None,
    *,
    origin: Origin,
    settings: PrepareSettings,
    processing_class: Processing,
) -> dict[str, Any]:
    """Returns the line to write for a row, or the reason why it is left out. It is called by `datasets.Dataset.map`.

    Args:
        values (mapping): The columns of the row, as `datasets` returns them.
        number (`int`): The number of the row, from 0.
        rank (`int`, *optional*): The index of this process, or `None` if it is the only one.
        origin, settings, processing_class: The set of the row, the settings, and the target's tokenizer or processor.

    Returns:
        `dict[str, Any]`: The `COLUMNS`. For an empty line of a file, `where` is empty.

    Raises:
        ValueError: If the row is malformed and `skip_bad_rows` is not set. The message names the row.
        OSError: If the disk has no room for an image of the row.
    """
    if rank is not None:
        torch.set_num_threads(1)  # each process has one core
    made: dict[str, Any] = dict(NOTHING)
    if not origin.has_row(values):
        return made
    row = origin.row(values, number)
    made["where"] = row.where
    try:
        made |= _made(row, settings, processing_class)
    except MemoryError:
        raise
    except Exception as error:  # a template or an image may raise any error
        if is_no_room(error):  # the disk is full, but the row is not malformed
            raise
        sentence = _sentence(error, row.where)
        if not settings.skip_bad_rows:
            raise ValueError(f"{sentence}, or leave such rows out with --skip-bad-rows") from error
        made["malformed"] = sentence
    return made


def _made(row: Row, settings: PrepareSettings, processing_class: Processing) -> dict[str, Any]:
    """Returns the result for a row: the entries of `COLUMNS` that differ from `NOTHING`."""
    folder = settings.output.parent
    options = settings.chat_template_kwargs
    max_pixels = settings.max_image_pixels or NO_LIMIT
    found = conversation_of(row, settings.template, folder / "images", options, max_pixels)
    messages = found["messages"]
    weigh_as_prepared(messages, row)
    _leave_what_decides(messages, settings.turns)
    name = content_id(found)
    turns = _chosen_turns(messages, settings.turns)
    # The sequences say which answers count, so weights are removed before templates and servers see them.
    for message in messages:
        message.pop("weight", None)
    answers = [messages[turn] for turn in turns]
    if any(not answer["content"] and not answer.get("tool_calls") for answer in answers):
        return {"left_out": "an empty answer"}
    template = ChatTemplate(processing_class, template_options(found))
    if template.has_day:
        found["prompt_date"] = today()
        template = ChatTemplate(processing_class, template_options(found))
    here = resolved(found, folder)
    prepared = template.messages(here["messages"], here.get("images", ()))
    ends_with_user = messages[-1]["role"] == "user"
    check_turns(template.render(prepared, ends_with_user), prepared)
    made: dict[str, Any] = {"id": name}
    if not turns and settings.needs_answers:
        return made | {"left_out": "no answer to train on"}
    if not turns and not ends_with_user:
        return made | {"left_out": "no answer to train on and no question at its end"}
    limit = settings.max_length
    sequences: list[dict[str, Any]] = []
    if not turns:
        fits = _fits(here, processing_class, limit)
    else:
        groups = [turns]
        if not template.is_marked:
            groups = groups_in_place(template.render, prepared, turns, template.ends())
        sequences, made["num_cut"] = _sequences(here, groups, processing_class, limit)
        fits = bool(sequences)
    if not fits:
        return made | {"left_out": "a prompt longer than the greatest length"}
    made["line"] = line_of({"id": name, **found, "sequences": sequences})
    made["line"].encode()  # a lone surrogate raises an error here, where the row is known
    made["num_sequences"] = len(sequences)
    made["num_tokens"] = sum(sequence["num_tokens"] for sequence in sequences)
    return made


def _leave_what_decides(messages: list[dict[str, Any]], which: Turns) -> None:
    """Removes the parts of messages that have no effect, so that rows that differ only in them become duplicates."""
    if which == "none":
        # The target itself gives the last answer.
        while messages[-1]["role"] != "user":
            messages.pop()
    if which != "all":
        # Only the last answer may count, so the weights of earlier answers have no effect.
        for message in messages[:-1]:
            message.pop("weight", None)


def _chosen_turns(messages: Sequence[Mapping[str, Any]], which: Turns) -> list[int]:
    """Returns the indices of the answers of a row that are trained on."""
    if which == "none":
        return []
    turns = turns_to_train(messages)
    if which == "all":
        return turns
    return [turn for turn in turns if turn == len(messages) - 1]


def _sequences(
    row: Mapping[str, Any],
    groups: Sequence[list[int]],
    processing_class: Processing,
    limit: int | None,
) -> tuple[list[dict[str, Any]], int]:
    """Returns a sequence for each group of turns with an answer within the limit, and the number of cut sequences."""
    sequences: list[dict[str, Any]] = []
    num_cut = 0
    for group in groups:
        size, is_cut = _size_of(row, group, processing_class, limit)
        if size > 0:
            sequences.append({"turns": group, "num_tokens": size})
            num_cut += is_cut
    return sequences, num_cut


def _size_of(
    row: Mapping[str, Any], turns: list[int], processing_class: Processing, limit: int | None
) -> tuple[int, bool]:
    """Returns the length of a group's sequence (0 if no answer is within the limit), and whether it is cut."""
    example = ChatDataset([{**row, "trained_turns": turns}], processing_class)[0]
    size = len(example.input_ids)
    if limit is None or size <= limit:
        return size, False
    can_be_cut = not example.has_images and example.prompt_length() < limit
    if not can_be_cut:
        return 0, False
    return limit, True


def _fits(row: Mapping[str, Any], processing_class: Processing, limit: int | None) -> bool:
    """Says whether a prompt leaves room for an answer."""
    if limit is None:
        return True
    return ChatDataset([row], processing_class, answers=[[]]).lengths[0] < limit


def _sentence(error: Exception, where: str) -> str:
    """Returns a sentence that says what is wrong with a row, with its place."""
    if not is_ours(error):
        return f"expected a conversation that the chat template takes in {where}, got {one_line(error)}; fix the row"
    told = str(error).removesuffix(" (row 0)")
    if where in told:
        return told
    return f"{told} ({where})"


def split_rows(path: Path, train: Path, held_out: Path, num_held_out: int) -> tuple[int, int]:
    """Divides the lines of a file among two files. At most a fifth of them go to `held_out`.

    Only one line is in memory at a time.

    Args:
        path (`Path`): A file of rows.
        train, held_out (`Path`): The files to write.
        num_held_out (`int`): The maximum number of lines that are held out. They are spread evenly over the file,
            because rows are often sorted by topic.

    Returns:
        `tuple[int, int]`: The number of lines in `train` and in `held_out`.
    """
    with path.open("rb") as file:
        num_lines = sum(1 for _ in file)
    num_chosen = max(0, min(num_held_out, num_lines // 5))
    if num_chosen < num_held_out:
        logger.warning(
            "%d of %d conversations are held out, and not %d as asked: at most a fifth of them are",
            num_chosen,
            num_lines,
            num_held_out,
        )
    chosen = {at * num_lines // num_chosen for at in range(num_chosen)}

    def part(is_held_out: bool) -> Iterator[str]:
        with path.open(encoding="utf-8", newline="\n") as file:
            for at, line in enumerate(file):
                if (at in chosen) == is_held_out:
                    yield line

    write_whole(train, part(False))
    write_whole(held_out, part(True))
    return num_lines - num_chosen, num_chosen


def load_rows(
    source: str,
    *,
    template: str | None = None,
    streaming: bool = False,
    num_rows: int | None = None,
    images: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields the rows of a set as `{"id", "messages", "images"?, "chat_template_kwargs"?}`.

    Args:
        source (`str`): A file (`.jsonl`, `.json`, `.parquet`, `.txt` with one prompt per line), a folder or a Hub set
            that `datasets` loads: `ORG/NAME`, `ORG/NAME:CONFIG`, `ORG/NAME:CONFIG:SPLIT`. The default split is
            `train`.
        template (`str`, *optional*): For rows with other columns, the text of the user's turn: `"{question}"`.
        streaming (`bool`): Whether a set of the Hub is fetched row by row, without storing it.
        num_rows (`int`, *optional*): The number of rows to read.
        images (`Path`, *optional*): The folder for images that a row holds as bytes.

    Raises:
        ValueError: If a row cannot be read. The message names the row.
    """
    _check_num_rows(num_rows)
    rows = open_source(source, streaming=streaming).rows()
    for row in islice(rows, num_rows):
        found = conversation_of(row, template, images)
        found = {"id": content_id(found), **found}
        if images is not None:
            found = resolved(found, images.parent)
        yield found


def _check_num_rows(num_rows: int | None) -> None:
    is_good = num_rows is None or num_rows > 0
    require(is_good, "at least 1 row of each set", num_rows, "ask for more")
