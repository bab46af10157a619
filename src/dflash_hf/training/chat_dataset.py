"""A dataset of chats, with images or without, whose examples are built when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from dflash_hf.data.image_files import image_size
from dflash_hf.data.prompt_files import SOURCES
from dflash_hf.errors import require
from dflash_hf.training.data import Example
from dflash_hf.training.masks import assistant_turns
from dflash_hf.training.messages import ChatTemplate, check_messages


class ChatDataset(Sequence[Example]):
    """Chats as examples: no image is decoded before its row is asked for, and none is kept.

    `ChatDataset(rows, processor)` trains on the assistant turns of the rows. For the target's own answers:
    `prompts = ChatDataset(rows, processor, answers=[[]] * len(rows))`,
    `answers = regenerate_answers(target, prompts, ...)`, `ChatDataset(rows, processor, answers=answers)`.

    Args:
        rows (sequence of mappings): `messages` (contents are strings or lists of blocks) and, where there are images
            outside of the messages, `images` or `image`, `None` for none; a `datasets.Dataset` is one. See
            [`prepare_multimodal_messages`] for what an image may be and where it goes. Also read: `answer_ids`, the
            target's own answer to the row; `trained_turns`, which messages count, default all of the assistant's;
            `chat_template_kwargs`, what else the template reads.
        processing_class (`PreTrainedTokenizerBase` or `ProcessorMixin`): A tokenizer for text, a processor for both.
        answers (sequence of sequences of `int`, *optional*): The target's own answer to each row, its end token
            included, instead of the row's last assistant turn.
        lengths (sequence of `int`, *optional*): Tokens of each example, for batches of similar length. Without them
            the texts are counted when they are first asked for, images by their headers; an example is built, once
            and dropped, only where those do not say it.
        max_length (`int`, *optional*): Longer examples are cut to that many tokens; those with images are refused.

    Raises:
        ValueError: If there is not one answer per row; for a bad row, with its index, when it is asked for.
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
        self.max_length = max_length
        self._lengths = lengths
        # Of images
        self._count_tokens: Any = getattr(processing_class, "_get_num_multimodal_tokens", None)
        self._replaced: float | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each example."""
        if self._lengths is None:
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

    def _told(self, at: int, make: Any) -> Any:
        """What a function makes of a row and its answer; what is wrong with the row is told with its place."""
        where: Any = getattr(self.rows, "where", None)
        place = f"row {at}" if where is None else where(at)
        try:
            row = self.rows[at]
            return make(row, row.get("answer_ids") if self.answers is None else self.answers[at])
        # A file that is no image, a missing key: whatever it is, told with its row
        except Exception as error:
            if isinstance(error, ValueError) and str(error).startswith("expected"):
                raise ValueError(f"{error} ({place})") from error
            reason = (
                f"{error}"
                if isinstance(error, (OSError, ValueError))
                else f"{type(error).__name__}: {error}"
            )
            raise ValueError(
                f"expected a chat that can be read, got one with this: {reason}; fix it ({place})"
            ) from error

    def _build(self, row: Mapping[str, Any], answer: Sequence[int] | None) -> Example:
        messages, images = parts_of(row)
        options = row.get("chat_template_kwargs")
        if answer is None:
            turns = row.get("trained_turns")
            kind = self.processing_class
            example = Example.from_messages(
                kind, messages, images, turns=turns, chat_template_kwargs=options
            )
        else:
            template = ChatTemplate(self.processing_class, options)
            prepared = template.messages(_asked(messages), images)
            encoded = template.encode(prepared, add_generation_prompt=True, return_tensors="pt")
            example = Example.from_pair(encoded, answer)
        return example if self.max_length is None else example.cut(self.max_length)

    def _length(self, row: Mapping[str, Any], answer: Sequence[int] | None) -> int:
        messages, images = parts_of(row)
        template = ChatTemplate(self.processing_class, row.get("chat_template_kwargs"))
        messages = template.messages(messages if answer is None else _asked(messages), images)
        if answer is None and not template.is_marked:
            turns = row.get("trained_turns") or assistant_turns(messages)
            messages = messages[: turns[-1] + 1] if turns else messages
        plain = len(template.tokens(template.render(messages, answer is not None))) + len(
            answer or ()
        )
        length = self._expanded(plain, messages, lambda: len(self._build(row, answer).input_ids))
        return length if self.max_length is None else min(length, self.max_length)

    def _expanded(
        self, plain: int, messages: Sequence[Mapping[str, Any]], build: Callable[[], int]
    ) -> int:
        """The tokens after images are expanded, by the headers of the images where these say it.

        How many tokens of the text an image's replace differs from family to family: one example is built to see it.
        So lengths are exact where that is a constant (one placeholder in Qwen's), and near elsewhere.
        """
        contents = [
            message["content"] for message in messages if isinstance(message.get("content"), list)
        ]
        images = [block for content in contents for block in content if block["type"] == "image"]
        if not images:
            return plain
        sizes = [
            image_size(next(block[key] for key in SOURCES if key in block)) for block in images
        ]
        if self._count_tokens is None or None in sizes:
            return build()
        added = sum(
            self._count_tokens(image_sizes=[list(size) for size in sizes if size]).num_image_tokens
        )
        if self._replaced is None:
            whole = build()
            self._replaced = (plain + added - whole) / len(images)
            return whole
        return round(plain + added - self._replaced * len(images))


def parts_of(row: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """Returns a row's messages, and the images outside of them; `ValueError` if they are missing or malformed."""
    if "messages" not in row:
        raise ValueError(
            f"expected a row with messages, got one with {', '.join(row)}; name its chat messages"
        )
    check_messages(row["messages"])
    images = row.get("images") if "images" in row else row.get("image")
    if images is None:
        images = []
    elif not isinstance(images, (list, tuple)):
        images = [images]
    return list(row["messages"]), list(images)


def _asked(messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages without an answer behind them."""
    messages = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    require(bool(messages), "a turn before the assistant's", "none", "leave the row out")
    return messages
