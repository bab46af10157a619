"""A dataset of chats, with images or without, whose examples are built when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from dflash_hf.training.data import Example
from dflash_hf.training.messages import ChatTemplate, check_messages


class ChatDataset(Sequence[Example]):
    """Chats as examples: no image is decoded before its row is asked for, and none is kept.

    `ChatDataset(rows, processor)` trains on the assistant turns of the rows. For the target's own answers:
    `prompts = ChatDataset(rows, processor, answers=[[]] * len(rows))`,
    `answers = regenerate_answers(target, prompts, ...)`, `ChatDataset(rows, processor, answers=answers)`.

    Args:
        rows (sequence of mappings): `messages` (contents are strings or lists of blocks) and, where there are images
            outside of the messages, `images` or `image`, `None` for none; a `datasets.Dataset` is one. See
            [`prepare_multimodal_messages`] for what an image may be and where it goes.
        processing_class (`PreTrainedTokenizerBase` or `ProcessorMixin`): A tokenizer for text, a processor for both.
        answers (sequence of sequences of `int`, *optional*): The target's own answer to each row, its end token
            included, instead of the row's last assistant turn.
        lengths (sequence of `int`, *optional*): Tokens of each example, for batches of similar length. Without them
            every example is built once, and dropped, when they are first asked for.

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
    ) -> None:
        if answers is not None and len(answers) != len(rows):
            raise ValueError(
                f"expected {len(rows)} answers (one per row), got {len(answers)}; [] stands for a prompt alone"
            )
        self.rows, self.processing_class, self.answers = rows, processing_class, answers
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each example."""
        if self._lengths is None:
            self._lengths = [len(self[index].input_ids) for index in range(len(self))]
        return self._lengths

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[at] for at in range(len(self))[index]]
        at = range(len(self))[index]
        try:
            return self._build(self.rows[at], None if self.answers is None else self.answers[at])
        except Exception as error:  # a file that is no image, a missing key: whatever it is, told with its row
            if isinstance(error, ValueError) and str(error).startswith("expected"):
                raise ValueError(f"{error} (row {at})") from error
            reason = f"{error}" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {error}"
            raise ValueError(
                f"expected a chat that can be read, got one with this: {reason}; fix it (row {at})"
            ) from error

    def _build(self, row: Mapping[str, Any], answer: Sequence[int] | None) -> Example:
        if "messages" not in row:
            raise ValueError(f"expected a row with messages, got one with {', '.join(row)}; name its chat messages")
        check_messages(row["messages"])
        images = row.get("images") if "images" in row else row.get("image")
        images = [] if images is None else list(images) if isinstance(images, (list, tuple)) else [images]
        messages = list(row["messages"])
        if answer is None:
            return Example.from_messages(self.processing_class, messages, images)
        template = ChatTemplate(self.processing_class)
        messages = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        prepared = template.messages(messages, images)
        encoded = template.encode(prepared, add_generation_prompt=True, return_tensors="pt")
        return Example.from_pair(encoded, answer)
