"""`dflash-hf serve` in a process of its own, started or forked, on a free port, and what it said."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from openai import OpenAI

from helpers import forked_python
from helpers.source_tree import ROOT


class Served:
    """A running server: `client` is OpenAI's own, and `log` all that it has said.

    Args:
        folder (`Path`): Where its log goes.
        arguments (`str`): Of the command.
        is_fork (`bool`): Whether it has all loaded, or is started as users do.
    """

    def __init__(self, folder: Path, *arguments: str, is_fork: bool = True) -> None:
        self._log = folder / "log"
        words = ["-m", "dflash_hf", "serve", "--port", "0", *arguments]
        self.process: subprocess.Popen[bytes] | forked_python.Process
        if is_fork:
            self.process = forked_python.start(words, os.environ, self._log, self._log)
        else:
            folders = [str(ROOT / "src"), str(ROOT / "kernels" / "torch-ext"), *sys.path]
            with self._log.open("w") as log:
                self.process = subprocess.Popen(
                    [sys.executable, *words],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
                    stdout=log,
                    stderr=log,
                )
        try:
            self.waited_for(lambda log: "is served at" in log)
            found = re.search(r"^(\S+) is served at (\S+) ", self.log, re.MULTILINE)
            assert found is not None, self.log
        except BaseException:
            self.process.kill()
            raise
        self.name, self.url = found.groups()
        self.client = OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=60)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def waited_for(self, holds: Callable[[str], bool], seconds: float = 120) -> str:
        """Returns the log once something holds for it."""
        deadline = time.monotonic() + seconds
        while not holds(log := self.log):
            assert self.process.poll() is None, (
                f"the server has ended ({self.process.returncode}):\n{log}"
            )
            assert time.monotonic() < deadline, f"not within {seconds} s:\n{log}"
            time.sleep(0.02)
        return log

    def ended_by(self, signal: int) -> int:
        """Sends a signal and returns the exit status."""
        self.process.send_signal(signal)
        try:
            return self.process.wait(timeout=30)
        finally:
            self.process.kill()
