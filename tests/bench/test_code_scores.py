"""Programs of models: what is run of an answer; whatever it does ends within its limits and leaves nothing."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest

from dflash_hf.bench import scores
from dflash_hf.bench.scores import assemble, failure

# A row of each schema, in words of our own.
HUMANEVAL = {
    "prompt": '''from typing import List


def double(n: int) -> int:
    """Twice n."""
    return 2 * n


def doubles(numbers: List[int]) -> List[int]:
    """Twice each of some numbers.
    >>> doubles([1, 4])
    [2, 8]
    """
''',
    "test": "def check(candidate):\n    assert candidate([1, 4]) == [2, 8]\n    assert candidate([]) == []\n",
    "entry_point": "doubles",
}
MBPP = {
    "imports": ["import math"],
    "tests": ["assert half_up(2.5) == 3", "assert half_up(math.pi) == 3"],
}
BODY = "    return [double(n) for n in numbers]\n"
WHOLE = "def doubles(numbers: List[int]) -> List[int]:\n" + BODY
WRONG = WHOLE.replace("double(n)", "n")

ANSWERS = {
    "the function's body": (BODY, True),
    "the function alone": (WHOLE, True),
    "prompt and body": (HUMANEVAL["prompt"] + BODY, True),
    "a block": (f"Like this:\n```python\n{WHOLE}```\nIt doubles.", True),
    "a block without a language": (f"```\n{WHOLE}```", True),
    "a block with the body": (f"```python\n{BODY}```", True),
    "a block in a list": (
        "1. Here:\n   ```python\n" + "".join(f"   {x}\n" for x in WHOLE.splitlines()) + "   ```",
        True,
    ),
    "a block that is cut off": (f"```python\n{WHOLE}", True),
    "an example behind it": (
        f"```python\n{WHOLE}```\nUse it:\n```python\nprint(doubles([1]))\n```",
        True,
    ),
    "corrected": (f"```python\n{WRONG}```\nNo:\n```python\n{WHOLE}```", True),
    "a demonstration": (
        f"```python\n{WHOLE}\nif __name__ == '__main__':\n    doubles(input())\n```",
        True,
    ),
    "made worse": (f"```python\n{WHOLE}```\nOr:\n```python\n{WRONG}```", False),
    "wrong": (f"```python\n{WRONG}```", False),
    "prose": ("I would use a loop.", False),
    "nothing": ("", False),
}


@pytest.mark.parametrize(("text", "right"), ANSWERS.values(), ids=ANSWERS.keys())
def test_what_is_run_of_an_answer(text: str, right: bool) -> None:
    assert (failure(assemble(HUMANEVAL, text)) is None) == right


def test_mbpp() -> None:
    code = "def half_up(x):\n    return math.floor(x + 0.5)\n"
    assert (
        failure(
            assemble(MBPP, f"```python\n{code}```\nTry `half_up(1.5)`.\n```\nhalf_up(1.5)\n```")
        )
        is None
    )
    assert failure(assemble(MBPP, code)) is None
    assert failure(assemble(MBPP, code.replace("0.5", "0.4"))) == "AssertionError"


def test_other_references_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a reference .*got .*fix the question"):
        assemble({"prompt": "def f():"}, "pass")
    # Its letters would be lines of the program.
    with pytest.raises(ValueError, match=r"expected a reference .*got .*fix the question"):
        assemble({"tests": "assert f()"}, "pass")


def refusal(program: str) -> str:
    """Returns the name of what Python raises for a program that it cannot compile."""
    with pytest.raises((SyntaxError, ValueError)) as raised:
        compile(program, "program", "exec")
    return type(raised.value).__name__


ENDINGS = {
    "raises": ("1 / 0", "ZeroDivisionError"),
    "does not parse": ("def f(:", "SyntaxError"),
    # A ValueError in Python 3.11.2, a SyntaxError in 3.11.7.
    "has a zero byte": ("x = '\0'", refusal("x = '\0'")),
    "exits": ("import sys; sys.exit(0)", "SystemExit"),
    "exits at once": ("import os; os._exit(0)", "killed"),
    "waits for input": ("input()", "EOFError"),
    "says that it passed": ('print(\'{"token": ""}\'); raise KeyError', "KeyError"),
    "recurses": ("def f(): f()\nf()", "RecursionError"),
    "takes memory": ("x = bytearray(2**31)", "MemoryError"),
    "prints without end": ("while True: print('x' * 10000)", "time limit"),
    "sleeps": ("import time; time.sleep(60)", "time limit"),
    "computes": ("9 ** 9 ** 9 ** 9", "time limit"),
    "catches everything": (
        "while True:\n  try:\n    while True: pass\n  except BaseException: pass",
        "time limit",
    ),
    "leaves a file open": ("left = open(__import__('os').__file__)", None),
    "forks": ("import os; os.fork()", "refused: os.fork"),
    "forks and catches": (
        "import os\ntry: os.fork()\nexcept BaseException: pass",
        "refused: os.fork",
    ),
    "runs a command": ("import os; os.system('true')", "refused: os.system"),
    "starts a process": (
        "import subprocess; subprocess.run(['true'])",
        "refused: subprocess.Popen",
    ),
    "spawns": ("import os; os.posix_spawn('/bin/true', ['true'], {})", "refused: os.posix_spawn"),
    "becomes another": ("import os; os.execv('/bin/true', ['true'])", "refused: os.exec"),
    "kills": ("import os; os.kill(os.getppid(), 9)", "refused: os.kill"),
    "writes": ("open('left', 'w')", "refused: open"),
    "writes elsewhere": ("open(PLACE, 'w')", "refused: open"),
    "writes by os": ("import os; os.open(PLACE, os.O_CREAT | os.O_RDWR)", "refused: open"),
    "makes a folder": ("import os; os.mkdir(PLACE)", "refused: os.mkdir"),
    "makes a temporary file": ("import tempfile; tempfile.TemporaryFile()", "refused: open"),
    "removes": ("import os; os.remove(__import__('sys').executable)", "refused: os.remove"),
    "removes all": ("import shutil; shutil.rmtree('/nowhere')", "refused: shutil.rmtree"),
    "connects": (
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "refused: socket.getaddrinfo",
    ),
    "opens a socket": ("import socket; socket.socket()", "refused: socket.__new__"),
    "asks the web": (
        "import urllib.request as r; r.urlopen('http://127.0.0.1:9')",
        "refused: socket.getaddrinfo",
    ),
    "calls C": ("import ctypes", "ImportError"),
    "reads": ("open(__import__('os').__file__).read()", None),
    "has no variables": (
        "import os; assert not set(os.environ) & {'SECRET', 'PYTHONPATH', 'USER'}",
        None,
    ),
    "is alone in a folder": (
        "import os; assert os.listdir() == [] and os.getcwd() == os.environ['HOME']",
        None,
    ),
    "has dataclasses": (
        "from dataclasses import dataclass\n@dataclass\nclass A:\n  x: int\nassert A(1) == A(1)",
        None,
    ),
    "has NumPy": ("import numpy as np; assert (np.eye(3) @ np.eye(3)).sum() == 3", None),
}


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which temporary folders are made; nothing may be in it afterwards."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("program", "ending"), ENDINGS.values(), ids=ENDINGS.keys())
def test_whatever_it_does_ends_and_leaves_nothing(
    program: str, ending: str | None, left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "x")
    place = left / "place"
    started = time.monotonic()
    seconds = 0.8 if ending == "time limit" else 30.0
    outcome = failure(program.replace("PLACE", repr(str(place))), seconds=seconds)
    assert outcome == ending
    assert time.monotonic() - started < seconds + 5
    assert list(left.iterdir()) == []


def running(mark: str) -> list[str]:
    """Command lines of processes of this machine that contain a mark."""
    listing = subprocess.run(
        ["ps", "-eo", "args"], capture_output=True, text=True, check=True
    ).stdout
    return [line for line in listing.splitlines() if mark in line and not line.startswith("ps ")]


# The C function beneath subprocess has no audit event: a process that the hook does not see.
UNSEEN = """
import _posixsubprocess, os, time
def start(*command):
    r, w = os.pipe()
    _posixsubprocess.fork_exec(list(map(str.encode, command)), [command[0].encode()], True, (w,), None, None, -1, -1,
        -1, -1, -1, -1, r, w, True, SESSION, -1, None, None, None, -1, None, False)
