"""A run asks every question of every cell once, cells in turns, and one cell's failure is not another's."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from dflash_hf.bench import run as run_module
from dflash_hf.bench.cells import Cell, Options, RunSettings, make_cells
from dflash_hf.bench.methods import Method
from dflash_hf.bench.questions import Question
from dflash_hf.bench.run import Asker, Processes, rounds_of, seed_of
from dflash_hf.bench.run_files import RunFolder
from dflash_hf.generation import static_step
from dflash_hf.pair.answers import changed
from helpers.bench_runs import Asked, Pretended, answers_in, counts_in, settings_in
from helpers.static import TapeStep, use_tapes
from tiny import prompts, shallow_target, tiny_draft

Pretend = Callable[..., Asked]


def run_json(folder: Path) -> Any:
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))


def test_every_question_of_every_cell_once(tmp_path: Path, pretend: Pretend) -> None:
    settings = settings_in(tmp_path, methods=("plain", "dflash", "lookup"), batch=(1, 2), repeats=2)
    asked = pretend(settings)
    cells = make_cells(settings)
    names = [cell.model_id for cell in cells]
    assert names == [f"{method}-batch{size}" for method in settings.methods for size in (1, 2)]
    for cell in cells:
        mine = [texts for name, texts in asked if name == cell.model_id]
        if cell.failed is not None:
            assert (cell.model_id, mine) == ("lookup-batch2", [])
            continue
        assert max(map(len, mine)) == cell.options.batch
        first_turns = Counter(text for texts in mine for text in texts if text != "and then?")
        assert first_turns == Counter(
            {**{f"one {n}": 2 for n in range(5)}, **{f"two {n}": 2 for n in range(3)}}
        )
    found = answers_in(settings.out)
    for cell in cells:
        answers = found[f"answers-{cell.model_id}.jsonl"]
        assert len(answers) == (0 if cell.failed else 16)
        order = [(answer.repeat, answer.question_id) for answer in answers]
        assert order == sorted(order)
        assert all(
            len(answer.turns) == (1 if int(answer.question_id) < 5 else 2) for answer in answers
        )


def test_cells_take_turns_in_being_first(tmp_path: Path, pretend: Pretend) -> None:
    asked = pretend(settings_in(tmp_path, methods=("plain", "dflash", "stock"), repeats=3))
    calls = [(name, texts) for name, texts in asked if texts != ["and then?"]]
    rounds = [calls[start : start + 3] for start in range(0, len(calls), 3)]
    assert all(len({texts[0] for _, texts in one}) == 1 for one in rounds), (
        "every cell is asked before the next"
    )
    firsts = Counter(one[0][0] for one in rounds)
    assert max(firsts.values()) - min(firsts.values()) <= 1


def test_replies_are_fed_back_each_cells_own(
    tmp_path: Path, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[str], str | None]] = []
    real = Question.messages

    def noting(self: Question, answers: Any = (), system: str | None = None) -> Any:
        seen.append((list(answers), system))
        return real(self, answers, system)

    monkeypatch.setattr(Question, "messages", noting)
    settings = settings_in(tmp_path, system="Be brief.")
    pretend(settings)
    assert {system for _, system in seen} == {"Be brief."}
    fed = {answers[0] for answers, _ in seen if answers}
    first = {
        a.turns[0].text
        for rows in answers_in(settings.out).values()
        for a in rows
        if len(a.turns) == 2
    }
    assert fed == first
    assert len(fed) == 3, "plain and dflash are made up alike here"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        RuntimeError("no"),
        torch.OutOfMemoryError("no"),
        NotImplementedError("no"),
        AttributeError("no"),
        httpx.ConnectError("no"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_failure_is_a_row_that_says_why(
    error: Exception, tmp_path: Path, pretend: Pretend
) -> None:
    def before(name: str, texts: list[str]) -> None:
        if name == "dflash" and texts[0] in ("one 1", "and then?"):
            raise error

    settings = settings_in(tmp_path, repeats=1)
    pretend(settings, before)
    rows = counts_in(settings.out)
    wrong = {key[1]: why for key, _, why, _ in rows["answers-dflash.jsonl"] if why is not None}
    assert wrong == dict.fromkeys((1, 5, 6, 7), f"{type(error).__name__}: no")
    assert all(why is None for _, _, why, _ in rows["answers-plain.jsonl"])
    assert len(rows["answers-plain.jsonl"]) == len(rows["answers-dflash.jsonl"]) == 8


def test_a_cell_is_given_up_after_three_failures_in_a_row(tmp_path: Path, pretend: Pretend) -> None:
    def before(name: str, texts: list[str]) -> None:
        if name == "dflash" and texts[0] != "one 2":
            raise RuntimeError(f"cannot answer {texts[0]}")

    settings = settings_in(tmp_path)
    asked = pretend(settings, before)
    mine = [texts[0] for name, texts in asked if name == "dflash"]
    assert mine == ["one 0", "one 1", "one 2", "one 3", "one 4", "two 0"]
    assert Counter(name for name, texts in asked if texts != ["and then?"])["plain"] == 8
    plain, dflash = run_json(settings.out)["methods"]
    assert plain["failed"] is None
    assert (
        dflash["failed"]
        == "given up after 3 failures in a row, the last one: RuntimeError: cannot answer two 0"
    )


def test_an_error_of_our_own_ends_the_run(tmp_path: Path, pretend: Pretend) -> None:
    class Unknown(Exception):
        pass

    def before(name: str, texts: list[str]) -> None:
        raise Unknown

    with pytest.raises(Unknown):
        pretend(settings_in(tmp_path), before)


def test_seeds_are_the_questions_own() -> None:
    questions = [
        Question(dataset="a", question_id=number, category="", turns=("x",)) for number in range(3)
    ]
    seeds = {
        seed_of(seed, questions[first : first + 2], repeat, turn)
        for seed in (0, 1)
        for first in (0, 1)
        for repeat in (0, 1)
        for turn in (0, 1)
    }
    assert len(seeds) == 16
    # The same in every process: Python's own hashes are not.
    assert seed_of(0, questions[:1], 0, 0) == 65682267714995723


def test_rounds_are_filled_by_batches_of_every_size() -> None:
    questions = [
        Question(dataset=name, question_id=number, category="", turns=("x",) * turns)
        for name, turns in (("a", 1), ("a", 2), ("b", 1))
        for number in range(9)
    ]
    cells = [
        Cell(
            model_id=str(size), method="plain", options=Options(batch=size), values={"batch": size}
        )
        for size in (2, 3)
    ]
    rounds = rounds_of(questions, cells)
    assert [len(one) for one in rounds] == [6, 3] * 3
    assert all(len({(q.dataset, len(q.turns)) for q in one}) == 1 for one in rounds)
    assert [question for one in rounds for question in one] == questions


def test_the_record_says_what_was_run(tmp_path: Path, pretend: Pretend) -> None:
    settings = settings_in(tmp_path, temperature=(0.0, 0.8), seed=3)
    pretend(settings)
    run = run_json(settings.out)
    assert set(run) == {"settings", "methods", "provenance", "sessions"}
    assert [row["model_id"] for row in run["methods"]] == [
        "plain-temperature0",
        "plain-temperature0.8",
        "dflash-temperature0",
        "dflash-temperature0.8",
    ]
    assert [row["baseline"] for row in run["methods"]] == [
        None,
        None,
        "plain-temperature0",
        "plain-temperature0.8",
    ]
    (session,) = run["sessions"]
    assert session["seconds"] == pytest.approx(
        session["method_seconds"] + session["harness_seconds"]
    )
    assert (settings.out / "summary.json").is_file()
    assert (settings.out / "report.html").is_file()


def captured_by(
    settings: RunSettings, questions: list[Question], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, int, int]]:
    """Asks a tiny pair on tapes; returns each measured batch: its cell, its size, and what was captured for it."""
    use_tapes(monkeypatch, smallest_bucket=32)
    # As on a GPU, where one graph serves all lengths
    monkeypatch.setattr(static_step, "reads_lengths_on_device", lambda *caches: True)
    target: Any = shallow_target("qwen3")
    draft = tiny_draft(target)
    cells = make_cells(settings)
    measured: list[tuple[str, int, int]] = []

    def method_of(cell: Cell) -> Method:
        def generate(name: str, texts: list[str]) -> None:
            inputs = prompts([len(text) for text in texts], 0)
            arguments = cell.options.arguments()
            with changed(draft.generation_config, **cell.options.for_draft()):
                target.generate(**inputs, **arguments, assistant_model=draft)

        return Pretended(cell.model_id, [], generate)

    real = Asker._ask

    def noting(self: Asker, cell: Cell, batch: Any, repeat: int) -> Any:
        before = len(TapeStep.captured)
        answers = real(self, cell, batch, repeat)
        assert not [answer.error for answer in answers if answer.has_failed]
        measured.append((cell.model_id, len(batch), len(TapeStep.captured) - before))
        return answers

    monkeypatch.setattr(Asker, "_ask", noting)
    methods = {cell.model_id: method_of(cell) for cell in cells}
    folder = RunFolder(settings.out)
    folder.write_questions(questions)
    asker = Asker(settings, cells, methods, folder, Processes("cpu"), questions, [draft])
    asker.ask_all()
    return measured


def questions_of(lengths: list[int]) -> list[Question]:
    """Questions whose prompts have so many tokens."""
    return [
        Question(dataset="any", question_id=number, category="", turns=("x" * length,))
        for number, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    ("given", "lengths", "is_kept"),
    [
        ({"batch": (1, 2)}, [5, 5, 5, 5], True),
        ({"verify_width": (2, 3, 4, 5, 6)}, [5, 5], False),
        ({"temperature": (0.5, 0.6, 0.7, 0.8, 0.9)}, [5, 5], False),
        # The last batch is smaller, and the longest prompt is not in the first one.
        ({"batch": (1, 2)}, [5, 9, 30, 7, 6], True),
    ],
    ids=["kept", "shapes", "settings", "sizes"],
)
def test_no_measured_call_captures(
    given: dict[str, Any],
    lengths: list[int],
    is_kept: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(run_module, "WARM_UP_TOKENS", 64)
    settings = settings_in(tmp_path, methods=("dflash",), **{"max_new_tokens": (4,), **given})
    measured = captured_by(settings, questions_of(lengths), monkeypatch)
    assert TapeStep.captured, "the first calls of each shape have captured"
    assert not [call for call in measured if call[2]]
    sizes = {cell.model_id: cell.options.batch for cell in make_cells(settings)}
    answered = Counter[str]()
    for name, size, _ in measured:
        answered[name] += size
    assert answered == dict.fromkeys(sizes, len(lengths))
    names = [name for name, _, _ in measured]
    are_in_turns = len(list(itertools.groupby(names))) > len(sizes)
    assert are_in_turns == is_kept
    assert ("one cell after the other" in caplog.text) != is_kept


def test_a_long_prompt_is_asked_before_many_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "WARM_UP_TOKENS", 64)
    settings = settings_in(tmp_path, methods=("dflash",), max_new_tokens=(4,))
    talk = Question(dataset="talk", question_id=0, category="", turns=("x" * 5, "x" * 5))
    measured = captured_by(settings, [talk, *questions_of([90, 5])], monkeypatch)
    assert TapeStep.captured, "the first calls of each shape have captured"
    assert [call for call in measured if call[2]] == []


def test_the_method_whose_static_cache_is_longest_is_warmed_up_first(tmp_path: Path) -> None:
    """Transformers keeps one length of static caches for all calls of a target."""
    settings = settings_in(tmp_path, methods=("plain-static", "stock-static"), block_size=(4, None))
    asked: Asked = []
    cells = make_cells(settings)
    methods: dict[str, Method] = {cell.model_id: Pretended(cell.model_id, asked) for cell in cells}
    folder = RunFolder(settings.out)
    questions = questions_of([5])
    folder.write_questions(questions)
    Asker(settings, cells, methods, folder, Processes("cpu"), questions).ask_all()
    warmed_up = [name for name, _ in asked[:3]]
    assert warmed_up == ["stock-static-blockdefault", "stock-static-block4", "plain-static"]


def test_a_cell_that_was_given_up_is_not_warmed_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed_up: list[tuple[str, int]] = []

    def noting(self: Asker, left: Any) -> bool:
        warmed_up.extend((cell.model_id, len(batch)) for cell, _, batch in left[:1])
        return True

    def fail(name: str, texts: list[str]) -> None:
        if name == "dflash":
            raise ValueError("no")

    monkeypatch.setattr(Asker, "_warm_up", noting)
    settings = settings_in(tmp_path, batch=(2,))
    cells = make_cells(settings)
    methods: dict[str, Method] = {
        cell.model_id: Pretended(cell.model_id, [], fail) for cell in cells
    }
    folder = RunFolder(settings.out)
    questions = questions_of([5] * 7)
    folder.write_questions(questions)
    Asker(settings, cells, methods, folder, Processes("cpu"), questions).ask_all()
    # The first call is for all cells, the others are for one cell and size each.
    assert Counter(warmed_up[1:]) == Counter([("plain", 2), ("plain", 1), ("dflash", 2)])
