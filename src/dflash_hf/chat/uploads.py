"""The folder of uploaded files: how many there may be, how large together, and how long.

Gradio bounds the size of each file and knows when it was uploaded, but neither how many there are nor what is left of
uploads that broke off.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transformers.utils import logging

MAX_FILES = 512
MAX_BYTES = 1024 * 2**20
LIVE = 15 * 60  # seconds that a file is kept; what was asked about it stays in its conversation
SWEPT_EVERY = 30

logger: Any = logging.get_logger(__name__)


class Uploads:
    """A folder of uploads, and what is just coming in.

    Args:
        folder (`Path`): Holds uploads and nothing else.
        max_files, max_bytes (`int`): Most of them, and most bytes of them together.
        live (`float`): Seconds that a file is kept after it was last written or uploaded again.
    """

    def __init__(
        self, folder: Path, max_files: int = MAX_FILES, max_bytes: int = MAX_BYTES, live: float = LIVE
    ) -> None:
        self.folder = folder
        self.max_files = max_files
        self.max_bytes = max_bytes
        self.live = live
        self._coming: list[int] = []
        self._lock = threading.Lock()

    @contextmanager
    def admit(self, num_bytes: int) -> Generator[None]:
        """Counts an upload of so many bytes while it comes in. Until it has come, its part that is there counts twice.

        Raises:
            ValueError: If there is no room for it.
        """
        with self._lock:
            sizes = [size for size, _ in self._files()]
            if len(sizes) + len(self._coming) >= self.max_files:
                raise ValueError(
                    f"expected at most {self.max_files} uploaded files on this server, got one more; try again in "
                    f"some minutes: uploads are deleted after {self.live / 60:.0f}"
                )
            total = sum(sizes) + sum(self._coming) + num_bytes
            if total > self.max_bytes:
                raise ValueError(
                    f"expected at most {self.max_bytes / 2**20:.0f} MB of uploaded files on this server, got "
                    f"{total / 2**20:.0f} with this one; try again in some minutes: uploads are deleted after "
                    f"{self.live / 60:.0f}"
                )
            self._coming.append(num_bytes)
        try:
            yield
        finally:
            with self._lock:
                self._coming.remove(num_bytes)

    def sweep(self) -> None:
        """Deletes what is too old, the rests of uploads that broke off and empty folders included."""
        now = time.time()
        for _, path in self._files():
            if _age(path, now) > self.live:
                path.unlink(missing_ok=True)
        for path in self.folder.glob("*/"):
            # Not a new one: a file is about to be moved into it.
            if _age(path, now) > self.live:
                with suppress(OSError):  # it is not empty
                    path.rmdir()

    def sweep_for_ever(self) -> None:
        """Sweeps now and then, in a thread that ends with the process."""

        def work() -> None:
            while True:
                time.sleep(SWEPT_EVERY)
                try:
                    self.sweep()
                except OSError as error:
                    logger.error("Uploads could not be deleted; they are tried again.", exc_info=error)

        threading.Thread(target=work, name="dflash-chat-uploads", daemon=True).start()

    def _files(self) -> list[tuple[int, Path]]:
        """Sizes in bytes and places of all files; one that is moved or deleted meanwhile is left out."""
        found: list[tuple[int, Path]] = []
        for path in self.folder.rglob("*"):
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            if not path.is_dir():
                found.append((status.st_size, path))
        return found


def _age(path: Path, now: float) -> float:
    """Seconds since it was written; 0 for what is there no more."""
    try:
        return now - path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


__all__ = ["Uploads"]
