"""The first stage of training: conversations from anywhere, in one form, checked, counted, without duplicates.

A file of prepared rows is JSON Lines, one conversation a line: `id` (of its contents), `messages`, `images` and
`chat_template_kwargs` where there are any, and `sequences`, what is trained on: `{"turns": [1, 3], "num_tokens": 9}`.
The next stage, [`dflash_hf.training.answering`], writes the same with `answer_ids`; [`read_examples`] reads both.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from dflash_hf.data.row_files import RowFile, write_rows, write_whole
from dflash_hf.data.rows import Row, file_rows, hub_rows
from dflash_hf.errors import listed, one_line, require, shown
from dflash_hf.training.chat_dataset import ChatDataset
from dflash_hf.training.conversations import ConversationReader, resolved
from dflash_hf.training.data import Example
from dflash_hf.training.masks import assistant_turns, check_turns, groups_in_place
from dflash_hf.training.messages import ChatTemplate

logger = logging.getLogger(__name__)

Processing = PreTrainedTokenizerBase | ProcessorMixin
Turns = Literal["all", "last", "none"]
FILES = (".jsonl", ".json", ".parquet", ".txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareSettings:
    """What to prepare.

    Args:
        datasets (sequence of `str`): Files (`.jsonl`, `.json`, `.parquet`, `.txt` with a prompt a line), folders or
            Hub sets that `datasets` loads: `ORG/NAME`, `ORG/NAME:CONFIG`, `ORG/NAME:CONFIG:SPLIT`; the split is
            `train` by default.
        output (`Path`): The file to write.
        turns (`str`): Which answers of the data are trained on: `"all"`, `"last"`, or `"none"` where the target is to
            give its own ([`regenerate`]).
        max_length (`int`, *optional*): Tokens of a sequence; longer ones are cut when they are read, and left out
            where their prompt is as long, or they have images.
        template (`str`, *optional*): What the user says, of rows of other columns: `"{question}"`.
        num_rows (`int`, *optional*): How many rows to read of each set.
        streaming (`bool`): Fetch sets of the Hub row by row, and keep none.
        skip_bad_rows (`bool`): Leave out rows that are malformed, and say how many, instead of refusing the first.
        chat_template_kwargs (mapping): What else the chat template reads: `{"enable_thinking": False}`.
    """

    datasets: Sequence[str]
    output: Path
    turns: Turns = "all"
    max_length: int | None = None
    template: str | None = None
    num_rows: int | None = None
    streaming: bool = False
    skip_bad_rows: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class Prepared:
    """What became of the rows.

    Args:
        num_rows (`int`): How many were read.
        num_kept (`int`): How many conversations were written.
        num_sequences (`int`): Sequences to train on.
        num_tokens (`int`): Tokens in all of those.
        num_cut (`int`): Sequences that will be cut at the greatest length.
        left_out (`dict[str, tuple[int, str]]`): Reason -> how many rows, and the first of them.
    """

    num_rows: int = 0
    num_kept: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_cut: int = 0
    left_out: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])

    def leave_out(self, reason: str, where: str) -> None:
        """Counts a row that is not written."""
        count, first = self.left_out.get(reason, (0, where))
        self.left_out[reason] = (count + 1, first)

    def sentences(self) -> list[str]:
        """Returns what to tell a user."""
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


def prepare(settings: PrepareSettings, processing_class: Processing) -> Prepared:
    """Writes conversations of data sets to a file, in one form; nothing where it has been written so before.

    Raises:
        ValueError: If a set or row cannot be read (naming it), it cannot be told what the assistant writes, the chat
            template reads no such keyword, no row is left, or the file is there and was written with other settings.
            Nothing is written then.
    """
    what = "none of turns, all, last"
    require(settings.turns in ("all", "last", "none"), what, settings.turns, "choose one of them")
    require(bool(settings.datasets), "data sets to prepare", list(settings.datasets), "name one")
    template = ChatTemplate(processing_class, settings.chat_template_kwargs)
    for name in settings.chat_template_kwargs:  # Jinja takes a name that is misspelt without a word
        what = "chat_template_kwargs that the chat template reads"
        require(name in template.text, what, name, "correct the name, or leave it out")
    # What the file is made of and how, to tell whether one that is there is the same.
    sizes = [
        Path(name).stat().st_size if Path(name).is_file() else None for name in settings.datasets
    ]
    of = {name: value for name, value in asdict(settings).items() if name != "output"}
    of |= {
        "datasets": list(zip(settings.datasets, sizes, strict=True)),
        "chat_template": template.text,
    }
    asked = json.loads(json.dumps(of))
    if settings.output.exists():
        known = read_meta(settings.output)
        same = known.get("prepare") == asked
        what = f"{settings.output} as these settings make it, or no such file"
        require(same, what, "one that was made otherwise", "remove it, or name another")
        counts: dict[str, int] = known["prepared"]
        left_out = {reason: (count, first) for reason, (count, first) in known["left_out"].items()}
        return Prepared(**counts, left_out=left_out)
    report = Prepared()
    maker = _Maker(settings, processing_class, report)

    def rows() -> Iterator[dict[str, Any]]:
        yield from maker.rows()
        none = f"rows to train on in {listed(settings.datasets)}"
        require(
            report.num_kept > 0,
            none,
            "; ".join(report.sentences()),
            "take other data, or a greater length",
        )
        counts = asdict(report)
        told = {"prepare": asked, "left_out": counts.pop("left_out"), "prepared": counts}
        # What it was made with comes first: a file without that is nobody's.
        write_whole(meta_path(settings.output), json.dumps(told, indent=2) + "\n")

    write_rows(settings.output, rows())
    for sentence in report.sentences():
        logger.info(sentence)
    return report


class _Maker:
    """Makes prepared rows."""

    def __init__(
        self, settings: PrepareSettings, processing_class: Processing, report: Prepared
    ) -> None:
        self.settings = settings
        self.processing_class = processing_class
        self.report = report
        folder = settings.output.parent / "images"
        self.read = ConversationReader(settings.template, folder, settings.chat_template_kwargs)
        self.seen: set[str] = set()

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields what is written, row by row."""
        for name in self.settings.datasets:
            for row in source_rows(
                name, streaming=self.settings.streaming, num_rows=self.settings.num_rows
            ):
                self.report.num_rows += 1
                try:
                    made = self._made(row)
                except Exception as error:  # a template or an image may refuse it in any way
                    sentence = _sentence(error, row.where)
                    if not self.settings.skip_bad_rows:
                        raise ValueError(f"{sentence}, or skip bad rows") from error
                    self.report.leave_out("malformed", sentence)
                    continue
                if isinstance(made, str):
                    self.report.leave_out(made, row.where)
                else:
                    self.report.num_kept += 1
                    yield made

    def _made(self, row: Row) -> dict[str, Any] | str:
        """A prepared row, or why it is left out."""
        found = self.read(row)
        messages = found["messages"]
        if self.settings.turns == "none":
            while messages[-1]["role"] != "user":
                messages.pop()
        turns = assistant_turns(messages) if self.settings.turns != "none" else []
        if self.settings.turns == "last":
            turns = turns[-1:] if turns and turns[-1] == len(messages) - 1 else []
        if any(
            not messages[turn]["content"] and not messages[turn].get("tool_calls") for turn in turns
        ):
            return "an empty answer"
        if found["id"] in self.seen:
            return "a duplicate"
        self.seen.add(found["id"])
        template = ChatTemplate(self.processing_class, found.get("chat_template_kwargs"))
        here = resolved(found, self.settings.output.parent)
        prepared = template.messages(here["messages"], here.get("images", ()))
        ends_with_user = messages[-1]["role"] == "user"
        check_turns(template.render(prepared, ends_with_user), prepared)
        if not turns and not ends_with_user:
            return "no answer and no question at its end"
        groups = [turns] if turns else []
        if turns and not template.is_marked:
            groups = groups_in_place(template.render, prepared, turns, template.ends())
        sequences = [kept for group in groups if (kept := self._sequence(here, group)) is not None]
        if (groups and not sequences) or (not groups and not self._fits(here)):
            return "a prompt longer than the greatest length"
        self.report.num_sequences += len(sequences)
        self.report.num_tokens += sum(sequence["num_tokens"] for sequence in sequences)
        return {**found, "sequences": sequences}

    def _sequence(self, found: Mapping[str, Any], turns: list[int]) -> dict[str, Any] | None:
        """Turns that are trained on together and how long that is; `None` where nothing is left at that length."""
        limit = self.settings.max_length
        dataset = ChatDataset([{**found, "trained_turns": turns}], self.processing_class)
        has_images = "images" in found or any(
            isinstance(m["content"], list) for m in found["messages"]
        )
        example = None if has_images else dataset[0]
        size = dataset.lengths[0] if example is None else len(example.input_ids)
        if limit is not None and size > limit:
            if example is None or example.prompt_length() >= limit:
                return None
            self.report.num_cut += 1
            size = limit
        return {"turns": turns, "num_tokens": size}

    def _fits(self, found: Mapping[str, Any]) -> bool:
        """Whether a prompt leaves room for an answer."""
        limit = self.settings.max_length
        return (
            limit is None
            or ChatDataset([found], self.processing_class, answers=[[]]).lengths[0] < limit
        )


