"""Python programs in processes of `multiprocessing`'s fork server, which loads torch and Transformers once for all.

A start of Python loads them anew, for some six seconds of processor time. For tests of what a program does, not of
what it loads: those start Python. What libraries read while they are loaded (`HF_HOME`, `OMP_NUM_THREADS`) is as the
first test that forked had it, whatever the environment of a program says.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest.mock import patch

# What cannot be imported, as it is not installed, is left out.
multiprocessing.get_context("forkserver").set_forkserver_preload(
    [
        "dflash_hf.training.trainer",
        "dflash_hf.bench.run",
        "dflash_hf.serve.app",
        "transformers.models.qwen3.modeling_qwen3",
    ]
)


class Process(ForkServerProcess):
    """A running program, which ends with the tests at the latest; with names of `subprocess.Popen` beside its own."""

    stdin = stdout = stderr = None

    @property
    def returncode(self) -> int | None:
        """The exit status, or `None` while it runs."""
        return self.exitcode

    def poll(self) -> int | None:
        """Returns the exit status, or `None` while it runs."""
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status once it has ended, within so many seconds where they are given."""
        self.join(timeout)
        if self.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("python", timeout)
        return self.exitcode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.exitcode is None:
            os.kill(self.pid, number)


def start(
    words: Sequence[object], environment: Mapping[str, str], stdout: Path, stderr: Path
) -> Process:
    """Starts a program, without input, by the words that would stand behind `python`; its files may be the same."""
    stdout.touch()
    stderr.touch()
    program = ([str(word) for word in words], dict(environment), stdout, stderr)
    process = Process(target=_be, args=program, daemon=True)
    # Python 3.11's fork server ignores the tests' `sys.path`: it would load another copy of the package, or none.
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        process.start()
    return process


def run(
    words: Sequence[object], environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, and returns its status and all that it has said."""
    with tempfile.TemporaryDirectory() as folder:
        stdout = Path(folder) / "stdout"
        stderr = Path(folder) / "stderr"
        process = start(words, environment, stdout, stderr)
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(words, status, stdout.read_text(), stderr.read_text())


def _be(words: list[str], environment: dict[str, str], stdout: Path, stderr: Path) -> None:
    """Is a program: what `python` does with its words."""
    for number, path in {1: stdout, 2: stderr}.items():
        with path.open("ab") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # Gradio has asked for it
    # What is loaded stays for good: a search for garbage in all of it takes half a second, and copies its memory.
    gc.freeze()
    multiprocessing.set_start_method(None, force=True)
    # It may start processes of its own, as torchrun does.
    multiprocessing.current_process().daemon = False
    # Where the tests run in the background of a shell, they ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kind = words[0]
    sys.argv = words
    if kind == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(kind, run_name="__main__")
