"""Interrupting a call at chosen lines of the package's own code, which a timer hits only by chance.

A tracer counts how often each line runs, in the package and in `contextlib` where the package has called it, and can
raise KeyboardInterrupt at any of them. Torch's and Transformers' own lines are left out: what an interrupt there
leaves behind, it leaves behind without a draft too.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import linecache
import re
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import Any

import dflash_hf

SOURCES = str(Path(dflash_hf.__file__).parent)
# File, line, event, and the function of ours that has called contextlib
Line = tuple[str, int, str, str]


class Tracer:
    """Counts lines, and interrupts at one of them.

    Args:
        at (`tuple[Line, int]`, *optional*): Which line, and which time.
    """

    def __init__(self, at: tuple[Line, int] | None = None) -> None:
        self.at = at
        self.seen: collections.Counter[Line] = collections.Counter()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        """Looks at a call; what runs elsewhere, or not where it is to interrupt, is not traced further."""
        name = frame.f_code.co_filename
        if self.at is not None and name != self.at[0][0]:
            return None
        if not name.startswith(SOURCES) and name != contextlib.__file__:
            return None
        self._look(frame, event)
        return self._inside

    def _inside(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "line":
            self._look(frame, event)
        return self._inside

    def _look(self, frame: FrameType, event: str) -> None:
        caller: FrameType | None = frame
        while caller is not None and not caller.f_code.co_filename.startswith(SOURCES):
            if caller.f_code.co_filename != contextlib.__file__:
                return
            caller = caller.f_back
        if caller is None or _leaves_a_lock(frame):
            return
        line = (frame.f_code.co_filename, frame.f_lineno, event, caller.f_code.co_name)
        self.seen[line] += 1
        if self.at is not None and line == self.at[0] and self.seen[line] == self.at[1]:
            self.at = None
            raise KeyboardInterrupt

    def points(self) -> list[tuple[Line, int]]:
        """Returns the first and the last time of every line."""
        return [(line, time) for line, num in self.seen.items() for time in sorted({1, num})]


def _leaves_a_lock(frame: FrameType) -> bool:
    """Whether the next thing is to release a module's lock: Python looks for signals before that, within the block."""
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    # Arguments of `__exit__`
    is_leaving = dis.opname[frame.f_code.co_code[frame.f_lasti]] == "LOAD_CONST"
    return is_leaving and re.fullmatch(r"with _\w+:", text) is not None


@contextlib.contextmanager
def traced(tracer: Tracer) -> Generator[None]:
    """Traces this thread."""
    sys.settrace(tracer)
    try:
        yield
    finally:
        sys.settrace(None)
