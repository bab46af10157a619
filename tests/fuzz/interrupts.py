"""An interrupt at a random moment of a call: models, caches and hooks must be as before, and the next call right.

A timer's signal raises KeyboardInterrupt wherever Python is then, as Ctrl-C does. Which line that is follows from the
machine, so a case that fails need not fail again: `tests/equality/test_interrupts.py` interrupts at chosen lines.
"""

from __future__ import annotations

import copy
import signal
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from transformers import Cache

from dflash_hf.cache.prefilled import stored_columns
from fuzz.cases import Case, images, texts
from fuzz.check import Conversation, check_left, counts, sequences_of
from fuzz.targets import left_behind, target_of


@dataclass(frozen=True)
class InterruptCase:
    """A conversation, and when its last call is interrupted: a share of the time that it takes."""

    case: Case
    share: float


def interrupts() -> st.SearchStrategy[InterruptCase]:
    """Conversations whose calls run in the main thread, which is the one that gets signals."""
    return st.builds(
        InterruptCase,
        st.one_of(texts(), texts(), texts(), images()).map(_in_main_thread),
        st.floats(0, 1),
    )


def _in_main_thread(case: Case) -> Case:
    # An interrupt inside torch loses the `with torch.device(...)` that is open, whoever calls.
    return replace(case, context=None if case.context in ("thread", "meta") else case.context)


class Alarm:
    """Raises KeyboardInterrupt in the main thread some seconds after it is entered, once.

    Args:
        seconds (`float`): How many.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        self.before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, max(self.seconds, 1e-6))

    def __exit__(self, *exc: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)


def check(interrupt: InterruptCase) -> None:
    """Runs a case.

    Raises:
        AssertionError: If something was left behind, or the next call is wrong.
    """
    case = interrupt.case
    target = target_of(case.target)
    conversation = Conversation(case, target)
    if not all(conversation.take(turn) for turn in case.turns[:-1]):
        return
    turn = conversation.fitted(case.turns[-1])
    if turn is None:
        return
    conversation.type(turn.typed)
    given, cache = conversation.given(turn), conversation.caches[1]
    untouched, finished = copy.deepcopy(cache), copy.deepcopy(cache)
    _, truth = conversation.reference(turn, given, conversation.caches[0])
    begun = time.perf_counter()
    whole = sequences_of(conversation.drafted(turn, given, finished, truth)[0])
    seconds = time.perf_counter() - begun
    before = left_behind(target)
    try:
        conversation.drafted(turn, given, cache, truth, Alarm(interrupt.share * seconds))
    except KeyboardInterrupt:
        counts["interrupted"] += 1
    check_left(before, left_behind(target))
    if cache is not None:
        assert untouched is not None
        assert finished is not None
        # It came when all was done, or not at all
        if cache.get_seq_length() == finished.get_seq_length():
            cache = untouched
        else:
            check_unchanged(cache, untouched)
    again = conversation.drafted(turn, given, cache, truth)[0]
    assert torch.equal(sequences_of(again), whole)
    check_left(before, left_behind(target))


def check_unchanged(cache: Cache, before: Cache) -> None:
    """Compares a cache with a copy of it, bit by bit.

    Raises:
        AssertionError: If it holds anything else.
    """
    assert len(cache.layers) == len(before.layers)
    for now, then in zip(cache.layers, before.layers, strict=True):
        a, b = (
            {k: v for k, v in vars(layer).items() if k not in ("keys", "values")}
            for layer in (now, then)
        )
        assert a.keys() == b.keys()
        assert all(_same(a[name], b[name]) for name in a), [
            name for name in a if not _same(a[name], b[name])
        ]
        if getattr(now, "keys", None) is not None:
            # Behind what a static layer holds is scratch.
            assert all(map(torch.equal, stored_columns(now), stored_columns(then)))


def _same(now: Any, then: Any) -> bool:
    if isinstance(now, dict):
        return now.keys() == then.keys() and all(_same(now[key], then[key]) for key in now)
    return torch.equal(now, then) if isinstance(now, torch.Tensor) else now == then
