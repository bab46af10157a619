"""The command line on 200 mutated flags and files: each is answered or refused in a sentence, none by a stack trace.

Nothing is drawn anew from run to run: the seed of a case is its number.
"""

from __future__ import annotations

import functools
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from dflash_hf.cli.main import app
from dflash_hf.pair import loading
from helpers.source_tree import ROOT

TOY = ROOT / "demos" / "toy"
JUNK = (
    *(
        "",
        " ",
        "-1",
        "0",
        "1",
        "7",
        "nan",
        "inf",
        "-inf",
        "1e400",
        "0x10",
        "٣",
        "9" * 50,
        "1.5",
        "true",
        "None",
        "null",
    ),
    *(
        "auto",
        "x",
        "x" * 5000,
        "[",
        "{}",
        '{"a": 1}',
        "[[[",
        "\x00",
        "\n",
        "\udcff",
        "🦜",
        "--",
        "-",
        "~",
        "..",
        "a/b",
    ),
    *(
        "/dev/null",
        "/nowhere",
        "a/b/c",
        "cuda:99",
        "cpu:3",
        "meta",
        "float16",
        "dflash",
        "%s",
        "[bold]",
        "\x1b[31m",
    ),
)
COMMANDS = (
    "generate",
    "doctor",
    "demo",
    "chat",
    "inspect",
    "drafts",
    "convert",
    "push",
    "bench",
    "bench prepare",
)
FLAGS, PROMPTS, DRAFTS, TARGETS = 110, 40, 30, 20


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends a command where it would load a model: what comes before it is what refuses."""

    def stop(what: str, *_: Any) -> None:
        raise ValueError(f"expected nothing, got as far as {what}; enough")

    monkeypatch.setattr(loading, "loaded", stop)
    monkeypatch.setattr("dflash_hf.bench.run.run", lambda settings: stop("bench"))
    monkeypatch.setattr("dflash_hf.bench.prepare.prepare", lambda *a, **k: stop("prepare"))
    monkeypatch.setattr("huggingface_hub.HfApi", None)


def assert_sentence(result: Result, case: object) -> None:
    assert result.exit_code in (0, 2), (
        case,
        result.exit_code,
        result.output[-2000:],
        result.exception,
    )
    assert "Traceback" not in result.output, (case, result.output)
    assert isinstance(result.exception, SystemExit | None), (case, result.exception)


@functools.cache
def options_of(path: str) -> list[str]:
    command: Any = typer.main.get_command(app)
    for name in path.split():
        command = command.commands[name]
    flags = [
        parameter.opts[0] for parameter in command.params if parameter.opts[0].startswith("--")
    ]
    return [flag for flag in flags if flag not in ("--help", "--web")]


def command_lines() -> Iterator[list[str]]:
    for case in range(FLAGS):
        chance = random.Random(case)
        path = chance.choice(COMMANDS)
        line = [*path.split(), *chance.choices(JUNK, k=chance.choice((0, 1, 1, 2)))]
        for flag in chance.choices(options_of(path), k=chance.choice((1, 1, 2, 3))):
            line += [flag] if chance.random() < 0.1 else [flag, chance.choice(JUNK)]
        yield line


@pytest.mark.usefixtures("nothing_is_loaded")
def test_mutated_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for line in command_lines():
        assert_sentence(CliRunner().invoke(app, line), line)


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Cuts, drops, doubles or overwrites; digits stay, so that nothing grows a thousandfold."""
    at = chance.randrange(len(content))
    length = chance.choice((1, 2, 8, 64))
    match chance.randrange(5):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + content[at + length :]
        case 2:
            return (
                content[: at + length] + content[at:]
                if not content[at : at + length].isdigit()
                else content[at:]
            )
        case 3:
            part = bytes(
                b if chr(b).isdigit() else chance.choice(b'{}[]",:\x00\xff\\ax')
                for b in content[at : at + 8]
            )
            return content[:at] + part + content[at + 8 :]
        case _:
            return chance.choice(
                (b"", b"null", b"[]", b"{}", b'"x"', b"\xff\xfe", b"[" * 5000, b"{" * 5000)
            )


@pytest.mark.usefixtures("nothing_is_loaded")
def test_mutated_prompts(tmp_path: Path) -> None:
    lines = (TOY / "vision" / "held_out.jsonl").read_bytes().splitlines(keepends=True)
    file = tmp_path / "p.jsonl"
    for case in range(PROMPTS):
        chance = random.Random(case)
        file.write_bytes(mutated(b"".join(chance.sample(lines, 3)), chance))
        assert_sentence(CliRunner().invoke(app, ["doctor", "--prompts", str(file)]), case)


def copied(folder: Path, place: Path, case: int) -> Path:
    """A copy of a model's folder in which one file is mutated; weights in their header."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder, place)
    chance = random.Random(case)
    file = chance.choice(sorted(file for file in place.iterdir() if file.name != "README.md"))
    content = file.read_bytes()
    head, rest = (
        (content[:3000], content[3000:]) if file.suffix == ".safetensors" else (content, b"")
    )
    file.write_bytes(mutated(head, chance) + rest)
    return place


def test_mutated_drafts(tmp_path: Path) -> None:
    for case in range(DRAFTS):
        result = CliRunner().invoke(
            app, ["inspect", str(copied(TOY / "draft", tmp_path / "draft", case))]
        )
        assert_sentence(result, case)


def test_mutated_targets(tmp_path: Path) -> None:
    for case in range(TARGETS):
        target = copied(TOY / "target", tmp_path / "target", case)
        line = ["generate", "Hi.", "--max-new-tokens", "2", "--target", str(target)]
        assert_sentence(CliRunner().invoke(app, line), case)
