"""README and docs/ hold what they say: every Python and shell example runs, every relative link leads somewhere.

An example that cannot run here (it needs a GPU or a download) stands under `<!-- not run: the reason -->`. The Python
blocks of one file share a namespace and run in order, each shell block is a script of its own; both from a folder of
links to the repository's own, so that what they write goes away.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
# README is listed whether it is there or not: a missing one is a failure, not one test less.
EXECUTED = [README, *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = [*EXECUTED, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "kernels" / "README.md"]

FENCE = re.compile(r"^( *)(`{3,}|~{3,})\s*([\w+-]*)")
NOT_RUN = re.compile(r"^\s*<!--\s*not run:\s*(.*?)\s*-->\s*$")
INLINE_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+[\"'][^)]*)?\)")
REFERENCE_LINK = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?(\S+?)>?(?:\s|$)")
SHELLS = ("bash", "sh", "shell", "console")
OUTSIDE = re.compile(r"^(?:[a-z][a-z0-9+.-]*:|#|//)", re.IGNORECASE)


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
        raise ValueError(f"expected a reason after 'not run:', got none above lines {unexplained}; give it")
    return [block for block in found if block.not_run is None]


def python_blocks(text: str) -> list[Block]:
    """The Python blocks to execute."""
    return blocks_to_run(text, ("python",))


def run_in_shell(block: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a shell block in a folder, without a network, with this tree's `dflash-hf` and this Python on the path."""
    programs = folder / ".programs"
    programs.mkdir(exist_ok=True)
    for program, command in (("dflash-hf", f"'{sys.executable}' -m dflash_hf"), ("python", f"'{sys.executable}'")):
        (programs / program).write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
        (programs / program).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(str(ROOT / path) for path in ("src", "kernels/torch-ext")),
        "HF_HUB_OFFLINE": "1",
    }
    command = ["bash", "-euo", "pipefail", "-c", block.code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


def execute(blocks: list[Block], filename: str) -> None:
    """Run blocks one after the other in one namespace; tracebacks point into `filename`."""
    namespace: dict[str, object] = {"__name__": "__example__"}
    for block in blocks:
        exec(compile("\n" * (block.line - 1) + block.code, filename, "exec"), namespace)


def broken_links(text: str, folder: Path) -> Iterator[str]:
    """Relative link targets outside of code that do not exist, seen from `folder`."""
    prose = re.sub(r"`[^`\n]*`", "", split(text)[1])
    targets = INLINE_LINK.findall(prose)
    targets += [found[1] for line in prose.splitlines() if (found := REFERENCE_LINK.match(line))]
    for target in targets:
        if not OUTSIDE.match(target) and not (folder / target.partition("#")[0]).exists():
            yield target


def read(path: Path) -> str:
    """The text of a Markdown file of the project, which has to be there."""
    assert path.is_file(), f"{path.relative_to(ROOT)} is missing"
    return path.read_text(encoding="utf-8")


def name(path: Path) -> str:
    """A file as the test list shows it."""
    return str(path.relative_to(ROOT))


@pytest.fixture
def linked_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory in which the repository's files are found and new files are thrown away."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith(".") and entry.name != "build":
            (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", EXECUTED, ids=name)
def test_python_examples_run(path: Path, linked_root: Path) -> None:
    execute(python_blocks(read(path)), str(path))


@pytest.mark.parametrize("path", EXECUTED, ids=name)
def test_shell_examples_run(path: Path, linked_root: Path) -> None:
    for block in blocks_to_run(read(path), SHELLS):
        done = run_in_shell(block, linked_root)
        assert done.returncode == 0, f"{name(path)}:{block.line} ended with {done.returncode}\n{done.stderr}"


@pytest.mark.parametrize("path", LINKED, ids=name)
def test_relative_links_lead_somewhere(path: Path) -> None:
    broken = list(broken_links(read(path), path.parent))
    assert not broken, f"{name(path)} links to what is not there: {broken}"


EXAMPLE = """\
# Title
See [here](there.md#part), [out](https://example.org), ![pic](pic.png "a title") and `[code](no.md)`.

```python
x = 1
```
```python title="example"
x += 1
```

<!-- not run: needs a GPU -->

```python
raise SystemExit
```
<!-- not run: this comment stands above the prose -->
Prose.
  ```python
  assert x == 2
  ```
```bash
[a](nowhere.md)
```
[ref]: elsewhere/
"""


def test_blocks_are_found_with_their_lines_and_marks() -> None:
    assert [block.line for block in python_blocks(EXAMPLE)] == [5, 8, 19]
    assert [block.not_run for block in split(EXAMPLE)[0]] == [None, None, "needs a GPU", None, None]
    execute(python_blocks(EXAMPLE), "example.md")


def test_failing_example_is_reported_at_its_line() -> None:
    text = EXAMPLE.replace("x == 2", "x == 3")
    with pytest.raises(AssertionError) as failure:
        execute(python_blocks(text), "example.md")
    assert [(str(entry.path), entry.lineno + 1) for entry in failure.traceback][-1] == ("example.md", 19)


def test_failing_shell_example_is_seen(tmp_path: Path) -> None:
    text = "```bash\nfalse | cat\necho reached\n```\n```sh\ndflash-hf --version\npython -c 'print(1)'\n```\n"
    failing, fine = (run_in_shell(block, tmp_path) for block in blocks_to_run(text, SHELLS))
    assert (failing.returncode, failing.stdout) == (1, "")
    assert fine.returncode == 0
    assert re.fullmatch(r"dflash-hf \S+\n1\n", fine.stdout)


@pytest.mark.parametrize("text", ["<!-- not run: -->\n```python\nx\n```\n", "```python\nx = 1\n"])
def test_mark_without_reason_and_open_fence_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        python_blocks(text)


def test_links_to_nothing_are_reported(tmp_path: Path) -> None:
    assert list(broken_links(EXAMPLE, tmp_path)) == ["there.md#part", "pic.png", "elsewhere/"]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "there.md").touch()
    assert list(broken_links(EXAMPLE, tmp_path)) == ["pic.png"]
