"""Whether answers are right: mathematics by math-verify, code by its tests, choices by their letter, or word for word.

A mark that is not clear counts as wrong. What stands before the last `</think>` is no part of an answer.
"""

from __future__ import annotations

import atexit
import json
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_hf.bench.answers import Answer
from dflash_hf.bench.code_runner import assemble, failure
from dflash_hf.bench.questions import Question
from dflash_hf.errors import require, shown

logger = logging.getLogger(__name__)

# Seconds for one answer. math-verify has limits of 5 seconds of its own, for parsing and for each comparison.
MATH_SECONDS = 40.0
# GSM8K's own end of an answer; in Markdown the same mark begins a heading, which has words.
_BEHIND_MARK = re.compile(r"####[ \t]*([-$]*[\d.,]*\d)[ \t]*%?\.?[ \t]*$", re.MULTILINE)
# Formatting goes before a letter is looked for; bold type becomes brackets, since it marks one as well.
_BOLD = re.compile(r"\*\*\s*\(?([A-Z])[.:)]*\s*\*\*")
_STYLED = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\{([^{}]*)\}")
_STYLE = re.compile(r"\\[()\[\]]|[*`$\"']")
_LETTER = r"\(?([A-HJ-Z])\)?(?!\w)"  # I is a word
# "The answer is (B)", "Answer: B", "the correct option is B", "option B is correct"; then perhaps "or C".
_STATED = re.compile(
    r"(?i:\b(?:answer|(?:correct|right|best)\s+(?:option|choice))\b[^\w.?!]{0,4}(?:is|would\s+be|must\s+be)?"
    rf"[^\w.?!]{{0,4}}(?:option\s+)?){_LETTER}(?:\s*(?:,|/|&|or\b|and\b)\s*{_LETTER})?"
    rf"|(?i:\b(?:option|choice)\s+){_LETTER}(?=\s+is\s+(?:the\s+)?(?:correct|right|best|answer))"
)
# Letters that are marked as an option: "(B)", or "B)", "B." and "B:" at the beginning of a line.
_MARKED = re.compile(
    r"\(([A-Z])\)(?!\s+is\s+(?:wrong|incorrect|false|not))|^\s*([A-HJ-Z])[.:)](?=\s|$)",
    re.MULTILINE,
)
_ALONE = re.compile(r"\W*([A-Za-z])\W*")


def score(question: Question, answer: Answer, *, run_code: bool = False) -> float | None:
    """Returns how right an answer is: 1.0, or 0.0.

    The first turn is compared with the reference. Where the reference is a list, each turn is compared with its own
    item, and the mean counts; items that are `None` do not.

    Args:
        question (`Question`): With a reference: of `"math"` a number or expression as text, LaTeX or not; of
            `"letter"` a letter; of `"exact"` the text, but for space around it; of `"code"` what [`assemble`] takes.
        answer (`Answer`): To that question; one that failed, or has too few turns, is wrong.
        run_code (`bool`): Runs the program in an answer, on this machine; [`failure`] says what keeps it in.

    Returns:
        `float` or `None`: `None` where there is no right answer, or it is code and not run.

    Raises:
        ValueError: If the reference is of another kind.
        ImportError: For mathematics, without math-verify.
    """
    if (
        question.score is None
        or question.reference is None
        or (question.score == "code" and not run_code)
    ):
        return None
    references = (
        question.reference if isinstance(question.reference, list) else [question.reference]
    )
    texts = [turn.text for turn in answer.turns]
    texts += [""] * (len(references) - len(texts))
    right = [
        _is_right(question.score, reference, said(text))
        for reference, text in zip(references, texts, strict=False)
        if reference is not None
    ]
    return sum(right) / len(right) if right else None


def said(text: str) -> str:
    """Returns what an answer says once it has thought; nothing, if it never stops thinking."""
    thought, end, rest = text.rpartition("</think>")
    if end:
        return rest
    return "" if rest.lstrip().startswith("<think>") else thought + rest


