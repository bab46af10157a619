"""This module encodes chats with images and videos, and finds the tokens that the assistant has written.

Any processor with a chat template works. No model family is treated specially. Shapes: `S` tokens.
"""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from os import PathLike, fspath
from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import chat_template_utils

from dflash_hf.data.prompt_files import (
    SOURCES,
    check_template_options,
    with_joined_texts,
    with_read_calls,
)
from dflash_hf.errors import one_line, require, shown
from dflash_hf.processing_qwen3_vl import check_pixels
from dflash_hf.training.masks import (
    MARKS,
    answer_spans,
    assistant_turns,
    token_mask,
    turns_to_train,
)

FIX = "fix the row"
PLACE = "@@place@@"  # a text that no template contains
DAY = "strftime_now"  # the function with which templates write the day in Transformers
DATE = "prompt_date"  # the key of the day in a row
# The parts of a `strftime` format that are replaced. The time is 0:00.
PARTS = [f"%{pad}{letter}" for pad in ("-", "") for letter in "aAbBcdeFHIjmMpSuUwWxXyYZ"]
# A tokenizer for text, or a processor for text and images
Processing = PreTrainedTokenizerBase | ProcessorMixin


def check_messages(messages: Any) -> None:
    """Raises `ValueError` if `messages` is no conversation. A chat template would raise a less clear error."""
    form = 'messages as a list of turns like {"role": "user", "content": "..."}'
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        kind = type(messages).__name__
        raise ValueError(f"expected {form}, got {kind} {shown(messages)}; put it into a turn")
    turns: Sequence[Any] = messages
    if not turns:
        raise ValueError(f"expected {form}, got none; leave the row out")
    for at, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            got = f"{type(turn).__name__} {shown(turn)} as turn {at}"
            raise ValueError(f"expected {form}, got {got}; give its role and content")
        if "role" not in turn:  # a turn of tool calls has no content
            raise ValueError(f"expected {form}, got turn {at} without a role; add it")


def today() -> str:
    """Returns today's date in the form of a row's `prompt_date`."""
    return datetime.now().date().isoformat()


