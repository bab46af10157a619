"""Running cases in rounds: a hypothesis run of a few dozen cases from one seed, which repeats them all.

A round that fails has been made as small as hypothesis can make it, and says so with the seed that brings it back.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from transformers.utils import logging

from fuzz import cases, check, hostile, interrupts
from fuzz.targets import IMAGES, TEXT

KINDS = ("text", "images", "interrupts", "hostile")
CASES_PER_ROUND = 50
PHASES = (Phase.generate, Phase.shrink)


@dataclass
class Round:
    """What came of a round.

    Args:
        kind (`str`): One of `KINDS`.
        number (`int`): Its seed.
        num_cases (`int`): Cases that were run to their end.
        counts (`dict`): What happened besides, by name.
        failure (`str`, *optional*): The smallest case that fails, and how.
    """

    kind: str
    number: int
    num_cases: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    failure: str | None = None


def prepare() -> None:
    """Prepares a process for rounds: one thread, and no words of Transformers'."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def cases_of(
    kind: str, target: str | None = None
) -> tuple[st.SearchStrategy[Any], Callable[[Any], None]]:
    """Returns how cases of a kind are drawn and checked.

    Raises:
        ValueError: If there is no such kind, or no such target among its own.
    """
    if kind not in KINDS:
        raise ValueError(
            f"expected a kind of case among {', '.join(KINDS)}, got {kind!r}; name one of them"
        )
    targets = {"text": TEXT, "images": IMAGES}.get(kind, ())
    if target is not None and target not in targets:
        known = ", ".join(targets) or "none: its targets are drawn"
        raise ValueError(
            f"expected a target for {kind} among {known}; got {target!r}; name one, or another kind"
        )
    chosen = (target,) if target else targets
    if kind == "text":
        return cases.texts(chosen), check.check
    if kind == "images":
        return cases.images(chosen), check.check
    if kind == "interrupts":
        return interrupts.interrupts(), interrupts.check
    return hostile.cases(), hostile.check


def play(
    kind: str, number: int, num_cases: int, deadline: float, target: str | None = None
) -> Round:
    """Runs a round.

    Args:
        kind (`str`): One of `KINDS`.
        number (`int`): Its seed: the same one draws the same cases.
        num_cases (`int`): How many.
        deadline (`float`): `time.monotonic()` after which no case begins.
        target (`str`, *optional*): The only target to use.
    """
    found = Round(kind, number)
    strategy, check_one = cases_of(kind, target)
    failed: list[str] = []
    # A moment is never hit twice: what has failed is reported as it was.
    phases = PHASES[:1] if kind == "interrupts" else PHASES

    @seed(number)
    @settings(
        max_examples=num_cases,
        phases=phases,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(strategy)
    def run(case: Any) -> None:
        if time.monotonic() > deadline and not failed:
            return
        try:
            check_one(case)
        except Exception as error:
            if type(error).__module__.startswith("hypothesis"):
                raise  # no case
            failed.append(f"{case}\n\n{''.join(traceback.format_exception(error, limit=-6))}")
            raise
        if not failed:
            found.num_cases += 1

    check.counts.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run()
        except Unsatisfiable:  # no case among them: counted by its reason
            pass
        except BaseException as error:
            if not failed:
                raise
            # The last one to fail is the smallest.
            found.failure = failed[-1] if isinstance(error, Exception) else failed[0]
    found.counts = dict(check.counts)
    return found
