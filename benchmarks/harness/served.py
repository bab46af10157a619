"""A server of a pair in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def server(options: Sequence[str], log: Path) -> Generator[tuple[subprocess.Popen[bytes], str]]:
    """Starts `dflash-hf serve` with these options, and gives its process and its address; kills it in the end.

    `log` is the file that gets what the server prints. Raises `RuntimeError` with its text if no server starts.
    """
    command = [sys.executable, "-m", "dflash_hf", "serve", "--port", "0", *options]
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream)
    try:
        found = re.search(r"is served at (\S+)", log.read_text())
        while found is None:
            if process.poll() is not None:
                raise RuntimeError(f"expected a server, got {log.read_text()}; see why it ended")
            time.sleep(0.1)
            found = re.search(r"is served at (\S+)", log.read_text())
        yield process, found[1]
    finally:
        process.kill()
        process.wait()
