"""Chats with images and videos as a processor takes them, and which of their tokens are the assistant's.

Any processor with a chat template works; nothing here knows a family. Shapes: `S` tokens.
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
PLACE = "@@place@@"  # a text that no template has
DAY = "strftime_now"  # what Transformers has templates write the day with
DATE = "prompt_date"  # in a row
# Of a day's format, as `strftime` reads them; the time is 0:00
PARTS = [f"%{pad}{letter}" for pad in ("-", "") for letter in "aAbBcdeFHIjmMpSuUwWxXyYZ"]
# A tokenizer for text, a processor for text and images
Processing = PreTrainedTokenizerBase | ProcessorMixin


def check_messages(messages: Any) -> None:
    """Raises `ValueError` for what is no conversation, in a sentence, before a chat template does in its own way."""
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
    """Returns the date of today, as the `prompt_date` of a row has it."""
    return datetime.now().date().isoformat()


def template_options(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a row's [`ChatTemplate`]: its `chat_template_kwargs`, and its `prompt_date` as today.

    A template that writes the day would write another prompt on each day, behind which the answer is not the target's.
    """
    options = dict(row.get("chat_template_kwargs") or {})
    if row.get(DATE):
        options[DATE] = row[DATE]
    return options


def names_in(template: str) -> set[str]:
    """Returns the names that a chat template reads, of what it is rendered with.

    Raises:
        ValueError: If the template is not one of Jinja's.
    """
    from jinja2 import TemplateError

    # It has no public name in Transformers. Where a release has no such function, all words of the template count.
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
    """A template that writes a day of then as today's: Transformers takes no functions beside the messages."""
    day = datetime.fromisoformat(date)
    # Not every system writes numbers without padding: such a part is asked for only where the template has it
    parts = [part for part in PARTS if part in template or not part.startswith("%-")]
    written = [f".replace({json.dumps(part)}, {json.dumps(day.strftime(part))})" for part in parts]
    macro = f"{{%- macro {DAY}(format) -%}}{{{{ format{''.join(written)} }}}}{{%- endmacro %}}"
    # The first end of line behind a block is left out, so that the template begins at the start of a line
    return f"{macro}\n{template}"


