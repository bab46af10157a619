"""An interrupt at any line of a call leaves models, hooks and caches as they were, and the next call right."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dflash_hf.undo import Hook, calling, hooked, undo_stale, undoing
from fuzz.cases import Case, Turn
from fuzz.check import Conversation, check_left, sequences_of
from fuzz.interrupts import check_unchanged
from fuzz.targets import forget, left_behind, target_of
from helpers.interrupt import Tracer, traced

pytestmark = pytest.mark.same_on_every_release

CASES = {
    "eager": Case(
        "qwen3-sliding",
        lengths=(3, 6),
        cache="dynamic",
        turns=(Turn(new=2), Turn(typed=2, new=7)),
    ),
    "recurrent": Case(
        "qwen3.5",
        lengths=(3, 6),
        cache="dynamic",
        turns=(Turn(new=2, engine="static"), Turn(typed=2, new=7, engine="static")),
    ),
    "hooks of the user's": Case(
        "qwen3", lengths=(3,), context="hooks", turns=(Turn(new=7, criterion="token"),)
    ),
    "tape": Case(
        "qwen3",
        lengths=(3, 6),
        cache="static",
        turns=(Turn(new=2, engine="tape"), Turn(typed=2, new=7, engine="tape", width="auto")),
    ),
}


@pytest.fixture(autouse=True)
def forget_models() -> Iterator[None]:
    yield
    forget()


def interrupt(case: Case, num_points: int | None) -> None:
    """Interrupts the last call of a case at so many of its lines, drawn at random, or at all that it reaches."""
    target = target_of(case.target)
    conversation = Conversation(case, target)
    assert all(conversation.take(turn) for turn in case.turns[:-1])
    turn = case.turns[-1]
    conversation.type(turn.typed)
    given, cache = conversation.given(turn), conversation.caches[1]
    _, truth = conversation.reference(turn, given, copy.deepcopy(conversation.caches[0]))

    def call(**around: Any) -> torch.Tensor:
        return sequences_of(
            conversation.drafted(turn, given, copy.deepcopy(cache), truth, **around)[0]
        )

    finished = copy.deepcopy(cache)
    # What happens once in a process happens here.
    conversation.drafted(turn, given, finished, truth)
    seen = Tracer()
    text = call(around=traced(seen))
    points = seen.points()
    before = left_behind(target)
    random.Random(0).shuffle(points)
    wanted = num_points or len(points)
    num_reached = 0
    num_interrupted = 0
    gc.collect()
    gc.freeze()  # what other tests have left is looked through once, not at every point
    for point in points:
        if num_reached == wanted:
            break
        ours = copy.deepcopy(cache)
        tracer = Tracer(point)
        try:
            conversation.drafted(turn, given, ours, truth, around=traced(tracer))
        except KeyboardInterrupt:
            num_interrupted += 1
        # Widths follow the clock, so that a run may have fewer steps than the one that was counted: others are drawn.
        num_reached += tracer.at is None
        gc.collect()  # an interrupt in contextlib's own code leaves a cycle
        check_left(before, left_behind(target))
        if ours is not None:
            assert cache is not None
            assert finished is not None
            if ours.get_seq_length() == cache.get_seq_length():
                check_unchanged(ours, cache)
            else:
                # The interrupt came when all was done, or not at all. Widths follow the clock and roundings the
                # widths, so that the lengths alone are equal.
                assert ours.get_seq_length() == finished.get_seq_length()
        assert torch.equal(call(), text), point
    assert num_interrupted > 0.7 * num_reached  # in `__del__` and its like they are swallowed
    if num_points is None:
        assert num_reached >= 0.5 * wanted
    else:
        assert num_reached == num_points


@pytest.mark.parametrize("name", CASES)
def test_an_interrupt_at_some_lines(name: str) -> None:
    interrupt(CASES[name], 10)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CASES)
def test_an_interrupt_at_every_line(name: str) -> None:
    interrupt(CASES[name], None)


def test_hooks_held_by_a_traceback_go_at_the_next_call() -> None:
    # As in a notebook, which keeps the last traceback.
    target = target_of("qwen3")
    before = left_behind(target)

    def listen(*args: Any) -> None:
        pass

    def holds() -> None:
        with calling():
            scope = hooked(Hook(target, listen))
            scope.__enter__()
            raise KeyboardInterrupt

    try:
        holds()
    except KeyboardInterrupt as error:
        kept = error
    assert left_behind(target)["hooks"] != before["hooks"]
    target.generate(torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=False)
    check_left(before, left_behind(target))
    assert kept.__traceback__ is not None


def test_changes_that_calls_further_up_wait_for_stay() -> None:
    values = ["before"]

    def put_back() -> None:
        values[0] = "before"

    with calling(), undoing(put_back):
        values[0] = "changed"
        undo_stale()
        assert values == ["changed"]
    assert values == ["before"]
    with undoing(put_back):
        values[0] = "changed"
        undo_stale()
        assert values == ["changed"], "of no call, such as a training step"


def test_taking_back_is_done_again_if_it_is_interrupted() -> None:
    calls: list[int] = []

    def put_back() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), undoing(put_back):
        pass
    assert len(calls) >= 2
    undo_stale()
    num_calls = len(calls)
    undo_stale()
    assert len(calls) == num_calls
