"""What counts as right: mathematics, letters, programs, and that nothing hangs, leaks or is right by accident."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from dflash_hf.bench import scores
from dflash_hf.bench.answers import Answer, Turn
from dflash_hf.bench.counting import measure
from dflash_hf.bench.questions import Question, Score
from dflash_hf.bench.scores import chosen_letter, final_answer, score


def turn_of(text: str, **fields: Any) -> Turn:
    """A turn that says a text."""
    return Turn(
        text=text,
        token_ids=[],
        new_tokens=0,
        prompt_tokens=0,
        wall_time=0.0,
        latency=0.0,
        **fields,
    )


def said(text: str) -> str:
    """What a text says once it has thought."""
    return turn_of(text).said


def scored(kind: Score | None, reference: Any, *texts: str, run_code: bool = False) -> float | None:
    """The score of an answer of some turns."""
    question = Question(
        dataset="s",
        question_id=1,
        category="c",
        turns=("?",) * len(texts),
        reference=reference,
        score=kind,
    )
    turns = tuple(map(turn_of, texts))
    answer = Answer(dataset="s", question_id=1, category="c", model_id="m", tstamp=0.0, turns=turns)
    return score(question, answer, run_code=run_code)


MATH = [
    ("18", "She has 16 - 3 = 13 left, and then makes $18 a day.\n#### 18", 1),
    ("33", "Express the answer as 32 / 96 * 100% = 33.3%, which rounds down to 33%\n#### 33", 1),
    ("70000", "The profit is $70,000.", 1),
    ("70000", "\\boxed{\\$70{,}000}", 1),
    ("10", "so it costs $10.00", 1),
    ("3", "First \\boxed{2}. No, it is \\boxed{3}.", 1),
    ("2", "First \\boxed{2}. No, it is \\boxed{3}.", 0),
    ("3", "\\boxed{3} in 4 steps", 1),
    ("\\frac{1}{2}", "That is $0.5$.", 1),
    ("\\left( 3, \\frac{\\pi}{2} \\right)", "we get $\\boxed{(3, \\pi/2)}$", 1),
    ("\\text{Anna}", "\\boxed{Anna}", 1),
    ("\\text{Anna}", "\\boxed{Hanna}", 0),
    ("x^2+2x+1", "\\[\\boxed{(x+1)^2}\\]", 1),
    ("(-\\infty, 2]", "\\boxed{(-\\infty, 2)}", 0),
    ("5", "\\boxed{x = 5}", 1),
    ("5", "it begins \\boxed{5", 0),
    ("5", "", 0),
    ("5", "nothing to count", 0),
    ("5", "#### Step 1: add 2 and 3\nThat makes 5.", 1),
    ("5", "#### 1. Add\n2 + 3 = 5\n#### Result\nThe answer is 5.", 1),
    ("5", "<think>It is 7.</think>The answer is 5.", 1),
    ("5", "<think>It may be 5", 0),
]


@pytest.mark.parametrize(("reference", "text", "right"), MATH)
def test_mathematics(reference: str, text: str, right: int) -> None:
    assert scored("math", reference, text) == right


LETTERS = {
    "A": ["A", "(A)", " a.\n", "**A**", "\\boxed{A}", "$\\boxed{\\text{A}}$", "\\boxed{A. red}", "The answer is A",
          "**Answer:** A", "**Answer: A**", "Answer:\nA", "<answer>A</answer>", "The answer is \\textbf{(A)}",
          "the answer is $A$.", "A: red", "A. red\n\nB is wrong because it is blue.", "The correct option is A: red",
          "Options B and C do not fit, so option A is correct.", "Not (B)?\nThe answer is B. Wait. The answer is A.",
          "I choose **A** as it is red.", "The best choice is (A), because (B) is wrong.", "(B) is wrong. So (A).",
          "#### B\nis what most say.\n#### Answer: A", "#### Conclusion\nThe answer is A."],
    None: ["", "E5", "A red car.", "The answer is a red car", "The answer is A or B", "The answer is (A) and (B).",
           "(A) or (B)", "A. red\nB. blue", "The answer is Amber", "That is the answer. I think so.",
           "The answer is I am not sure", "I think so", "It is \\boxed{A", "\\boxed{AB}"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("letter", "text"), [(letter, text) for letter, texts in LETTERS.items() for text in texts]
)
def test_letters(letter: str | None, text: str) -> None:
    assert chosen_letter(text) == letter
    assert scored("letter", "A", text) == (letter == "A")
    assert scored("letter", "B", text) == 0


def test_what_has_no_right_answer_is_not_scored() -> None:
    assert scored(None, None, "anything") is None
    assert scored(None, "5", "5") is None
    assert scored("math", None, "5") is None
    assert scored("code", {"tests": ["assert False"]}, "x = 1") is None, (
        "code is run only where that is asked for"
    )


def test_turns() -> None:
    assert scored("letter", "A", "A", "B") == 1, "one reference is the first turn's"
    assert scored("letter", ["A", "C"], "A", "B") == 0.5
    assert scored("letter", ["A", None], "A", "B") == 1
    assert scored("letter", [None, None], "A", "B") is None
    assert scored("letter", ["A", "B"], "A") == 0.5, "a turn that is missing is wrong"
    assert scored("letter", "A") == 0, "a method that failed has not answered"


def test_code_is_scored_by_its_tests() -> None:
    reference = {
        "prompt": "def twice(x):\n",
        "test": "def check(f):\n    assert f(3) == 6\n",
        "entry_point": "twice",
    }
    assert scored("code", reference, "    return 2 * x\n", run_code=True) == 1
    assert scored("code", reference, "    return x\n", run_code=True) == 0


@pytest.mark.parametrize(
    ("kind", "reference"),
    [("math", {"answer": 1}), ("letter", True), ("code", "x"), ("code", {"answer": 1})],
)
def test_reference_of_another_kind_is_refused(kind: Score, reference: Any) -> None:
    with pytest.raises(ValueError, match=r"expected .* reference .*got .*; fix the question"):
        scored(kind, reference, "5", run_code=True)


@pytest.mark.parametrize(
    ("text", "right", "is_cut"),
    [
        ("It may be 5", 0.0, True),
        ("It may be 7.</think>The answer is 5.", 1.0, False),
        ("It is 5.</think>", 0.0, False),
    ],
)
def test_a_thought_that_the_prompt_opened_is_no_answer(
    text: str, right: float, is_cut: bool
) -> None:
    question = Question(
        dataset="s", question_id=1, category="c", turns=("?",), reference="5", score="math"
    )
    turn = turn_of(text, begins_in_thought=True, finish_reason="length")
    answer = Answer(
        dataset="s", question_id=1, category="c", model_id="m", tstamp=0.0, turns=(turn,)
    )
    assert score(question, answer) == right
    assert measure([answer], 64)["ended_in_thought"] == is_cut
    assert Answer.from_dict(answer.to_dict()) == answer


def test_pieces() -> None:
    assert said("<think>a</think>b") == "b"
    assert said("a</think>b") == "b", "some templates open the thought themselves"
    assert said("\n<think>a") == ""
    assert said("a") == "a"
    assert final_answer("\\boxed{1} \\boxed{\\frac{1}{\\}2}}, x") == "\\boxed{\\frac{1}{\\}2}}"
    assert final_answer("a\n#### $-5,000.\nb 6") == "$-5,000"
    assert final_answer("a\n#### 5 apples\nb") == "a\n#### 5 apples\nb"
    assert final_answer("it is \\boxed{5") == ""
    assert final_answer("a 5") == "a 5"


def test_mathematics_from_another_thread_and_many() -> None:
    results: dict[int, float | None] = {}
    threads = [
        threading.Thread(
            target=lambda n=n: results.update({n: scored("math", str(n), f"\\boxed{{{n % 3}}}")})
        )
        for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {n: float(n < 3) for n in range(6)}


def test_what_does_not_end_is_wrong_and_the_next_is_scored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert scored("math", "5", "5") == 1  # the process is there
    monkeypatch.setattr(scores, "MATH_SECONDS", 1.0)
    started = time.monotonic()
    # No signal interrupts this power: math-verify's own limits do not end it.
    assert scored("math", "5", "\\boxed{9^{9^{9^{9}}}}") == 0
    assert time.monotonic() - started < 20
    assert "counts as wrong" in caplog.text
    monkeypatch.undo()
    assert scored("math", "5", "5") == 1
    process = scores._MATH._process
    assert process is not None
    process.kill()
    process.wait()
    assert scored("math", "5", "5") == 1


def test_without_math_verify_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "_MATH", scores._Math())
    monkeypatch.setattr(scores, "find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=r"expected math-verify .*pip install 'dflash-hf\[bench\]'"
    ):
        scored("math", "5", "5")


def test_a_process_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "_MATH", scores._Math())
    monkeypatch.setattr(scores.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="to start, got exit status 1"):
        scored("math", "5", "5")
