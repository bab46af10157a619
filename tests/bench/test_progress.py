"""The progress bar says how a cell does so far, and is drawn by the thread that asks alone."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from dflash_hf.bench import progress
from dflash_hf.bench.answers import Answer, Turn
from dflash_hf.bench.progress import Bars


def answer(committed: list[int] | None, tokens: int, seconds: float) -> Answer:
    turn = Turn(
        text="",
        token_ids=[],
        new_tokens=tokens,
        prompt_tokens=1,
        wall_time=seconds,
        latency=seconds,
        committed=committed,
    )
    return Answer(
        dataset="a", question_id=1, category="", model_id="dflash", tstamp=0.0, turns=(turn,)
    )


def test_running_acceptance_and_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, threads = io.StringIO(), threading.active_count()
    monkeypatch.setattr(
        progress,
        "Console",
        lambda stderr: Console(file=screen, force_terminal=True, width=120, no_color=True),
    )
    monkeypatch.setattr(progress, "SECONDS_BETWEEN", 0.0)
    with Bars({"plain": 2, "dflash": 2}) as bars:
        bars.add("plain", [answer(None, 10, 2.0)])
        bars.add("dflash", [answer([4, 3], 8, 1.0)])
        assert "acceptance 3.50" in screen.getvalue()
        bars.add("dflash", [answer([1], 2, 1.0)])
        bars.give_up("plain")
        assert threading.active_count() == threads
    shown = screen.getvalue()
    assert "5.0 tokens/s" in shown
    assert "5.0 tokens/s, acceptance 2.67" in shown
    assert "given up" in shown
    assert "2/2" in shown


def test_nothing_is_shown_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with Bars({"dflash": 1}) as bars:
        bars.add("dflash", [answer([1], 2, 1.0)])
        bars.give_up("dflash")
    assert capfd.readouterr() == ("", "")
