"""The examples of a Markdown page: found with their lines and marks, and run. Needs the standard library only.

    python -P tests/helpers/examples.py README.md

runs those of a page from top to bottom in the current folder, with what this Python has installed. Status 1 with the
first that fails. (`-P`, because the modules beside this file are not for the examples.)

An example that cannot run (it needs a GPU or a download) stands under `<!-- not run: the reason -->`. The Python
blocks of a page share a namespace, each shell block is a script of its own.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^( *)(`{3,}|~{3,})\s*([\w+-]*)")
NOT_RUN = re.compile(r"^\s*<!--\s*not run:\s*(.*?)\s*-->\s*$")
SHELLS = ("bash", "sh", "shell", "console")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: the word after its fence, the line its code starts on (from 1), the code, why it is not run."""

    language: str
    line: int
    code: str
    not_run: str | None


def split(text: str) -> tuple[list[Block], str]:
    """The fenced blocks of a Markdown text, and the text without them."""
    blocks: list[Block] = []
    prose: list[str] = []
    lines = iter(enumerate(text.splitlines(), start=1))
    not_run: str | None = None
    for number, line in lines:
        if opening := FENCE.match(line):
            indent, fence, language = opening.groups()
            code: list[str] = []
            for _, inner in lines:
                if re.fullmatch(rf"\s*{fence[0]}{{{len(fence)},}}\s*", inner):
                    break
                code.append(inner.removeprefix(indent))
            else:
                raise ValueError(
                    f"expected the fence of line {number} to be closed, got the end of the text; close it"
                )
            blocks.append(Block(language, number + 1, "\n".join(code) + "\n", not_run))
            not_run = None
        else:
            prose.append(line)
            if marker := NOT_RUN.match(line):
                not_run = marker[1]
            elif line.strip():
                not_run = None
    return blocks, "\n".join(prose)


def blocks_to_run(text: str, languages: tuple[str, ...]) -> list[Block]:
    """The blocks of these languages that are not set aside. Setting one aside without a reason is an error."""
    found = [block for block in split(text)[0] if block.language in languages]
    unexplained = [block.line for block in found if block.not_run == ""]
    if unexplained:
        raise ValueError(
            f"expected a reason after 'not run:', got none above lines {unexplained}; give it"
        )
    return [block for block in found if block.not_run is None]


def python_blocks(text: str) -> list[Block]:
    """The Python blocks to execute."""
    return blocks_to_run(text, ("python",))


def new_namespace() -> dict[str, object]:
    """A namespace for the Python blocks of a page."""
    return {"__name__": "__example__"}


def execute(block: Block, filename: str, namespace: dict[str, object]) -> None:
    """Runs a Python block in a namespace; tracebacks point into `filename`."""
    exec(compile("\n" * (block.line - 1) + block.code, filename, "exec"), namespace)


def run_in_shell(
    block: Block, folder: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Runs a shell block in a folder; any of its commands that fails ends it."""
    command = ["bash", "-euo", "pipefail", "-c", block.code]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )


def run_page(page: Path) -> None:
    """Runs the examples of a page from top to bottom in the current folder, as this module's docstring has it."""
    blocks = blocks_to_run(page.read_text(encoding="utf-8"), ("python", *SHELLS))
    if not blocks:
        sys.exit(
            f"expected an example to run in {page}, got none; write one, or leave the page out"
        )
    programs = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    namespace = new_namespace()
    for block in blocks:
        print(f"{page.name}:{block.line}: {block.language}", flush=True)
        if block.language == "python":
            execute(block, str(page), namespace)
            continue
        done = run_in_shell(block, Path.cwd(), environment)
        print(done.stdout, end="", flush=True)
        if done.returncode != 0:
            sys.exit(f"{page.name}:{block.line} ended with {done.returncode}\n{done.stderr}")


if __name__ == "__main__":
    run_page(Path(sys.argv[1]))
