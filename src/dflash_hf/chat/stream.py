"""From token ids as `generate` commits them to text, run by run, and the way to stop it."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

# Runs that `generate` may be ahead of its reader before it waits for it, and for how many seconds it does.
MAX_AHEAD = 4096
PATIENCE = 30.0
BROKEN = "\ufffd"  # what tokenizers show for bytes that are no character


class Stopped(Exception):
    """Raised inside `generate` to end it: the person asked for that, or nobody reads the answer any more."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Ids that were committed together, and when: seconds since the call."""

    ids: list[int]
    seconds: float


class RunStreamer(BaseStreamer):
    """Hands committed runs to another thread, and ends the run when told to.

    Args:
        stop (`threading.Event`): Ends the run at the next commit.
    """

    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop
        self.started = time.perf_counter()
        self.arrivals: queue.Queue[Arrival] = queue.Queue(MAX_AHEAD)
        self.waits_for_prompt = True
        self.num_tokens = 0

    def begin(self) -> None:
        """Starts the clock: called right before `generate`."""
        self.started = time.perf_counter()

    def put(self, value: Any) -> None:
        """Takes the prompt first and drops it, then committed tokens.

        Raises:
            Stopped: If the run is to end.
        """
        if self.stop.is_set():
            raise Stopped
        if self.waits_for_prompt:
            self.waits_for_prompt = False
            return
        assert isinstance(value, Tensor)
        self.num_tokens += value.numel()
        arrival = Arrival(value.reshape(-1).tolist(), time.perf_counter() - self.started)
        try:
            self.arrivals.put(arrival, timeout=PATIENCE)
        except queue.Full as error:
            raise Stopped from error

    def end(self) -> None:
        """Nothing to do: the thread that called `generate` knows when it returns."""

    def drain(self, wait: float) -> list[Arrival]:
        """Returns what has arrived; waits up to so many seconds for the first."""
        found: list[Arrival] = []
        try:
            found.append(self.arrivals.get(timeout=wait) if wait else self.arrivals.get_nowait())
            while True:
                found.append(self.arrivals.get_nowait())
        except queue.Empty:
            return found


class RunText:
    """Turns growing ids into text: a character that spans tokens appears with its last one.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's; special tokens are left out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        # Text of ids[context:shown] has been given out; decoding begins at `context`, since a token's text may depend
        # on those before it.
        self.context = 0
        self.shown = 0

    def add(self, ids: list[int]) -> str:
        """Returns the text that these ids add, up to the last whole character."""
        self.ids += ids
        newest = len(self.ids)
        text = self._decode(self.context, newest)
        # A character has at most four bytes, so its missing part at most three tokens; what ends in none is broken.
        for end in range(newest, max(self.shown, newest - 4), -1):
            whole = text if end == newest else self._decode(self.context, end)
            if not whole.endswith(BROKEN):
                return self._give_out(whole, end)
        return self._give_out(text, newest) if newest - self.shown >= 4 else ""

    def _give_out(self, text: str, end: int) -> str:
        before = self._decode(self.context, self.shown)
        self.context, self.shown = self.shown, end
        return text[len(before) :]

    def _decode(self, start: int, end: int) -> str:
        return str(self.tokenizer.decode(self.ids[start:end], skip_special_tokens=True))


__all__ = ["Arrival", "RunStreamer", "RunText", "Stopped"]