def final_answer(text: str) -> str:
    r"""Returns the part of a text that mathematics is read from.

    It is the last `\boxed{...}`, else the number behind the last `####`, as GSM8K has it, else the whole text, of
    which math-verify takes what follows "the answer is", or the last number or expression.
    """
    if (boxed := _boxed(text)) is not None:
        return f"\\boxed{{{boxed}}}" if boxed else ""
    marked = _BEHIND_MARK.findall(text)
    return marked[-1] if marked else text


def chosen_letter(text: str) -> str | None:
    r"""Returns the letter of the option that a text chooses, or `None` where that is not clear.

    Only the last `\boxed{...}` is looked at where there is one. In this order: a text that is a letter and nothing
    else; the letter of the last "answer is B", "Answer: (B)", "option B is correct" and the like, which is none with
    another behind it ("B or C"); the one letter that is marked as an option, by brackets, bold type, or a mark behind
    it at the beginning of a line.
    """
    boxed = _boxed(text)
    text = text if boxed is None else boxed
    text = _STYLE.sub("", _STYLED.sub(r"\1", _BOLD.sub(r"(\1)", text)))
    if alone := _ALONE.fullmatch(text):
        return alone.group(1).upper()
    if stated := list(_STATED.finditer(text)):
        letters = set(filter(None, stated[-1].groups()))
    else:
        letters = {next(filter(None, groups)) for groups in _MARKED.findall(text)}
    return letters.pop() if len(letters) == 1 else None


def _boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}`, which is nothing where the text ends within it; None without one."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    start = text.index("{", start)
    depth = 0
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0) if text[index - 1] != "\\" else 0
        if depth == 0:
            return text[start + 1 : index]
    return ""


def _is_right(kind: str, reference: Any, text: str) -> bool:
    if kind == "code":
        require(
            isinstance(reference, Mapping),
            "a mapping as reference for code",
            reference,
            "fix the question",
        )
        return failure(assemble(reference, text)) is None
    is_text = isinstance(reference, str | int | float) and not isinstance(reference, bool)
    require(is_text, f"a text as reference for {kind}", reference, "fix the question's reference")
    if kind == "letter":
        return chosen_letter(text) == str(reference).strip().strip("().").upper()
    if kind == "exact":
        return text.strip() == str(reference).strip()
    require(kind == "math", 'score "math", "code", "letter" or "exact"', kind, "fix the question")
    return _MATH.is_right(str(reference), final_answer(text))


class _Math:
    """math-verify in a process of its own, started when it is first needed, and anew when it had to be killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def is_right(self, reference: str, text: str) -> bool:
        """Returns True if a text says what a reference does; what takes too long, or breaks the process, does not."""
        if not text.strip():
            return False
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:
                process = self._start()
            reply = self._ask(process, [f"\\boxed{{{reference}}}", text])
            if reply is None:
                logger.warning(
                    "an answer counts as wrong: math-verify came to no end with %s", shown(text)
                )
                self.close()
            return reply is True

    def close(self) -> None:
        """Ends the process, if there is one."""
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> subprocess.Popen[str]:
        if find_spec("math_verify") is None:
            raise ImportError(
                "expected math-verify for scores of mathematics, got none; pip install 'dflash-hf[bench]'"
            )
        # -P: the folder of the script is no place to import from, it has modules of common names.
        command = [sys.executable, "-P", str(Path(__file__).with_name("math_child.py"))]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._process = process
        if self._read(process) != "ready":
            self.close()
            raise RuntimeError(
                f"expected {' '.join(command)} to start, got exit status {process.returncode}"
            )
        return process

    def _ask(self, process: subprocess.Popen[str], request: list[str]) -> Any:
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._read(process)

    def _read(self, process: subprocess.Popen[str]) -> Any:
        """The next reply, or None where the process died, or was killed because none came."""
        assert process.stdout is not None
        limit = threading.Timer(MATH_SECONDS, process.kill)
        limit.start()
        try:
            line = process.stdout.readline()
        finally:
            limit.cancel()
        return json.loads(line) if line.endswith("\n") else None


_MATH = _Math()
atexit.register(_MATH.close)
