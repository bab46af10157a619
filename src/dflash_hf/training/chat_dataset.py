"""This module defines a data set of chats, with or without images. Examples are built when they are read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from dflash_hf.data.image_files import image_size
from dflash_hf.data.prompt_files import SOURCES, blocks_of
from dflash_hf.data.rows import without_filling
from dflash_hf.errors import is_ours, listed, require
from dflash_hf.training.chat_template import ChatTemplate, check_messages, template_options
from dflash_hf.training.example import Example
from dflash_hf.training.masks import turns_to_train


class ChatDataset(Sequence[Example]):
    """A data set that builds examples from chats. An image is decoded only when its row is read, and is not kept.

    `ChatDataset(rows, processor)` trains on the assistant turns of the rows. For the target's own answers:
    `prompts = ChatDataset(rows, processor, answers=[[]] * len(rows))`,
    `answers = regenerate_answers(target, prompts, ...)`, `ChatDataset(rows, processor, answers=answers)`.

    Args:
        rows (sequence of mappings): Rows with `messages`, whose contents are strings or lists of blocks. If images are
            outside of the messages, a row also has `images` or `image`; `None` means no image. A `datasets.Dataset` is
            accepted. [`prepare_multimodal_messages`] says what an image may be and where it goes. A row may also have
            `answer_ids`, the target's own answer, `trained_turns`, the messages that count (default: all messages of
            the assistant except those with `weight` 0), `chat_template_kwargs`, further options of the template, and
            `prompt_date`, the day that the template writes as today's date.
        processing_class (`PreTrainedTokenizerBase` or `ProcessorMixin`): A tokenizer for text, or a processor for
            text and images.
        answers (sequence of sequences of `int`, *optional*): The target's own answer to each row, including its end
            token. It replaces the row's last assistant turn.
        lengths (sequence of `int`, *optional*): The number of tokens of each example, for batches of similar length.
            By default, tokens are counted when lengths are first needed: the tokens of texts by encoding them, the
            tokens of images from their headers. If the headers are not enough, the example is built once and dropped.
        max_length (`int`, *optional*): Longer examples are cut to this number of tokens. Longer examples with images
            are refused.

    Raises:
        ValueError: If there is not one answer per row. A bad row raises when it is read. The message has its index.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        *,
        answers: Sequence[Sequence[int]] | None = None,
        lengths: Sequence[int] | None = None,
        max_length: int | None = None,
    ) -> None:
        if answers is not None and len(answers) != len(rows):
            raise ValueError(
                f"expected {len(rows)} answers (one per row), got {len(answers)}; [] stands for a prompt alone"
            )
        self.rows = rows
        self.processing_class = processing_class
        self.answers = answers
        if max_length is None:
            max_length = sys.maxsize  # no example reaches it
        self.max_length = max_length
        if lengths is None:
            lengths = ()  # counted when they are first needed
        self._lengths = lengths
        # Whether the processor can compute the number of tokens of an image from its size
        self._can_count = hasattr(processing_class, "_get_num_multimodal_tokens")
        # How many tokens of the text each image replaces. Empty until this is known.
        self._replaced: list[float] = []

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> Sequence[int]:
        """The number of tokens of each example."""
        if len(self._lengths) == 0:
            self._lengths = [self._told(index, self._length) for index in range(len(self))]
        return self._lengths

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[at] for at in range(len(self))[index]]
        return self._told(range(len(self))[index], self._build)

    def _told(self, at: int, make: Callable[[Mapping[str, Any]], Any]) -> Any:
        """Applies a function to a row with its answer. An error in the row is raised with the place of the row."""
        try:
            row = self.rows[at]
            if hasattr(self.rows, "features"):  # of a `datasets.Dataset`
                row = without_filling(row)
            if self.answers is not None:
                row = {**row, "answer_ids": self.answers[at]}
            return make(row)
        # Any error may come from a row (a file that is no image, a missing key), so all of them get its place.
        except Exception as error:
            raise ValueError(_sentence(error, self._place(at))) from error

    def _place(self, at: int) -> str:
        """Returns the name of a row for a message."""
        where: Any = getattr(self.rows, "where", "row {}".format)
        return where(at)

    def places_of(self, indices: Sequence[int]) -> str:
        """Returns the name of some examples' rows for a message. Rows of a file are named by their lines."""
        lines_of: Any = getattr(self.rows, "lines_of", None)
        if lines_of is None:
            return f"rows {listed(indices)}"
        return lines_of(indices)

    def _build(self, row: Mapping[str, Any]) -> Example:
        messages, images = parts_of(row)
        options = template_options(row)
        if _has_answer(row):
            template = ChatTemplate(self.processing_class, options)
            prepared = template.messages(_asked(messages), images)
            encoded = template.encode(prepared, add_generation_prompt=True, return_tensors="pt")
            example = Example.from_pair(encoded, row["answer_ids"])
        else:
            turns = row.get("trained_turns")
            example = Example.from_messages(
                self.processing_class, messages, images, turns=turns, chat_template_kwargs=options
            )
        return example.cut(self.max_length)

    def _length(self, row: Mapping[str, Any]) -> int:
        messages, images = parts_of(row)
        template = ChatTemplate(self.processing_class, template_options(row))
        if _has_answer(row):
            messages = template.messages(_asked(messages), images)
            text = template.render(messages, add_generation_prompt=True)
            plain = len(template.tokens(text)) + len(row["answer_ids"])
        else:
            messages = template.messages(messages, images)
            if not template.is_marked:
                turns = row.get("trained_turns") or turns_to_train(messages)
                messages = messages[: _behind(turns, len(messages))]
            plain = len(template.tokens(template.render(messages)))
        length = self._expanded(plain, messages, lambda: len(self._build(row).input_ids))
        return min(length, self.max_length)

    def _expanded(
        self, plain: int, messages: Sequence[Mapping[str, Any]], build: Callable[[], int]
    ) -> int:
        """Returns the number of tokens after images are expanded, from the headers of the images if possible.

        The number of text tokens that an image replaces depends on the model family, so one example is built to
        measure it. Lengths are exact if this number is constant (one placeholder in Qwen's templates), and approximate
        otherwise.
        """
        if _has_videos(messages):
            return build()
        sources = _image_sources(messages)
        if not sources:
            return plain
        sizes: list[list[int]] = []
        for source in sources:
            size = image_size(source)
            if size is None:
                return build()
            sizes.append(list(size))
        if not self._can_count:
            return build()
        counter: Any = self.processing_class
        added = sum(counter._get_num_multimodal_tokens(image_sizes=sizes).num_image_tokens)
        if not self._replaced:
            whole = build()
            self._replaced.append((plain + added - whole) / len(sources))
            return whole
        return round(plain + added - self._replaced[0] * len(sources))


