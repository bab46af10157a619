"""A command in a pseudo terminal: what it shows, and what a person types when something has been shown."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import time
from pathlib import Path

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\r")


class Terminal:
    """A running command."""

    def __init__(self, command: list[str], folder: Path, **environment: str) -> None:
        controller, own = pty.openpty()
        self.controller = controller
        settings = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "50", **environment}
        self.process = subprocess.Popen(
            command, stdin=own, stdout=own, stderr=own, env=settings, cwd=folder, close_fds=True
        )
        os.close(own)
        self.shown = ""
        self.num_read = 0  # letters that `wait_for` has passed

    def wait_for(self, text: str, seconds: float = 90) -> str:
        """Returns what was shown since the last call, up to a text, without colours and moves of the cursor."""
        deadline = time.monotonic() + seconds
        while True:
            place = self.shown.find(text, self.num_read)
            if place >= 0:
                found = self.shown[self.num_read : place]
                self.num_read = place + len(text)
                return found
            left = self.shown[self.num_read :]
            assert time.monotonic() < deadline, f"no {text!r} in {left!r}"
            has_ended = self.process.poll() is not None
            self._read()
            has_more = len(self.shown) > self.num_read + len(left)
            assert has_more or not has_ended, f"it has ended without {text!r}: {left!r}"

    def type(self, line: str) -> None:
        """Types a line."""
        os.write(self.controller, f"{line}\n".encode())

    def end(self, seconds: float = 30) -> int:
        """Returns the exit status once the command has ended."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read()
        self._read()
        return self.process.wait(timeout=1)

    def close(self) -> None:
        """Ends it, whatever it does."""
        self.process.kill()
        self.process.wait()
        os.close(self.controller)

    def _read(self) -> None:
        is_ready, _, _ = select.select([self.controller], [], [], 0.2)
        if not is_ready:
            return
        try:
            new = os.read(self.controller, 65536)
        except OSError:  # the other side is closed
            return
        self.shown += CONTROL.sub("", new.decode(errors="replace"))
