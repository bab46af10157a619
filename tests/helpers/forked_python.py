"""Python programs in processes that are forked from this one as it was before its first test.

A start of Python loads torch and Transformers anew, for some six seconds of processor time; a fork has what the test
modules have loaded. For tests of what a program does, not of what it loads: those start Python.
"""

from __future__ import annotations

import logging
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Never

# Bytes of a request: words, and an environment.
LONGEST = 1 << 18


@dataclass(frozen=True, slots=True)
class Program:
    """What is behind `python`: `-c` and code, `-m` and a module, or a file; then its arguments."""

    words: list[str]
    environment: dict[str, str]
    folder: str


class Process:
    """A running program; what `subprocess.Popen` has of the same names.

    Args:
        parent (`Parent`): Who has forked it.
        pid (`int`): Of the process.
    """

    def __init__(self, parent: Parent, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._parent = parent

    def poll(self) -> int | None:
        """Returns the exit status, or `None` while it runs."""
        if self.returncode is None:
            self.returncode = self._parent.ask(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Returns the exit status once it has ended."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("python", timeout)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Asks it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it."""
        self.send_signal(signal.SIGKILL)


class Parent:
    """The process that all programs are forked from: it stays as it has begun."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if not self._pid:
            self._socket.close()
            _answer(theirs)
        theirs.close()

    def ask(self, request: Program | int, files: Sequence[int] = ()) -> Any:
        """Returns the process of a program, or the status of a process if it has ended."""
        with self._lock:
            socket.send_fds(self._socket, [pickle.dumps(request)], files)
            return pickle.loads(self._socket.recv(LONGEST))

    def end(self) -> None:
        """Ends it."""
        self._socket.close()
        os.waitpid(self._pid, 0)


_parents: list[Parent] = []


@contextmanager
def parent_of_programs() -> Generator[None]:
    """Has programs forked from this process as it is now, up to the end of the block."""
    _parents.append(Parent())
    try:
        yield
    finally:
        _parents.pop().end()


def start(
    words: Sequence[object],
    environment: Mapping[str, str],
    stdout: IO[Any],
    stderr: IO[Any],
) -> Process:
    """Starts a program, without input, by the words that would stand behind `python`."""
    program = Program([str(word) for word in words], dict(environment), str(Path.cwd()))
    with Path(os.devnull).open() as stdin:
        files = [file.fileno() for file in (stdin, stdout, stderr)]
        pid = _parents[-1].ask(program, files)
    return Process(_parents[-1], pid)


def run(
    words: Sequence[object], environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, and returns its status and all that it has said."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = start(words, environment, stdout, stderr)
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(
            [str(word) for word in words], status, stdout.read(), stderr.read()
        )


def _answer(connection: socket.socket) -> Never:
    """Forks programs and tells how they have ended, until nobody can ask any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's is for the tests
    while True:
        message, files, _, _ = socket.recv_fds(connection, LONGEST, 3)
        if not message:
            os._exit(0)
        request: Program | int = pickle.loads(message)
        reply: int | None
        if isinstance(request, int):
            ended, status = os.waitpid(request, os.WNOHANG)
            reply = os.waitstatus_to_exitcode(status) if ended else None
        else:
            reply = os.fork()
            if not reply:
                _be(request, files)
        for file in files:
            os.close(file)
        connection.send(pickle.dumps(reply))


def _be(program: Program, files: list[int]) -> Never:
    """Is a program, to its end."""
    _begin(program, files)
    status = 1
    try:
        _execute(program.words)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _begin(program: Program, files: list[int]) -> None:
    """Leaves the terminal, the signals, the environment and the log of the tests."""
    for place, file in enumerate(files):
        os.dup2(file, place)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(program.environment)
    tempfile.tempdir = None
    os.chdir(program.folder)
    # Those that print have taken the tests' own standard error when they were made.
    logging.root.handlers.clear()
    for logger in logging.root.manager.loggerDict.values():
        for handler in getattr(logger, "handlers", []):
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)
    # As Python has it, where the tests have errors.
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    sys.modules["__main__"] = types.ModuleType("__main__")


def _execute(words: list[str]) -> None:
    """Does what `python` does with these words."""
    kind, *rest = words
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path]
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], sys.modules["__main__"].__dict__)
    elif kind == "-m":
        sys.argv = ["-m", *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")