def _has_videos(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Says whether there is a video. Its file does not say how many tokens it becomes."""
    return any(block["type"] == "video" for block in blocks_of(messages))


def _image_sources(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Returns the sources of the messages' images (such as a path or an image), in their order."""
    images = [block for block in blocks_of(messages) if block["type"] == "image"]
    return [next(block[key] for key in SOURCES if key in block) for block in images]


def _has_answer(row: Mapping[str, Any]) -> bool:
    """Says whether a row has an answer of the target. The answer may be empty. `None` means no answer."""
    return row.get("answer_ids") is not None


def _behind(turns: Sequence[int], num_messages: int) -> int:
    """Returns the number of messages up to the last of some turns, or of all messages if there are no turns."""
    if not turns:
        return num_messages
    return turns[-1] + 1


def _sentence(error: Exception, place: str) -> str:
    """Returns a sentence that says what is wrong with a row."""
    reason = str(error)
    if is_ours(error):
        return f"{reason} ({place})"
    if not isinstance(error, (OSError, ValueError)):
        reason = f"{type(error).__name__}: {reason}"
    return f"expected a chat that can be read, got one with this: {reason}; fix it ({place})"


def parts_of(row: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """Returns a row's messages and the images outside of them. Raises `ValueError` if messages are missing or bad."""
    if "messages" not in row:
        raise ValueError(
            f"expected a row with messages, got one with {', '.join(row)}; name its chat messages"
        )
    check_messages(row["messages"])
    messages = list(row["messages"])
    images = row.get("images", row.get("image"))
    if images is None:
        return messages, []
    if isinstance(images, (list, tuple)):
        return messages, list(images)
    return messages, [images]


def _asked(messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns messages without the assistant's last turn, if they end with one."""
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    require(bool(messages), "a turn before the assistant's", "none", "leave the row out")
    return messages