def template_options(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a row's [`ChatTemplate`]: its `chat_template_kwargs` and its `prompt_date`.

    A template that writes today's date would write another prompt on each day. The target's answer belongs to the
    prompt with the date of the row.
    """
    options = dict(row.get("chat_template_kwargs") or {})
    if row.get(DATE):
        options[DATE] = row[DATE]
    return options


def names_in(template: str) -> set[str]:
    """Returns the names of the variables that a chat template reads.

    Raises:
        ValueError: If Jinja cannot read the template.
    """
    from jinja2 import TemplateError

    # The function is private in Transformers. If a release does not have it, all words of the template count as names.
    variables_of: Any = getattr(chat_template_utils, "_get_template_variables", None)
    if variables_of is None:
        return set(re.findall(r"\w+", template))
    try:
        return set(variables_of(template))
    except TemplateError as error:
        raise ValueError(
            f"expected a chat template that Jinja reads, got an error in it ({one_line(error)}); correct it"
        ) from error


def _of_day(template: str, date: str) -> str:
    """Returns a template that writes `date` as today's date. Transformers accepts no replacement for the function."""
    day = datetime.fromisoformat(date)
    # Not every system supports numbers without padding (`%-d`), so these parts are used only if the template has them.
    parts = [part for part in PARTS if part in template or not part.startswith("%-")]
    written = [f".replace({json.dumps(part)}, {json.dumps(day.strftime(part))})" for part in parts]
    macro = f"{{%- macro {DAY}(format) -%}}{{{{ format{''.join(written)} }}}}{{%- endmacro %}}"
    # Jinja drops the first newline after a block, so the template still begins at the start of a line.
    return f"{macro}\n{template}"


def prepare_multimodal_messages(
    messages: Sequence[Mapping[str, Any]], images: Sequence[Any]
) -> list[dict[str, Any]]:
    """Returns messages whose contents are lists of blocks, with every image in its turn.

    Name and behaviour are the same as in TRL. Plain strings become text blocks. Blocks `{"type": "image"}` without an
    image of their own take the `images` in order. If there is no image block, the `images` are put before the text of
    the first user turn. Blocks `{"type": "video"}` have a video of their own: a path, a URL or frames. Keys with the
    value `None`, with which tables are filled, are left out.

    Args:
        messages (sequence of mappings): Mappings with `role` and `content`, which is a string or a list of blocks.
            They are not changed.
        images (sequence): Images that a processor accepts (PIL image, array, path, URL), or mappings with `bytes` or
            `path`, as the `datasets` library returns undecoded images.

    Raises:
        ValueError: If the number of images is not the number of places for them, or an image has no pixels.
    """
    prepared: list[dict[str, Any]] = []
    places: list[dict[str, Any]] = []
    for message in messages:
        blocks = _blocks(message.get("content"))
        places += [block for block in blocks if block["type"] == "image"]
        for block in blocks:
            # Processors accept paths only as strings.
            if block["type"] == "video" and isinstance(block.get("video"), PathLike):
                block["video"] = fspath(block["video"])
        prepared.append({**message, "content": blocks})
    from_users = [message for message in prepared if message["role"] == "user"]
    if images and not places and from_users:
        places = [{"type": "image"} for _ in images]
        from_users[0]["content"] = [*places, *from_users[0]["content"]]
    empty = [block for block in places if not any(key in block for key in SOURCES)]
    if len(empty) != len(images):
        raise ValueError(
            f"expected as many images as image blocks without one of their own ({len(empty)}), got {len(images)}; "
            "give every image its place in the messages"
        )
    for block, image in zip(empty, images, strict=True):
        block["image"] = image
    for block in places:
        block.update({key: _as_source(block[key]) for key in SOURCES if key in block})
    return prepared


def _blocks(content: Any) -> list[dict[str, Any]]:
    """Returns the content of a turn as new blocks, without keys whose value is `None`."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [
        {key: value for key, value in block.items() if value is not None} for block in content or ()
    ]


def _as_source(image: Any) -> Any:
    """Returns an image in a form that processors accept: a path as a string, undecoded bytes in base64."""
    check_pixels(image)
    if isinstance(image, Mapping):
        if image.get("bytes") is not None:
            return base64.b64encode(image["bytes"]).decode()
        image = image["path"]
    if isinstance(image, PathLike):
        return fspath(image)
    return image


class ChatTemplate:
    """The chat template of a tokenizer or a processor. It converts messages into text and tokens.

    Args:
        processing_class (`PreTrainedTokenizerBase` or `ProcessorMixin`): A tokenizer for text, or a processor for text
            and images.
        options (mapping, *optional*): Further variables that the template reads, such as `enable_thinking` and
            `tools`. `prompt_date` is the day that the template writes as today's date.

    Raises:
        ValueError: If there is no template, or an option has a reserved name (see `check_template_options`).
    """

    def __init__(
        self,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.processing_class = processing_class
        self.options = dict(options or {})
        check_template_options(self.options)
        date = self.options.pop(DATE, "")
        inner = getattr(processing_class, "tokenizer", None)
        self.is_processor = inner is not None
        self.tokenizer: Any = processing_class
        if self.is_processor:
            self.tokenizer = inner
        # In some folders, only the tokenizer has the template.
        found = getattr(processing_class, "chat_template", None) or self.tokenizer.chat_template
        if isinstance(found, dict):
            name = "tool_use" if self.options.get("tools") else "default"
            found = found.get(name, found.get("default"))
        if not found:
            raise ValueError(
                f"expected a chat template, got a {type(processing_class).__name__} without one; take an instruct "
                "model, or set chat_template"
            )
        self.text: str = found
        if date:
            self.text = _of_day(found, date)

    def check_options(self) -> None:
        """Refuses options that the template does not read, because Jinja silently accepts a misspelt name.

        Raises:
            ValueError: If the template does not read an option, or if Jinja cannot read the template.
        """
        if not self.options:
            return
        names = names_in(self.text)
        for name in self.options:
            what = "chat_template_kwargs that the chat template reads"
            require(name in names, what, name, "correct the name, or leave it out")

    @property
    def has_day(self) -> bool:
        """True if the template may write today's date."""
        return DAY in self.text

    @property
    def is_marked(self) -> bool:
        """True if the template marks the assistant's text with `{% generation %}`."""
        return MARKS.search(self.text) is not None

    def messages(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[Any]
    ) -> list[dict[str, Any]]:
        """Returns messages in the form that the template accepts. See [`prepare_multimodal_messages`] for a processor.

        For a tokenizer, the text blocks of a content are joined into one text. Raises `ValueError` if a tokenizer gets
        images.
        """
        messages = [with_read_calls(message) for message in messages]
        if self.is_processor:
            return prepare_multimodal_messages(messages, images)
        if images:
            raise ValueError(
                f"expected a processor for messages with images, got {type(self.processing_class).__name__}; "
                "load it with AutoProcessor"
            )
        return with_joined_texts(messages)

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False
    ) -> str:
        """Returns the text of messages, with one placeholder for each image."""
        conversation: Any = list(messages)
        return self.tokenizer.apply_chat_template(
            conversation,
            chat_template=self.text,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self.options,
        )

    def tokens(self, text: str) -> list[int]:
        """Returns the tokens of a rendered text."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def encode(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        """Returns the tokenizer's or processor's output for messages, which is the target's input."""
        conversation: Any = list(messages)
        return self.processing_class.apply_chat_template(
            conversation,
            chat_template=self.text,
            tokenize=True,
            return_dict=True,
            **options,
            **self.options,
        )

    def around(self, role: str) -> tuple[str, str]:
        """Returns the template's text before and after the content of a first user turn, or of the answer to it."""
        messages = [{"role": "user", "content": PLACE}]
        if role == "assistant":
            messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": PLACE}]
        if self.is_processor:
            messages = prepare_multimodal_messages(messages, [])
        before, place, behind = self.render(messages).partition(PLACE)
        what = f"a chat template that writes turns of role {role}"
        require(bool(place), what, "one that does not", "use another chat template")
        return before, behind

    def end_of_turn(self, role: str) -> list[int]:
        """Returns the special tokens after the content of a turn. The first of them ends the turn."""
        special = {self.tokenizer.convert_tokens_to_ids(text) for text in self.ends()}
        return [token for token in self.tokens(self.around(role)[1]) if token in special]

    def ends(self) -> list[str]:
        """Returns the texts of the tokens that can end a turn. These are all special tokens."""
        added = self.tokenizer.added_tokens_decoder.values()
        return sorted(
            {*self.tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
        )


def encode_messages(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    images: Sequence[Any],
    turns: Sequence[int] | None,
) -> tuple[Mapping[str, Any], list[int]]:
    """Applies the chat template to a conversation, and finds the assistant's tokens (see `Example.from_messages`).

    Some templates mark the assistant's text with `{% generation %}`. For other templates, see
    [`dflash_hf.training.masks`]. The mask is for the tokens after images and videos are expanded to many tokens.

    Returns:
        `tuple[Mapping[str, Any], list[int]]`: The output of the tokenizer or processor, and a list with 1 for each of
        the `S` tokens that the assistant has written and 0 for the others. If the template marks nothing, the
        conversation is cut after the last turn that counts.
    """
    prepared = template.messages(messages, images)
    every = assistant_turns(prepared)
    chosen = turns_to_train(prepared)
    if turns is not None:
        chosen = list(turns)
    is_good = bool(chosen) and chosen == [turn for turn in every if turn in chosen]
    require(is_good, "turns of the assistant's", chosen, "leave the row out, or name others")
    if template.is_marked:
        plain = template.tokenizer.apply_chat_template(
            prepared,
            chat_template=template.text,
            return_assistant_tokens_mask=True,
            return_dict=True,
            **template.options,
        )
        mask = list(plain["assistant_masks"])
        if chosen != every and any(mask):
            mask = _chosen(mask, every, chosen)
    else:
        prepared = prepared[: chosen[-1] + 1]
        plain, mask = _located(template, prepared, chosen)
    if not any(mask):
        raise ValueError(
            "expected a chat template with {% generation %} around assistant turns, got one that marks nothing; "
            "add the markers or build the example with Example.from_pair"
        )
    if not template.is_processor:
        return plain, mask
    encoded = template.encode(prepared, return_tensors="pt")
    return encoded, _laid(template, encoded["input_ids"][0].tolist(), plain, mask)


def _located(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], turns: Sequence[int]
) -> tuple[Mapping[str, Any], list[int]]:
    """Returns the tokens and the mask of messages whose template does not mark the assistant's text."""
    what = "a fast tokenizer, which says where its tokens stand,"
    kind = type(template.tokenizer).__name__
    require(template.tokenizer.is_fast, what, kind, "load it with use_fast=True")
    spans = answer_spans(template.render, messages, turns, template.ends())
    encoded = template.tokenizer(
        template.render(messages),
        add_special_tokens=False,
        return_offsets_mapping=True,
        verbose=False,
    )
    return encoded, token_mask(encoded["offset_mapping"], spans)


