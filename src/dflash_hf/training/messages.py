"""Chats with images as a processor takes them, and which of their tokens are the assistant's.

Any processor with a chat template works; nothing here knows a family. Shapes: `S` tokens.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from dflash_hf.errors import shown
from dflash_hf.evaluation.prompt_files import SOURCES
from dflash_hf.processing_qwen3_vl import check_pixels


def check_messages(messages: Any) -> None:
    """Refuses what is no conversation, in a sentence, before a chat template does in its own way.

    Args:
        messages: What should be a sequence of mappings with `role` and mostly `content`.

    Raises:
        ValueError: If it is none, or has no turn.
    """
    form = 'a list of turns like {"role": "user", "content": "..."}'
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ValueError(f"expected messages as {form}, got {_kind(messages)}; put it into a turn")
    turns: Sequence[Any] = messages
    if not turns:
        raise ValueError(f"expected messages as {form}, got none; leave the row out")
    for at, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise ValueError(f"expected messages as {form}, got {_kind(turn)} as turn {at}; give its role and content")
        if "role" not in turn:  # a turn of tool calls has no content
            raise ValueError(f"expected messages as {form}, got turn {at} without a role; add it")


def _kind(value: Any) -> str:
    """What a value is, and itself, in part where it is long."""
    return f"{type(value).__name__} {shown(value)}"


def prepare_multimodal_messages(messages: Sequence[Mapping[str, Any]], images: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns messages whose contents are lists of blocks, every image in the turn it belongs to.

    Name and behaviour are TRL's: plain strings become text blocks; blocks `{"type": "image"}` without an image of
    their own take `images` in order; where there is no image block at all, `images` go before the text of the first
    user turn. Keys whose value is `None` (tables fill up with them) are left out.

    Args:
        messages (sequence of mappings): `role` and `content`, a string or a list of blocks; not changed.
        images (sequence): What a processor takes as an image (PIL image, array, path, URL), or a mapping with `bytes`
            or `path`, as the `datasets` library gives undecoded images.

    Raises:
        ValueError: If there are not as many images as places for them, or one has no pixels.
    """
    prepared: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        blocks = [{key: value for key, value in block.items() if value is not None} for block in blocks]
        prepared.append({**message, "content": blocks})
    places = [block for message in prepared for block in message["content"] if block["type"] == "image"]
    first_user = next((message for message in prepared if message["role"] == "user"), None)
    if images and not places and first_user is not None:
        places = [{"type": "image"} for _ in images]
        first_user["content"] = [*places, *first_user["content"]]
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


def _as_source(image: Any) -> Any:
    """An image as processors take it: paths as strings, undecoded bytes in base64; refused without pixels."""
    check_pixels(image)
    if isinstance(image, Mapping):
        image = base64.b64encode(image["bytes"]).decode() if image.get("bytes") is not None else image["path"]
    return fspath(image) if isinstance(image, PathLike) else image


def encode_messages(
    processing_class: PreTrainedTokenizerBase | ProcessorMixin,
    messages: Sequence[Mapping[str, Any]],
    images: Sequence[Any] = (),
) -> tuple[Mapping[str, Any], list[int]]:
    """Applies the chat template to a whole conversation.

    The mask holds after images are expanded to many tokens: its answers are those that the tokenizer alone marks.

    Args:
        processing_class (`PreTrainedTokenizerBase` or `ProcessorMixin`): A tokenizer for text, a processor for both.
        messages, images: See [`prepare_multimodal_messages`].

    Returns:
        `tuple[Mapping[str, Any], list[int]]`: What the tokenizer or processor gives, and 1 for each of the `S` tokens
        that the assistant writes, else 0.

    Raises:
        ValueError: If there are images and no processor, not as many images as places, or the template does not
            mark what the assistant writes.
    """
    tokenizer = getattr(processing_class, "tokenizer", None)
    if tokenizer is None:
        if images:
            raise ValueError(
                f"expected a processor for messages with images, got {type(processing_class).__name__}; "
                "load it with AutoProcessor"
            )
        encoded: Any = processing_class.apply_chat_template(
            [dict(message) for message in messages], return_assistant_tokens_mask=True, return_dict=True
        )
        return encoded, _checked(list(encoded["assistant_masks"]))
    prepared = prepare_multimodal_messages(messages, images)
    template = getattr(processing_class, "chat_template", None)
    if isinstance(template, dict):
        template = template["default"]
    # The text before the images are expanded.
    plain = tokenizer.apply_chat_template(
        prepared, chat_template=template, return_assistant_tokens_mask=True, return_dict=True
    )
    _checked(plain["assistant_masks"])
    encoded = processing_class.apply_chat_template(
        prepared, tokenize=True, return_dict=True, return_tensors="pt", return_assistant_tokens_mask=True
    )
    ids: list[int] = encoded["input_ids"][0].tolist()
    mask: list[int] = torch.as_tensor(encoded["assistant_masks"], device="cpu")[0].tolist()
    if _answers(ids, mask) == _answers(plain["input_ids"], plain["assistant_masks"]):
        return encoded, mask
    # Older Transformers shift the mask by what the images added.
    place = tokenizer.convert_tokens_to_ids(getattr(processing_class, "image_token", None))
    aligned = _aligned(ids, list(plain["input_ids"]), list(plain["assistant_masks"]), place)
    if aligned is None:
        raise ValueError(
            f"expected {type(processing_class).__name__} to keep the answers' tokens where it expands images, got a "
            "text in which they cannot be found; build the example with Example.from_pair"
        )
    return encoded, aligned


def _checked(mask: list[int]) -> list[int]:
    """Refuses a mask that marks nothing."""
    if not any(mask):
        raise ValueError(
            "expected a chat template with {% generation %} around assistant turns, got one that marks nothing; "
            "add the markers or build the example with Example.from_pair"
        )
    return mask


def _answers(ids: Sequence[int], mask: Sequence[int]) -> list[list[int]]:
    """The tokens of each run of ones."""
    runs: list[list[int]] = []
    for at, (token, marked) in enumerate(zip(ids, mask, strict=True)):
        if marked and (at == 0 or not mask[at - 1]):
            runs.append([])
        if marked:
            runs[-1].append(token)
    return runs


def _aligned(ids: list[int], plain: list[int], mask: list[int], place: int | None) -> list[int] | None:
    """The mask of `plain` laid over `ids`, which is `plain` with each `place` replaced by an image's tokens.

    The pieces of text between images are found from the last one to the first, each as far right as it fits.
    """
    aligned = [0] * len(ids)
    stop = len(ids)
    places = [at for at, token in enumerate(plain) if token == place]
    for start, end in reversed(list(zip([0, *(at + 1 for at in places)], [*places, len(plain)], strict=True))):
        piece = plain[start:end]
        at = next((at for at in range(stop - len(piece), -1, -1) if ids[at : at + len(piece)] == piece), None)
        if at is None:
            return None
        aligned[at : at + len(piece)] = mask[start:end]
        stop = at
    return aligned


__all__ = ["check_messages", "encode_messages", "prepare_multimodal_messages"]