def prepare_multimodal_messages(
    messages: Sequence[Mapping[str, Any]], images: Sequence[Any]
) -> list[dict[str, Any]]:
    """Returns messages whose contents are lists of blocks, with every image in its turn.

    Name and behaviour are TRL's. Plain strings become text blocks. Blocks `{"type": "image"}` without an image of
    their own take `images` in order. If there is no image block, `images` go before the text of the first user turn.
    Blocks `{"type": "video"}` have a video of their own, as a path, a URL or frames. Keys whose value is `None`
    (tables fill up with them) are left out.

    Args:
        messages (sequence of mappings): `role` and `content`, a string or a list of blocks; not changed.
        images (sequence): What a processor takes as an image (PIL image, array, path, URL), or a mapping with `bytes`
            or `path`, as the `datasets` library gives undecoded images.

    Raises:
        ValueError: If there are not as many images as places for them, or one has no pixels.
    """
    prepared: list[dict[str, Any]] = []
    places: list[dict[str, Any]] = []
    for message in messages:
        blocks = _blocks(message.get("content"))
        places += [block for block in blocks if block["type"] == "image"]
        for block in blocks:
            # Processors open files by texts.
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
    """What a turn says as new blocks, without keys whose value is `None`."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [
        {key: value for key, value in block.items() if value is not None} for block in content or ()
    ]


def _as_source(image: Any) -> Any:
    """An image as processors take it: paths as strings, undecoded bytes in base64; refused without pixels."""
    check_pixels(image)
    if isinstance(image, Mapping):
        if image.get("bytes") is not None:
            return base64.b64encode(image["bytes"]).decode()
        image = image["path"]
    if isinstance(image, PathLike):
        return fspath(image)
    return image


class ChatTemplate:
    """The chat template of a tokenizer or a processor, which makes text of messages.

    Args:
        processing_class (`PreTrainedTokenizerBase` or `ProcessorMixin`): A tokenizer for text, a processor for both.
        options (mapping, *optional*): What else the template reads: `enable_thinking`, `tools` ...; and `prompt_date`,
            the day that it writes as today's.

    Raises:
        ValueError: If there is no template, or an option has a name of what fills it.
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
        # Some folders have the template beside the tokenizer alone.
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
        """Refuses options that the template does not read: Jinja takes a name that is misspelt without a word.

        Raises:
            ValueError: On the first of them, or if the template is not one of Jinja's.
        """
        if not self.options:
            return
        names = names_in(self.text)
        for name in self.options:
            what = "chat_template_kwargs that the chat template reads"
            require(name in names, what, name, "correct the name, or leave it out")

    @property
    def has_day(self) -> bool:
        """Whether it may write the day of today."""
        return DAY in self.text

    @property
    def is_marked(self) -> bool:
        """Whether it says itself what the assistant writes."""
        return MARKS.search(self.text) is not None

    def messages(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[Any]
    ) -> list[dict[str, Any]]:
        """Returns messages as it takes them, images in their places; see [`prepare_multimodal_messages`].

        For a tokenizer a content of only blocks of text is one text.
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
        """Returns the text of messages, each image one placeholder."""
        conversation: Any = list(messages)
        return self.tokenizer.apply_chat_template(
            conversation,
            chat_template=self.text,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self.options,
        )

    def tokens(self, text: str) -> list[int]:
        """Returns the tokens of such a text."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def encode(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        """Returns what the tokenizer or processor makes of messages: the target's inputs."""
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
        """Returns what stands before and behind the text of a first turn of the user's, or of the answer to one."""
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
        """Returns the special tokens behind a turn: the first one ends it."""
        special = {self.tokenizer.convert_tokens_to_ids(text) for text in self.ends()}
        return [token for token in self.tokens(self.around(role)[1]) if token in special]

    def ends(self) -> list[str]:
        """Returns the texts of the tokens that can end a turn: the special ones."""
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
    """Applies the chat template to a conversation, and finds what the assistant writes: see `Example.from_messages`.

    Templates that mark it with `{% generation %}` say so themselves; of others see [`dflash_hf.training.masks`]. The
    mask holds after images and videos are expanded to many tokens.

    Returns:
        `tuple[Mapping[str, Any], list[int]]`: What the tokenizer or processor gives, and 1 for each of the `S` tokens
        that the assistant writes, else 0. Where nothing is marked `S` ends with the last turn that counts.
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
    """Tokens and mask of messages whose template marks nothing."""
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
    """The runs of a mask that belong to some of the assistant's turns."""
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
    """The mask of a text's tokens laid over `ids`, which are the same with the place of each image and video expanded.

    The pieces of text between these places are found from the last one to the first, each as far right as it fits.
    """
    processor: Any = template.processing_class
    name = type(processor).__name__
    tokens = list(plain["input_ids"])
    written = [getattr(processor, kind, None) for kind in ("image_token", "video_token")]
    placeholders = {
        template.tokenizer.convert_tokens_to_ids(token) for token in written if token is not None
    }
    aligned = [0] * len(ids)
    stop = len(ids)
    places = [at for at, token in enumerate(tokens) if token in placeholders]
    starts = [0, *(at + 1 for at in places)]
    ends = [*places, len(tokens)]
    for start, end in zip(reversed(starts), reversed(ends), strict=True):
        piece = tokens[start:end]
        at = _last_place(piece, ids[:stop])
        if at < 0:
            raise ValueError(
                f"expected {name} to keep the answers' tokens where it expands images and videos, got a "
                "text in which they cannot be found; build the example with Example.from_pair"
            )
        aligned[at : at + len(piece)] = mask[start:end]
        stop = at
    return aligned


def _last_place(piece: list[int], ids: list[int]) -> int:
    """Where a piece stands in some ids for the last time; -1 where it does not."""
    for at in range(len(ids) - len(piece), -1, -1):
        if ids[at : at + len(piece)] == piece:
            return at
    return -1