start("/bin/sleep", "MARK")
time.sleep(WAIT)
"""


@pytest.mark.parametrize("wait", [0, 60])
# A session of its own is what only a process namespace ends.
@pytest.mark.parametrize(
    ("has_namespaces", "session"), [(False, False), (True, False), (True, True)]
)
def test_processes_that_nothing_sees_are_gone_too(
    has_namespaces: bool, session: bool, wait: int, left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_namespaces and not scores._has_namespaces():
        pytest.skip("user namespaces are not permitted here")
    monkeypatch.setattr(scores, "_has_namespaces", lambda: has_namespaces)
    mark = f"{3000 + os.getpid()}.{int(time.monotonic() * 1000) % 10**6}"
    program = (
        UNSEEN.replace("MARK", mark).replace("SESSION", str(session)).replace("WAIT", str(wait))
    )
    started = time.monotonic()
    assert failure("x = 1") is None
    # On a busy machine it has to begin within them too
    seconds = 1.0 + 8 * (time.monotonic() - started)
    seen: list[str] = []
    has_ended = threading.Event()

    def watch() -> None:
        while not seen and not has_ended.wait(0.25):
            seen.extend(running(mark))

    watcher = threading.Thread(target=watch)
    watcher.start()
    outcome = failure(program, seconds=seconds)
    has_ended.set()
    watcher.join()
    if os.getuid() == 0:  # for others the kernel starts none
        assert outcome == ("time limit" if wait else None)
        assert not wait or seen, "the test starts no process, and so shows nothing"
    deadline = time.monotonic() + 5
    while (lines := running(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not lines
    assert list(left.iterdir()) == []


def test_the_limits_hold_without_namespaces(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scores.shutil, "which", lambda name: None)
    scores._has_namespaces.cache_clear()
    try:
        assert failure("x = 1") is None
        assert failure("import os; os.fork()") == "refused: os.fork"
        assert caplog.text.count("without namespaces") == 1
    finally:
        scores._has_namespaces.cache_clear()


def test_an_interrupt_ends_it(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    processes: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    class Recorded(popen):  # type: ignore[misc,valid-type]
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            processes.append(self)

    assert failure("x = 1") is None
    monkeypatch.setattr(scores.subprocess, "Popen", Recorded)
    monkeypatch.setattr(Recorded, "communicate", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        failure("import time; time.sleep(60)")
    assert processes[-1].returncode is not None
    assert list(left.iterdir()) == []


def test_no_limits_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores.os, "name", "nt")
    with pytest.raises(ValueError, match=r"expected Linux or macOS .*leave out --run-code"):
        failure("x = 1")
