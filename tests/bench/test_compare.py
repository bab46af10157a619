"""`compare`: what changed is found, what did not change is not, and runs that cannot be compared are refused."""

import io
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dflash_hf.bench.answers import Answer, Turn
from dflash_hf.bench.compare import Change, compare, comparison_tables
from dflash_hf.bench.summary import summarize
from helpers.bench_run import answers_of, questions, simple_score, write_run

ASKED = questions(20)
Answers = dict[str, list[Answer]]


def run(
    folder: Path, answers: Answers, change: Callable[[dict[str, Any]], None] | None = None
) -> Path:
    write_run(folder, ASKED, answers, change)
    summarize(folder, simple_score)
    return folder


def turns(answers: Answers, name: str, change: Callable[[Turn], Turn]) -> Answers:
    """The answers, one method's turns changed."""
    changed = [replace(answer, turns=tuple(map(change, answer.turns))) for answer in answers[name]]
    return {**answers, name: changed}


def find(changes: list[Change], name: str, quantity: str, dataset: str = "all sets") -> Change:
    [found] = [
        c for c in changes if (c.dataset, c.model_id, c.quantity) == (dataset, name, quantity)
    ]
    return found


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("before"), answers_of(ASKED, repeats=1))


def test_a_run_equals_itself(before: Path) -> None:
    found = compare(before, before)
    assert found.changes
    assert found.beyond_noise == []
    assert found.conditions == []
    assert found.left_out == []
    for change in found.changes:
        assert change.before == pytest.approx(change.after)
        assert change.count in (15, 20, 40, 60, 80)


def test_a_change_is_found_and_noise_is_not(before: Path, tmp_path: Path) -> None:
    """One method 10 % faster, every other's times another by chance: only that one is said to have changed."""
    rng = random.Random(3)

    def time(turn: Turn, factor: float) -> Turn:
        factor *= rng.uniform(0.97, 1.03)
        return replace(turn, wall_time=turn.wall_time * factor, latency=turn.latency * factor)

    answers = answers_of(ASKED, repeats=1)
    for name in answers:
        factor = 1 / 1.1 if name == "dflash" else 1.0
        answers = turns(answers, name, lambda turn, factor=factor: time(turn, factor))
    found = compare(before, run(tmp_path / "after", answers))
    changed = {(c.model_id, c.quantity) for c in found.beyond_noise if c.dataset == "all sets"}
    assert changed == {("dflash", "tokens/s"), ("dflash", "speed-up")}
    alarms = [c for c in found.beyond_noise if c.model_id != "dflash"]
    assert len(alarms) <= 0.03 * len(found.changes)
    change = find(found.changes, "dflash", "tokens/s")
    assert change.low is not None
    assert change.high is not None
    assert change.low < 1.1 < change.high
    assert change.high - change.low < 0.03
    assert change.after / change.before == pytest.approx(1.1, abs=0.01)


def test_a_slower_machine_moves_tokens_per_second_and_no_speed_up(
    before: Path, tmp_path: Path
) -> None:
    answers = answers_of(ASKED, repeats=1)
    for name in answers:
        answers = turns(answers, name, lambda turn: replace(turn, wall_time=turn.wall_time * 1.5))
    found = compare(before, run(tmp_path / "after", answers))
    assert {change.quantity for change in found.beyond_noise} == {"tokens/s"}
    assert find(found.changes, "dflash", "speed-up").after == pytest.approx(
        find(found.changes, "dflash", "speed-up").before
    )


