"""One run at a time, each in a thread of its own, watched from another one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Literal

from transformers.utils import logging

from dflash_hf.chat.stream import Arrival, RunStreamer, Stopped

IDLE = 0.5  # seconds between two looks at a run of which nothing comes
MANY_RUNS = 100  # that make looks half as frequent

logger: Any = logging.get_logger(__name__)


class Job:
    """Calls something in a thread once a lock is free; leaving the `with` block tells it to end, and does not wait.

    It is left from a server's event loop too, which must not stand still for the rest of a prefill.

    Args:
        free (`threading.Lock`): Held during the call.
        stop (`threading.Event`): Ends the wait for the lock; the streamers of the call look at it too.
        call (callable): What to do.

    Attributes:
        state (`str`): `"waiting"` for the lock, `"running"`, then `"done"`, `"stopped"` or `"failed"`.
        error (`str`): One sentence, after a failure; the stack trace is in the log.
    """

    def __init__(self, free: threading.Lock, stop: threading.Event, call: Callable[[], None]) -> None:
        self.free = free
        self.stop = stop
        self.call = call
        self.state: Literal["waiting", "running", "done", "stopped", "failed"] = "waiting"
        self.error = ""
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="dflash-chat-run", daemon=True)

    def __enter__(self) -> Job:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.over.is_set():
            self.stop.set()

    def watch(self, streamer: RunStreamer, tick: float) -> Generator[list[Arrival]]:
        """Yields what a streamer of the call got: the first at once, the rest every `tick` seconds, until the end.

        More seldom the longer the answer, since a page draws all of it anew; and where nothing comes, only as often as
        a clock needs it. A page that is busy drawing does not hear its buttons.
        """
        shown, runs, first = -IDLE, 0, tick
        while True:
            tick = first * (1 + runs / MANY_RUNS)
            # Asked first, so that nothing can arrive between the last look and the end.
            over = self.over.is_set()
            started = time.perf_counter()
            arrivals = streamer.drain(0.0 if over else tick)
            runs += len(arrivals)
            if arrivals or (not over and started - shown >= IDLE):
                shown = started
                yield arrivals
            if over:
                return
            self.over.wait(max(0.0, tick - (time.perf_counter() - started)))

    def _run(self) -> None:
        try:
            while not self.free.acquire(timeout=0.1):
                if self.stop.is_set():
                    self.state = "stopped"
                    return
            try:
                self.state = "running"
                self.call()
                self.state = "done"
            finally:
                self.free.release()
        except Stopped:
            self.state = "stopped"
        except ValueError as error:
            self.state, self.error = "failed", str(error)
        except Exception as error:
            logger.error("A run of the chat failed.", exc_info=error)
            self.state = "failed"
            self.error = f"The run failed ({type(error).__name__}); the server's log says more. The chat goes on."
        finally:
            self.over.set()


__all__ = ["Job"]
