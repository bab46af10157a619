"""A share of the fuzzer, as `make fuzz` runs it, and the proof that it sees faults that are put in on purpose.

A hundred times as many cases: `make fuzz CASES=1000 SECONDS=3600`. Faults that the first round shows late: `-m slow`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner, Result

from dflash_hf.generation import options
from dflash_hf.generation.choice_costs import StepTimes
from fuzz import check, rounds
from fuzz.__main__ import app
from fuzz.faults import FAULTS
from fuzz.targets import forget

# Rounds whose first cases show a fault that others show late.
SOON = {
    "one proposal too many is accepted": 2,
    "matches behind a mismatch count": 21,
    "a window one too wide": 5,
    "a stale mask": 3,
    "a position off by one": 2,
    "a rejected token seen by a processor": 6,
    "noise that follows the slot": 3,
    "a kept cache one token off": 2,
    "a conversation that goes on one position off": 2,
    "a recurrent state not put back": 6,
    "a criterion asked too late": 10,
    "a streamer that gets too much": 41,
    "scores of the wrong token": 3,
}
NUM_CASES = {"text": 8, "images": 4, "interrupts": 4, "hostile": 14}


@pytest.fixture(autouse=True)
def forget_models() -> Iterator[None]:
    """A fault may leave something on them, and some have other rules than Transformers' own."""
    yield
    forget()


def fuzz(*options: str) -> Result:
    """Runs the command; its cases run in a process that is forked from this one, since they patch what they run."""
    return CliRunner().invoke(app, ["--jobs", "1", *options])


@pytest.mark.parametrize("kind", NUM_CASES)
def test_cases_of_every_kind_hold(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "StepTimes", StepTimes)  # by the clock, as `make fuzz` does
    asked = ("--cases", str(NUM_CASES[kind]), "--seed", "1", "--seconds", "60")
    done = fuzz("--kind", kind, *asked)
    assert done.exit_code == 0, done.output
    found = re.search(rf"{kind}: (\d+) cases from seed 1, 0 failed", done.stdout)
    assert found is not None, done.output
    # Some draws are no case; behind the deadline none is run.
    assert int(found[1]) >= NUM_CASES[kind] // 2, done.output


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *(pytest.param(name, SOON.get(name, 1), id=name) for name in FAULTS),
        *(
            pytest.param(name, 1, marks=pytest.mark.slow, id=f"{name}, in the first round")
            for name in SOON
        ),
    ],
)
def test_a_fault_put_in_on_purpose_is_seen_within_300_cases(
    name: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    # Seen is enough; the smallest case is for people.
    monkeypatch.setattr(rounds, "PHASES", rounds.PHASES[:1])
    fault.put_in(monkeypatch)
    found = rounds.play(fault.kind, number, 300, time.monotonic() + 200)
    assert found.failure is not None
    assert "AssertionError" in found.failure or "left behind" in found.failure


def test_the_printed_case_and_seed_bring_a_failure_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_long_answers(case: object) -> None:
        assert case.turns[0].new < 7  # pyright: ignore[reportAttributeAccessIssue]

    monkeypatch.setattr(check, "check", no_long_answers)
    found = [rounds.play("text", 5, 50, time.monotonic() + 60).failure for _ in range(2)]
    assert found[0] is not None
    assert found[0] == found[1]
    assert "new=7" in found[0]
    assert "target='qwen2'" in found[0]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--seed", "abc"), "expected a whole number as seed, got 'abc'"),
        (("--seed", "-1"), "expected a whole number as seed"),
        (("--seconds", "0"), "expected a time limit above 0 seconds, got 0"),
        (("--target", "qwen99", "--kind", "text"), "got 'qwen99'"),
        (("--kind", "texts"), "got 'texts'"),
        (("--jobs", "0"), "expected at least one process"),
        (("--cases", "-3"), "no negative number of cases"),
    ],
)
def test_requests_that_make_no_sense_end_in_a_sentence(
    options: tuple[str, ...], sentence: str
) -> None:
    done = fuzz(*options)
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.output
