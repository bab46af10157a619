"""An answer as text: what its client sees of tokens that come one by one, parts of characters among them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from dflash_hf.serve.answers import TextReader
from helpers.processors import qwen_tokenizer

WORDS = ("\u2581", "\u2581a", "\u2581b", "a", "b", "\u2581hello", "\u00e9", "\u5b57", "\n")
EMOJI = "\U0001f600"


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of few words that writes other characters as tokens of single bytes, as Llama 2's does."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocabulary = {name: index for index, name in enumerate(names)}
    model = models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def tokens_of(tokenizer: Any, *parts: bytes | str) -> list[int]:
    """The tokens of words, and of bytes one by one."""
    names: list[str] = []
    for part in parts:
        if isinstance(part, str):
            names.append(part)
        else:
            names += [f"<0x{byte:02X}>" for byte in part]
    return tokenizer.convert_tokens_to_ids(names)


def read(tokenizer: Any, ids: list[int]) -> str:
    """What a client sees of an answer that comes token by token."""
    reader = TextReader(tokenizer, frozenset())
    return "".join(map(reader.add, ids)) + reader.end()


def whole_bytes(run: bytes) -> int:
    """How many bytes come before the first that is no part of a whole character."""
    try:
        run.decode()
    except UnicodeDecodeError as error:
        return error.start
    return len(run)


def seen(tokenizer: Any, ids: list[int]) -> str:
    """What there is to be seen: of a run of bytes the characters before the first broken one, then marks."""
    text = b""
    run = b""
    for name in [*tokenizer.convert_ids_to_tokens(ids), ""]:
        if name.startswith("<0x"):
            run += bytes([int(name[3:5], 16)])
            continue
        num_whole = whole_bytes(run)
        text += run[:num_whole] + "\ufffd".encode() * (len(run) - num_whole)
        text += name.replace("\u2581", " ").encode()
        run = b""
    return text.decode()


def test_a_broken_byte_behind_a_character_is_a_mark() -> None:
    tokenizer = byte_fallback_tokenizer()
    broken = tokens_of(tokenizer, EMOJI.encode(), b"\xf0", "\u2581a", "\u2581a")
    assert read(tokenizer, broken) == f"{EMOJI}\ufffd a a"
    assert read(tokenizer, broken[:5]) == f"{EMOJI}\ufffd"
    whole = tokens_of(tokenizer, EMOJI.encode(), EMOJI.encode(), "\u2581a")
    assert read(tokenizer, whole) == tokenizer.decode(whole) == f"{EMOJI}{EMOJI} a"


def test_any_bytes_are_read_as_far_as_they_are_characters() -> None:
    tokenizer = byte_fallback_tokenizer()
    pieces: list[bytes | str] = [*WORDS, EMOJI.encode(), b"\xc3\xa9", b"\xe5\xad\x97", b" "]
    num_broken = 0
    for seed in range(500):
        draw = random.Random(seed)
        parts: list[bytes | str] = ["a"]  # before it a space would have no text
        for _ in range(draw.randint(1, 12)):
            byte = bytes([draw.choice((0xF0, 0xC3, 0x80, draw.randrange(256)))])
            parts.append(draw.choice([draw.choice(pieces), draw.choice(pieces), byte]))
        ids = tokens_of(tokenizer, *parts)
        text = read(tokenizer, ids)
        assert text == seen(tokenizer, ids), parts
        decoded = tokenizer.decode(ids)
        num_broken += "\ufffd" in decoded
        assert "\ufffd" in decoded or text == decoded, parts
    assert 100 < num_broken < 400


@pytest.mark.parametrize(
    ("tokenizer", "ids"),
    [
        (qwen_tokenizer(), range(256)),
        (byte_fallback_tokenizer(), tokens_of(byte_fallback_tokenizer(), *WORDS)),
        (ByT5Tokenizer(), range(3, 259)),
    ],
    ids=["bytes", "words", "Python"],
)
def test_any_tokens_are_read_as_decode_reads_them(tokenizer: Any, ids: Sequence[int]) -> None:
    for seed in range(500):
        draw = random.Random(seed)
        drawn = draw.choices(ids, k=draw.randint(1, 12))
        assert read(tokenizer, drawn) == tokenizer.decode(drawn), drawn
