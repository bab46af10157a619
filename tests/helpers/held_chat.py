"""Answers that come as far as a test lets them, on a machine of any speed; run as a script, it is the chat with that.

The test says how many runs of each answer are handed on; the next one waits until more are let through, or until it is
stopped. So a test looks at an answer that is half written for as long as it likes, and nothing rests on a clock.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_hf.chat.model import RunStreamer


def held_put(allowed: Callable[[], int | None]) -> Callable[[RunStreamer, Any], None]:
    """Makes a `RunStreamer.put` that hands on `allowed()` runs of each answer; `None` lets all of them through."""
    put = RunStreamer.put

    def held(self: RunStreamer, value: Any) -> None:
        given = getattr(self, "given", -1)  # the first call brings the prompt
        while (
            given >= 0
            and not self.stop.is_set()
            and (limit := allowed()) is not None
            and given >= limit
        ):
            self.stop.wait(0.01)
        put(self, value)
        self.given = given + 1  # type: ignore[attr-defined]

    return held


def write_allowed(path: Path, runs: int | None) -> None:
    """Tells a chat in another process how many runs to hand on."""
    if runs is None:
        path.unlink(missing_ok=True)
        return
    # Moved into place: the other process must not read a file that is still empty.
    new = path.with_suffix(".new")
    new.write_text(str(runs))
    os.replace(new, path)


def read_allowed(path: Path) -> int | None:
    """What `write_allowed` wrote last."""
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return None


if __name__ == "__main__":
    from dflash_hf.cli.main import app

    RunStreamer.put = held_put(lambda: read_allowed(Path(sys.argv[1])))  # type: ignore[method-assign]
    app(["chat", "--web", *sys.argv[2:]])