def test_acceptance_accuracy_and_texts(before: Path, tmp_path: Path) -> None:
    def worse(turn: Turn) -> Turn:
        assert turn.committed is not None
        halved = [
            part for count in turn.committed for part in ((count + 1) // 2, count // 2) if part
        ]
        return replace(
            turn,
            committed=halved,
            accepted=None,
            proposed=None,
            text="no",
            token_ids=[*turn.token_ids, 5],
        )

    answers = turns(answers_of(ASKED, repeats=1), "dflash", worse)
    found = compare(before, run(tmp_path / "after", answers))
    changed = {(c.model_id, c.quantity) for c in found.beyond_noise}
    assert changed == {
        ("dflash", "acceptance length"),
        ("dflash", "accuracy"),
        ("dflash", "same text"),
    }
    accuracy = find(found.changes, "dflash", "accuracy", "gsm8k")
    assert accuracy.after == 0
    assert accuracy.count == 20
    assert find(found.changes, "dflash", "same text").after == 0
    length = find(found.changes, "dflash", "acceptance length")
    assert length.high is not None
    assert length.high < 0
    # Five questions lost of twenty may be chance: an exact test of 5 against 0 has p = 0.0625.
    few = [
        a if i > 4 else replace(a, turns=tuple(replace(t, text="?") for t in a.turns))
        for i, a in enumerate(
            a
            for a in answers_of(ASKED, repeats=1)["plain"]
            if a.dataset == "gsm8k" and "boxed" in a.turns[0].text
        )
    ]
    rest = [a for a in answers_of(ASKED, repeats=1)["plain"] if a.key not in {b.key for b in few}]
    found = compare(before, run(tmp_path / "few", {"plain": [*few, *rest]}))
    accuracy = find(found.changes, "plain", "accuracy", "gsm8k")
    assert accuracy.before - accuracy.after == pytest.approx(0.25)
    assert not accuracy.is_beyond_noise


def test_answers_that_fail_are_not_right(before: Path, tmp_path: Path) -> None:
    answers = answers_of(ASKED, repeats=1)
    answers["dflash"] = [
        a if i % 2 else replace(a, turns=(), error="no room")
        for i, a in enumerate(answers["dflash"])
    ]
    found = compare(before, run(tmp_path / "after", answers))
    assert find(found.changes, "dflash", "accuracy").is_beyond_noise
    assert find(found.changes, "dflash", "tokens/s").count == 40


def test_the_tables_say_it_and_what_else_differs(before: Path, tmp_path: Path) -> None:
    def other(record: dict[str, Any]) -> None:
        record["settings"] = {**record["settings"], "seed": 7}
        record["provenance"] = {
            **record["provenance"],
            "date": "later",
            "command": "other",
            "threads": 4,
        }

    answers = answers_of(ASKED, repeats=1)
    del answers["lookup"]
    answers = turns(answers, "dflash", lambda turn: replace(turn, wall_time=turn.wall_time / 2))
    found = compare(before, run(tmp_path / "[after]", answers, other))
    assert found.conditions == [("settings.seed", "0", "7"), ("provenance.threads", "1", "4")]
    assert found.left_out == ["lookup"]
    console = Console(width=200, file=io.StringIO())
    for table in comparison_tables(found):
        console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "provenance.threads" in text
    assert "+100.0 %" in text
    assert "better" in text
    assert "[after]" in text
    assert f"{len(found.beyond_noise)} of {len(found.changes)} numbers changed beyond noise" in text
    assert "only one of the runs has lookup" in text


def test_sampled_texts_may_differ(before: Path, tmp_path: Path) -> None:
    def heat(record: dict[str, Any]) -> None:
        for method in record["methods"]:
            method["options"] = {"temperature": 0.7}

    answers = turns(
        answers_of(ASKED, repeats=1), "plain", lambda turn: replace(turn, token_ids=[1])
    )
    found = compare(before, run(tmp_path / "after", answers, heat))
    assert "same text" not in {change.quantity for change in found.changes}


def test_runs_with_nothing_in_common_are_refused(before: Path, tmp_path: Path) -> None:
    other = [replace(question, turns=("Something else?",)) for question in questions(2)]
    with pytest.raises(ValueError, match="expected two runs with a question in common, got gsm8k"):
        compare(before, write_run(tmp_path / "questions", other, {}))
    answers = {"mine": [replace(a, model_id="mine") for a in answers_of(ASKED, repeats=1)["plain"]]}
    with pytest.raises(
        ValueError, match=r"expected two runs with a method in common, got .*plain.* and mine"
    ):
        compare(before, write_run(tmp_path / "methods", ASKED, answers))
    with pytest.raises(ValueError, match=r"expected the folder of a run, with run\.json"):
        compare(before, tmp_path)
