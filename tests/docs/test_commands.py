"""The commands that README and docs/ show exist, with the options they show.

What is in a fenced shell block, or in a code span that begins like a command: `dflash-hf NAME --option`, `make NAME`,
`python FILE`.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from dflash_hf.cli.main import app
from dflash_hf.training import DFlashTrainingArguments

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "demos").glob("*/README.md"))
BLOCK = re.compile(r"^```(?:bash|sh|shell|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`((?:dflash-hf|make|python) [^`]+)`")
ENDS = {"|", "&&", ";", ">", "2>", "<", "||"}
PROGRAMS = ("dflash-hf", "make", "python")


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command in a page, from its program on."""
    blocks = [
        line for block in BLOCK.findall(text) for line in block.replace("\\\n", " ").splitlines()
    ]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for line in [*blocks, *(span.replace("\n", " ") for span in SPAN.findall(prose))]:
        words = shlex.split(line, comments=True)
        while words:
            stop = next((at for at, word in enumerate(words) if word in ENDS), len(words))
            part, words = words[:stop], words[stop + 1 :]
            if "-m" in part and part[part.index("-m") + 1 :][:1] == ["dflash_hf"]:
                part = ["dflash-hf", *part[part.index("-m") + 2 :]]
            part = [word.replace(".venv/bin/", "") for word in part]
            if part and part[0] in PROGRAMS:
                yield part


def wrong(words: list[str]) -> str | None:
    """What a command names that is not there."""
    program, *rest = words
    if program == "make":
        targets = set(
            re.findall(
                r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
            )
        )
        return next(
            (word for word in rest if re.fullmatch(r"[a-z-]+", word) and word not in targets), None
        )
    if program == "python":
        files = [word for word in rest if word.endswith(".py")]
        return next((word for word in files if not (ROOT / word).is_file() and "/" in word), None)
    command: Any = typer.main.get_command(app)
    while rest and hasattr(command, "commands"):
        if not re.fullmatch(r"[a-z-]+", rest[0]) or rest[0].startswith("-"):
            break
        found = command.commands.get(rest[0])
        if found is None:
            return rest[0]
        command, rest = found, rest[1:]
    known = {
        flag
        for parameter in command.params
        for flag in (*parameter.opts, *parameter.secondary_opts)
    }
    if command.name == "train":
        known |= {f"--{field.name.replace('_', '-')}" for field in fields(DFlashTrainingArguments)}
    given = [word.partition("=")[0] for word in rest if re.match(r"--[a-z]", word)]
    return next((word for word in given if word not in known | {"--help"}), None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_exist(page: Path) -> None:
    found = [(words, wrong(words)) for words in commands(page.read_text(encoding="utf-8"))]
    bad = [f"{' '.join(words)}: no {what}" for words, what in found if what is not None]
    assert not bad, "\n".join(bad)


def test_single_tests_that_the_makefile_names_exist() -> None:
    named = re.findall(
        r"(tests/[\w/]+\.py)::(\w+)", (ROOT / "Makefile").read_text(encoding="utf-8")
    )
    assert named
    missing = [
        name
        for path, name in named
        if f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8")
    ]
    assert not missing


def test_pages_that_the_makefile_names_exist() -> None:
    """With several processes pytest leaves out what does not exist."""
    named = re.findall(r"\[([\w/]+\.md)\]", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_what_is_not_there_is_found() -> None:
    page = (
        "`dflash-hf chat --nowhere`\n\n"
        "```bash\ndflash-hf chart x  # no\nmake no-such && make test\npython demos/no.py\n```\n"
        "```bash\naccelerate launch -m dflash_hf bench --batch 1 \\\n  --nothing\n```\n"
        "`dflash-hf train --learning-rate 1`\n"
    )
    assert [wrong(words) for words in commands(page)] == [
        "chart", "no-such", None, "demos/no.py", "--nothing", "--nowhere", None,
    ]  # fmt: skip
