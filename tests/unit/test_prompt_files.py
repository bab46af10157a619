"""Files of prompts as the command line reads them: prompts, or one sentence that names the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_hf.cli.demo import read_prompts as read_held_out
from dflash_hf.cli.generate import read_prompt
from dflash_hf.data.prompt_files import (
    MAX_BYTES,
    MAX_PROMPTS,
    image_names,
    read_prompts,
    text_of,
    with_images,
    with_joined_texts,
)


def user(content: Any) -> dict[str, Any]:
    """A row of one turn."""
    return {"messages": [{"role": "user", "content": content}]}


def write(folder: Path, *rows: Any) -> Path:
    """A `.jsonl` of these rows; bytes and texts are written as they are."""
    file = folder / "p.jsonl"
    lines = [
        row if isinstance(row, bytes) else row if isinstance(row, str) else json.dumps(row)
        for row in rows
    ]
    file.write_bytes(
        b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
    )
    return file


BAD: list[tuple[Any, str]] = [
    ({"messages": [1, 2]}, "expected turns with role and content in line 2 of .*, got 1"),
    ({"messages": [{}]}, "expected a text as role of each turn in line 2"),
    ({"messages": [{"content": "x"}]}, "expected a text as role"),
    ({"messages": [{"role": 3, "content": "x"}]}, "expected a text as role .*, got 3"),
    ({"messages": [{"role": "user"}]}, "expected a text as content of each turn .*, got None"),
    (user(None), "expected a text as content"),
    (user([]), "expected content in each turn .*, got \\[\\]"),
    (user([7]), "expected parts of type text or image .*, got 7"),
    (user([{"type": "video", "path": "x"}]), "expected parts of type text or image"),
    (user([{"type": "text"}]), "expected a text as text of each part"),
    (user([{"type": "image"}]), "expected each part of type image .* to have one of"),
    (user([{"type": "image", "path": 7}]), "expected a text as path of each image .*, got 7"),
    (user("\ud800"), "expected a text of whole characters as content"),
    ({"messages": "hello"}, "expected messages, a list of turns"),
    ({"messages": {"role": "user"}}, "expected messages, a list of turns"),
    ({"prompt": 5}, "expected a text as prompt in line 2 of .*, got 5"),
    ({"prompt": "\ud800"}, "expected a text of whole characters as prompt"),
    ({"messages": []}, "expected messages or prompt in line 2"),
    ({"answer": "x" * 10**5}, "expected messages or prompt in line 2"),
    ({"prompt": [1] * 10**5}, "expected a text as prompt"),
    ([1, 2], r"expected a JSON object in line 2 of .*, got \[1, 2\]"),
    ("[" * 10**5, "expected JSON in line 2"),
    ('{"prompt": ' + "9" * 5000 + "}", "expected JSON in line 2"),
    ("{", "expected JSON in line 2"),
    (b"\xff\xfe", "expected UTF-8 in "),
    (b'{"prompt": "\xed\xa0\x80"}', "expected UTF-8 in "),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_rows_that_ask_nothing(row: Any, message: str, tmp_path: Path) -> None:
    file = write(tmp_path, {"prompt": "fine", "kind": "a"}, row)
    for read in (read_prompts, lambda file: read_held_out(file, 8)):
        with pytest.raises(ValueError, match=f"^{message}.*; ") as caught:
            read(file)
        assert len(str(caught.value)) < 1000
        assert str(caught.value).isprintable()


def test_what_is_read(tmp_path: Path) -> None:
    parts = [
        {"type": "image", "path": "a.png"},
        {"type": "image", "url": "https://x/b.png"},
        {"type": "text", "text": ""},
    ]
    file = write(
        tmp_path,
        b'\xef\xbb\xbf{"prompt": "one"}',
        "",
        "  ",
        '{"prompt": "a\u2028b"}\r',
        user(parts),
    )
    first, second, third = read_prompts(file)
    assert (first, second) == ("one", "a\u2028b")
    assert image_names(third) == ["a.png", "b.png"]
    assert text_of(third) == ""
    assert not isinstance(third, str)
    assert third[0]["content"][0]["path"] == str(tmp_path / "a.png")


def test_a_name_that_is_too_long_for_a_path_is_no_file() -> None:
    """Python 3.11 raises for it where it looks for a file."""
    file = Path("a" * 300)
    with pytest.raises(ValueError, match=r"^expected an image file, got .*; fix the path$"):
        with_images("q", [file])
    with pytest.raises(ValueError, match=r"^expected a file of prompts .*; fix the path$"):
        read_prompts(file)
    with pytest.raises(ValueError, match=r"^expected a file with the prompt .*; correct the path$"):
        read_prompt(None, file)


def test_files_that_are_too_large(tmp_path: Path) -> None:
    """As much as that of `[],` would take 20 times its size in memory."""
    file = tmp_path / "p.txt"
    file.write_bytes(b"x" * (MAX_BYTES + 1))
    with pytest.raises(
        ValueError, match=r"^expected a file of prompts of at most 16 MB, got .* with 16; use fewer"
    ):
        read_prompts(file)
    file.write_bytes(b"x\n" * (MAX_PROMPTS + 1))
    with pytest.raises(
        ValueError, match=rf"^expected at most {MAX_PROMPTS} lines in .*; use fewer prompts"
    ):
        read_prompts(file)
    file.write_bytes(b"\n \n")
    with pytest.raises(ValueError, match=r"^expected prompts in .*, got none; write one per line"):
        read_prompts(file)


def test_texts_of_a_turn_are_lines() -> None:
    """Each text is a line of its own, as for a server, whoever reads the turn."""
    parts = [{"type": "text", "text": text} for text in ("Compute 41", "+ 80.")]
    (turn,) = with_joined_texts(user(parts)["messages"])
    assert turn["content"] == text_of(user(parts)["messages"]) == "Compute 41\n+ 80."


def test_a_turn_of_calls_alone_is_read_as_openai_has_it(tmp_path: Path) -> None:
    """It says nothing, and the arguments of its calls are a text of JSON, which templates take as an object."""
    asked = {"role": "user", "content": "3 + 4?"}
    result = {"role": "tool", "content": "7"}
    call = {"role": "assistant", "content": None}
    call["tool_calls"] = [{"function": {"name": "add", "arguments": '{"a": 3}'}}]
    (prompt,) = read_prompts(write(tmp_path, {"messages": [asked, call, result]}))
    calls = [{"function": {"name": "add", "arguments": {"a": 3}}}]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    assert prompt == [asked, said, result]
    del call["content"]
    assert read_prompts(write(tmp_path, {"messages": [asked, call, result]})) == [prompt]
    call["tool_calls"] = [{"function": {"name": "add", "arguments": "3"}}]
    with pytest.raises(ValueError, match="an object as the arguments of a call in line 1 of "):
        read_prompts(write(tmp_path, {"messages": [asked, call, result]}))