def _chosen(mask: list[int], every: Sequence[int], turns: Sequence[int]) -> list[int]:
    """Returns a mask that keeps only the marked runs of the chosen turns."""
    found = itertools.groupby(range(len(mask)), mask.__getitem__)
    runs = [list(run) for marked, run in found if marked]
    what = f"as many marks as answers ({len(every)}) where some of them do not count"
    action = "have all answers count (by turns and weight), or leave the row out"
    require(len(runs) == len(every), what, len(runs), action)
    chosen = [0] * len(mask)
    for run, turn in zip(runs, every, strict=True):
        if turn in turns:
            chosen[run[0] : run[-1] + 1] = [1] * len(run)
    return chosen


def _laid(
    template: ChatTemplate, ids: list[int], plain: Mapping[str, Any], mask: Sequence[int]
) -> list[int]:
    """Transfers the mask of a text's tokens to `ids`, the same tokens after images and videos have been expanded.

    The pieces of text between the images and videos are found from the last one to the first, each as far to the right
    as it fits. A piece that is not found whole is found without the text at its ends.
    """
    processor: Any = template.processing_class
    name = type(processor).__name__
    tokens = list(plain["input_ids"])
    written = [getattr(processor, kind, None) for kind in ("image_token", "video_token")]
    placeholders = {
        template.tokenizer.convert_tokens_to_ids(token) for token in written if token is not None
    }
    special = {template.tokenizer.convert_tokens_to_ids(text) for text in template.ends()}
    aligned = [0] * len(ids)
    stop = len(ids)
    places = [at for at, token in enumerate(tokens) if token in placeholders]
    starts = [0, *(at + 1 for at in places)]
    ends = [*places, len(tokens)]
    for start, end in zip(reversed(starts), reversed(ends), strict=True):
        # Gemma's processor writes newlines around an image, and its tokenizer merges them with those of the text. It
        # merges nothing across a special token.
        kept = [at for at in range(start, end) if mask[at] or tokens[at] in special]
        if not kept:
            continue
        at = _last_place(tokens[start:end], ids[:stop])
        if at < 0:
            start = kept[0]
            end = kept[-1] + 1
            at = _last_place(tokens[start:end], ids[:stop])
        if at < 0:
            raise ValueError(
                f"expected {name} to keep the answers' tokens where it expands images and videos, got a "
                "text in which they cannot be found; build the example with Example.from_pair"
            )
        aligned[at : at + end - start] = mask[start:end]
        stop = at
    return aligned


def _last_place(piece: list[int], ids: list[int]) -> int:
    """Returns the last index at which a piece begins in some ids, or -1."""
    for at in range(len(ids) - len(piece), -1, -1):
        if ids[at : at + len(piece)] == piece:
            return at
    return -1
