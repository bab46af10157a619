"""A dataset of chats, with images or without, whose examples are built when they are asked for."""

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
    """Chats as examples: no image is decoded before its row is asked for, and none is kept.

    `ChatDataset(rows, processor)` trains on the assistant turns of the rows. For the target's own answers:
    `prompts = ChatDataset(rows, processor, answers=[[]] * len(rows))`,
    `answers = regenerate_answers(target, prompts, ...)`, `ChatDataset(rows, processor, answers=answers)`.

    Args:
        rows (sequence of mappings): Rows with `messages`, whose contents are strings or lists of blocks. If images are
            outside of the messages, a row also has `images` or `image`; `None` means no image. A `datasets.Dataset` is
            accepted. [`prepare_multimodal_messages`] says what an image may be and where it goes. A row may also have
            `answer_ids`, the target's own answer; `trained_turns`, the messages that count (default: all messages of
            the assistant but those of `weight` 0); `chat_template_kwargs`, further options of the template; and
            `prompt_date`, the day that the template writes as today.
        processing_class (`PreTrainedTokenizerBase` or `ProcessorMixin`): A tokenizer for text, a processor for both.
        answers (sequence of sequences of `int`, *optional*): The target's own answer to each row, its end token
            included, instead of the row's last assistant turn.
        lengths (sequence of `int`, *optional*): Tokens of each example, for batches of similar length. Without them
            the texts are counted when they are first needed, and images by their headers. If the headers are not
            enough, the example is built once and dropped.
        max_length (`int`, *optional*): Longer examples are cut to that many tokens; those with images are refused.

    Raises:
        ValueError: If there is not one answer per row. A bad row raises when it is read; the message has its index.
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
            lengths = ()  # counted when they are asked for
        self._lengths = lengths
        # Whether the processor says how many tokens an image of a size becomes
        self._can_count = hasattr(processing_class, "_get_num_multimodal_tokens")
        # How many tokens of the text each image replaces, once it is known
        self._replaced: list[float] = []

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each example."""
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
        """What a function makes of a row with its answer; what is wrong with the row is told with its place."""
        try:
            row = self.rows[at]
            if hasattr(self.rows, "features"):  # of a `datasets.Dataset`
                row = without_filling(row)
            if self.answers is not None:
                row = {**row, "answer_ids": self.answers[at]}
            return make(row)
        # A file that is no image, a missing key: whatever it is, told with its row
        except Exception as error:
            raise ValueError(_sentence(error, self._place(at))) from error

    def _place(self, at: int) -> str:
        """What to call a row in a sentence."""
        where: Any = getattr(self.rows, "where", "row {}".format)
        return where(at)

    def places_of(self, indices: Sequence[int]) -> str:
        """Returns what to call the rows of some examples in a sentence: their lines, where they are of a file."""
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
        """The tokens after images are expanded, by the headers of the images where these say it.

        How many tokens of the text an image's replace differs from family to family: one example is built to see it.
        So lengths are exact where that is a constant (one placeholder in Qwen's), and near elsewhere.
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
    """Whether there is a video, whose file does not say how many tokens it becomes."""
    return any(block["type"] == "video" for block in blocks_of(messages))


def _image_sources(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What the messages' images are taken from, in their order."""
    images = [block for block in blocks_of(messages) if block["type"] == "image"]
    return [next(block[key] for key in SOURCES if key in block) for block in images]


def _has_answer(row: Mapping[str, Any]) -> bool:
    """Whether a row has an answer of the target's, which may be empty: `None` is none."""
    return row.get("answer_ids") is not None


def _behind(turns: Sequence[int], num_messages: int) -> int:
    """How many messages there are up to the last of some turns; all where there are no turns."""
    if not turns:
        return num_messages
    return turns[-1] + 1


def _sentence(error: Exception, place: str) -> str:
    """What is wrong with a row."""
    reason = str(error)
    if is_ours(error):
        return f"{reason} ({place})"
    if not isinstance(error, (OSError, ValueError)):
        reason = f"{type(error).__name__}: {reason}"
    return f"expected a chat that can be read, got one with this: {reason}; fix it ({place})"


def parts_of(row: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """Returns a row's messages, and the images outside of them; `ValueError` if they are missing or malformed."""
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
    """Messages without an answer behind them."""
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    require(bool(messages), "a turn before the assistant's", "none", "leave the row out")
    return messages