def _sentence(error: Exception, where: str) -> str:
    """What is wrong with a row, with its place."""
    told = str(error).removesuffix(" (row 0)")
    if not (isinstance(error, ValueError) and told.startswith("expected")):
        return f"expected a conversation that the chat template takes in {where}, got {one_line(error)}; fix the row"
    return told if where in told else f"{told} ({where})"


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
        source (`str`): A file, or what `datasets` loads; see [`PrepareSettings`].
        template, streaming, num_rows: See there.
        images (`Path`, *optional*): Folder for images that a row holds as bytes.

    Raises:
        ValueError: Naming the row that cannot be read.
    """
    read = ConversationReader(template, images)
    for row in source_rows(source, streaming=streaming, num_rows=num_rows):
        found = read(row)
        yield found if images is None else resolved(found, images.parent)


def source_rows(
    source: str, *, streaming: bool = False, num_rows: int | None = None
) -> Iterator[Row]:
    """Returns the rows of a set as they are, at most `num_rows` of them; see [`load_rows`]."""
    require(
        num_rows is None or num_rows > 0, "at least 1 row of each set", num_rows, "ask for more"
    )
    if source.endswith(FILES):
        rows = file_rows([Path(source)], streaming=True)
    else:
        path, *parts = source.split(":")
        known = ("/" in path or Path(path).is_dir()) and len(parts) <= 2
        require(
            known,
            f"a file ({', '.join(FILES)}) or a set as ORG/NAME:CONFIG:SPLIT",
            source,
            "fix the name",
        )
        config, split = [part or None for part in (*parts, "", "")[:2]]
        rows = hub_rows(path, config, split or "train", streaming=streaming)
    return islice(rows, num_rows)


class _Sequences(Sequence[dict[str, Any]]):
    """Rows of a file, once for each sequence of theirs that is trained on."""

    def __init__(self, rows: RowFile, chosen: Sequence[tuple[int, int]]) -> None:
        self.file = rows
        self.chosen = chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: Any) -> Any:
        row, number = self.chosen[index]
        found = resolved(self.file[row], self.file.path.parent)
        return (
            found if number < 0 else {**found, "trained_turns": found["sequences"][number]["turns"]}
        )

    def where(self, index: int) -> str:
        """Returns what to call a row in a sentence."""
        return self.file.where(self.chosen[index][0])


def read_examples(
    path: str | Path, processing_class: Processing, max_length: int | None = None
) -> Sequence[Example]:
    """Returns the examples of a prepared or answered file, built when they are asked for, their lengths known before.

    Args:
        path (`Path`): What [`prepare`] or [`regenerate`] wrote, or any file of `messages` with or without
            `answer_ids`.
        processing_class (`PreTrainedTokenizerBase` or `ProcessorMixin`): The target's.
        max_length (`int`, *optional*): Longer sequences are cut to that many tokens, and left out where no token of an
            answer would be left, or where they have images. How many is logged.

    Raises:
        ValueError: If there is no such file, a row is malformed (naming it), or no example is left.
    """
    file = RowFile(path := Path(path))
    found = [
        (at, *each) for at, row in enumerate(file) for each in _lengths_in(row, file.where(at))
    ]
    rows = _Sequences(file, [(at, number) for at, number, _ in found])
    lengths: Sequence[int | None] = [length for *_, length in found]
    if None in lengths:  # written by somebody else: their texts are counted
        lengths = ChatDataset(rows, processing_class).lengths
    known = [length or 0 for length in lengths]
    if max_length is not None and any(length > max_length for length in known):
        whole = ChatDataset(rows, processing_class)
        kept = [
            at
            for at, n in enumerate(known)
            if n <= max_length or _can_be_cut(whole, at, max_length)
        ]
        if len(kept) < len(known):
            logger.warning(
                "%d of %d sequences of %s are left out: at %d tokens no answer would be left of them, or an image cut",
                len(known) - len(kept),
                len(known),
                path,
                max_length,
            )
        rows = _Sequences(file, [rows.chosen[at] for at in kept])
        known = [min(known[at], max_length) for at in kept]
    num_prompts = len(file) - len({at for at, *_ in found})
    got = f"{num_prompts} prompts without one" if num_prompts else "none"
    action = (
        "let the target answer them (`regenerate`)"
        if num_prompts
        else "take other data, or a greater length"
    )
    require(len(rows) > 0, f"answers to train on in {path}", got, action)
    return ChatDataset(rows, processing_class, lengths=known, max_length=max_length)


def _can_be_cut(examples: ChatDataset, at: int, max_length: int) -> bool:
    """Whether a token of an answer is left of an example at a length."""
    example = examples[at]
    return len(example.input_ids) <= max_length or (
        not example.has_images and 1 in example.loss_mask[:max_length]
    )


def _lengths_in(row: Mapping[str, Any], where: str) -> list[tuple[int, int | None]]:
    """The sequences of a row, by their number (-1: the row itself), and how long they are as far as it says."""
    require(
        isinstance(row.get("messages"), list), f"messages in {where}", listed(row), "run `prepare`"
    )
    if "answer_ids" in row:
        ids: Any = row["answer_ids"]
        good = (
            isinstance(ids, list)
            and all(isinstance(token, int) and token >= 0 for token in ids)
            and bool(ids)
        )
        require(good, f"answer_ids, a list of token ids, in {where}", ids, "leave the row out")
        return [(-1, _count(row, "num_tokens", where))]
    if "sequences" not in row:
        return (
            [(-1, None)]
            if any(message.get("role") == "assistant" for message in row["messages"])
            else []
        )
    good = isinstance(row["sequences"], list) and all(
        isinstance(entry, dict) for entry in row["sequences"]
    )
    require(
        good, f"sequences as `prepare` writes them in {where}", row["sequences"], "run it again"
    )
    for entry in row["sequences"]:
        turns = entry.get("turns")
        good = (
            isinstance(turns, list)
            and bool(turns)
            and all(turn in range(len(row["messages"])) for turn in turns)
        )
        require(good, f"turns of the row's in {where}", turns, "run `prepare` again")
    return [
        (number, _count(entry, "num_tokens", where))
        for number, entry in enumerate(row["sequences"])
    ]


def _count(row: Mapping[str, Any], name: str, where: str) -> int | None:
    value = row.get(name)
    good = value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0)
    require(good, f"a number of tokens as {name} in {where}", value, "leave it out")
    return value


def meta_path(path: Path) -> Path:
    """Returns the file beside a stage's file that says what that was made of."""
    return path.with_suffix(".meta.json")


def read_meta(path: Path) -> dict[str, Any]:
    """Returns what is written beside a stage's file.

    Raises:
        ValueError: If there is nothing, or something else.
    """
    meta = meta_path(path)
    try:
        found: Any = json.loads(meta.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"expected {meta} beside {path}, which says what that was made of, got {one_line(error)}; "
            "remove both, or name another file"
        ) from error
    require(
        isinstance(found, dict), f"a JSON object in {meta}", shown(found), "remove it and its file"
    )
    return found
