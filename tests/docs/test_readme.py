"""README and docs/ hold what they say: every Python and shell example runs, every relative link leads somewhere.

Which examples run is in `helpers.examples`. They run from a folder of links to the repository's own, so that what they
write goes away. A shell example that consists of plain `dflash-hf` commands runs in this process: a start of each of
them would load torch and Transformers anew, for six seconds of processor time. The others run in a shell.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dflash_hf.cli.main import app
from helpers import examples
from helpers.examples import (
    SHELLS,
    Block,
    blocks_to_run,
    execute,
    new_namespace,
    python_blocks,
    run_in_shell,
    split,
)
from helpers.widths import use_tables_in

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
# README is listed whether it is there or not: a missing one is a failure, not one test less.
EXECUTED = [README, *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = [
    *EXECUTED,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "kernels" / "README.md",
]

INLINE_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+[\"'][^)]*)?\)")
REFERENCE_LINK = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?(\S+?)>?(?:\s|$)")
SHELL_SYNTAX = re.compile(r"[|&;<>()$`*?\[\]{}~]")
OUTSIDE = re.compile(r"^(?:[a-z][a-z0-9+.-]*:|#|//)", re.IGNORECASE)


def environment_of_tree(folder: Path) -> dict[str, str]:
    """The environment of a shell block: no network, and this tree's `dflash-hf` and this Python on the path."""
    programs = folder / ".programs"
    programs.mkdir(exist_ok=True)
    for program, command in (
        ("dflash-hf", f"'{sys.executable}' -m dflash_hf"),
        ("python", f"'{sys.executable}'"),
    ):
        (programs / program).write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
        (programs / program).chmod(0o755)
    return {
        **os.environ,
        # A table that `dflash-hf tune` writes is for this folder's blocks alone.
        "HF_HOME": str(folder / "hf-home"),
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(str(ROOT / path) for path in ("src", "kernels/torch-ext")),
        "HF_HUB_OFFLINE": "1",
    }


def execute_all(blocks: list[Block], filename: str) -> None:
    """Runs Python blocks one after the other in one namespace."""
    namespace = new_namespace()
    for block in blocks:
        execute(block, filename, namespace)


def plain_commands(code: str) -> list[list[str]]:
    """Returns the words behind each `dflash-hf` of a shell block, or nothing where it needs a shell."""
    if SHELL_SYNTAX.search(code):
        return []
    lines = [shlex.split(line, comments=True) for line in code.replace("\\\n", " ").splitlines()]
    commands = [words for words in lines if words]
    if any(words[0] != "dflash-hf" for words in commands):
        return []
    return [words[1:] for words in commands]


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
    execute_all(python_blocks(read(path)), str(path))


@pytest.mark.parametrize("path", EXECUTED, ids=name)
def test_shell_examples_run(path: Path, linked_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = environment_of_tree(linked_root)
    # Where a command of this process writes the table of `dflash-hf tune`, too.
    use_tables_in(Path(environment["HF_HOME"]) / "dflash_hf" / "step_costs", monkeypatch)
    for block in blocks_to_run(read(path), SHELLS):
        place = f"{name(path)}:{block.line}"
        commands = plain_commands(block.code)
        for words in commands:
            result = CliRunner().invoke(app, words)
            assert result.exit_code == 0, f"{place} ended with {result.exit_code}\n{result.output}"
        if not commands:
            done = run_in_shell(block, linked_root, environment)
            assert done.returncode == 0, f"{place} ended with {done.returncode}\n{done.stderr}"


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
    execute_all(python_blocks(EXAMPLE), "example.md")


def test_failing_example_is_reported_at_its_line() -> None:
    text = EXAMPLE.replace("x == 2", "x == 3")
    with pytest.raises(AssertionError) as failure:
        execute_all(python_blocks(text), "example.md")
    assert [(str(entry.path), entry.lineno + 1) for entry in failure.traceback][-1] == (
        "example.md",
        19,
    )


def test_failing_shell_example_is_seen(tmp_path: Path) -> None:
    text = "```bash\nfalse | cat\necho reached\n```\n```sh\ndflash-hf --version\npython -c 'print(1)'\n```\n"
    environment = environment_of_tree(tmp_path)
    failing, fine = (
        run_in_shell(block, tmp_path, environment) for block in blocks_to_run(text, SHELLS)
    )
    assert (failing.returncode, failing.stdout) == (1, "")
    assert fine.returncode == 0
    assert re.fullmatch(r"dflash-hf \S+\n1\n", fine.stdout)


def test_plain_commands_are_told_from_those_for_a_shell() -> None:
    assert plain_commands("dflash-hf a 'b # c' \\\n    -d  # e\n\ndflash-hf f\n") == [
        ["a", "b # c", "-d"],
        ["f"],
    ]
    for code in ("echo a | dflash-hf b", "dflash-hf a > b", "A=1 dflash-hf b", "dflash-hf a\ncd b"):
        assert plain_commands(code) == []


PAGE = """\
```python
number = 3
```
```bash
echo 4 > number; python -c 'print("five")'
```
<!-- not run: needs a GPU -->
```bash
exit 5
```
```python
assert (number, open("number").read()) == (3, "4\\n")
```
"""


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        (PAGE, 0, "page.md:2: python\npage.md:5: bash\nfive\npage.md:12: python\n"),
        (PAGE.replace("> number", "> number; false"), 1, "page.md:5 ended with 1"),
        (PAGE.replace("(3,", "(2,"), 1, "line 12"),
        ("# Nothing\n", 1, "expected an example to run in page.md, got none"),
    ],
)
def test_page_runs_from_top_to_bottom(text: str, status: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    command = [sys.executable, "-P", examples.__file__, "page.md"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status, done
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize("text", ["<!-- not run: -->\n```python\nx\n```\n", "```python\nx = 1\n"])
def test_mark_without_reason_and_open_fence_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        python_blocks(text)


def test_links_to_nothing_are_reported(tmp_path: Path) -> None:
    assert list(broken_links(EXAMPLE, tmp_path)) == ["there.md#part", "pic.png", "elsewhere/"]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "there.md").touch()
    assert list(broken_links(EXAMPLE, tmp_path)) == ["pic.png"]
