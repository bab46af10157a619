"""Runs a program that a model wrote, against the tests of HumanEval or MBPP, in a process of its own under limits.

What keeps it in, from the inside out:

* an audit hook ([`dflash_hf.bench.code_child`]): the first process, signal, socket, or change to a file ends the run;
* limits of the kernel: CPU time, memory, no bytes into files, no processes and threads (root is not bound by that);
* a time limit, at which the process and its group are killed;
* an environment without variables of the user's, and a temporary folder to work in, which is removed;
* on Linux, where user namespaces are permitted (containers often forbid them): no network, and a process namespace, so
  that nothing outlives the program. Where they are not, the log says so once.

It keeps in what models write by mistake. It is no sandbox against a program that is written to get out: that finds
functions without audit events, reads files, and without namespaces leaves processes. For such, use a container.
"""

from __future__ import annotations

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
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflash_hf.errors import require

logger = logging.getLogger(__name__)

SECONDS = 10.0
MEMORY = 2**30
_NAMESPACES = ("--user", "--map-current-user", "--pid", "--fork", "--kill-child", "--net", "--ipc")
# A block in a fence, or its beginning where the answer was cut off.
_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)


def assemble(reference: Mapping[str, Any], text: str) -> str:
    """Builds the program that passes if an answer is right.

    Of the answer counts the last fenced block that defines the function asked for; else, of HumanEval, the last block
    or the whole text as what the prompt's function goes on with; of MBPP, the last block that defines a function or
    class, the last block, or the whole text. A block of HumanEval stands behind the prompt, whose imports and helpers
    it may use.

    Args:
        reference (mapping): HumanEval's `{"prompt", "test", "entry_point"}`, or MBPP's `{"tests": [...], "imports":
            [...]}`.
        text (`str`): The answer.

    Raises:
        ValueError: If the reference is neither.
    """
    is_humaneval = reference.keys() >= {"prompt", "test", "entry_point"}
    require(
        is_humaneval or "tests" in reference,
        'a reference {"prompt", "test", "entry_point"} or {"tests", "imports"} for code',
        dict(reference),
        "fix the question's reference",
    )
    blocks = [textwrap.dedent(block) for block in _BLOCK.findall(text)]
    name = re.escape(reference["entry_point"]) if is_humaneval else r"\w+"
    defining = re.compile(rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{name}\b", re.MULTILINE)
    chosen = ([block for block in blocks if defining.search(block)] or blocks or [text])[-1]
    if not is_humaneval:
        return "\n".join([*reference.get("imports", ()), chosen, *reference["tests"]])
    prompt = reference["prompt"]
    function = reference["entry_point"]
    if defining.search(chosen):
        # The prompt's own function has a docstring for a body, and is defined anew
        program = f"{prompt}\n{chosen}"
    else:
        program = prompt + (textwrap.indent(chosen, "    ") if blocks else chosen)
    return f"{program}\n{reference['test']}\ncheck({function})\n"


def failure(program: str, *, seconds: float = SECONDS, memory: int = MEMORY) -> str | None:
    """Runs a program to its end, or to a limit.

    Args:
        program (`str`): Python, run by the interpreter and with the packages of this process.
        seconds (`float`): How long it may take, by the clock and of the CPU; the interpreter's start included.
        memory (`int`): Bytes of address space.

    Returns:
        `str` or `None`: What ended it: the name of an exception, `"time limit"`, what was refused, or `"killed"`;
        `None` if it ran to its end.

    Raises:
        ValueError: On Windows, which has no such limits.
    """
    require(
        os.name == "posix",
        "Linux or macOS to run a model's code on",
        os.name,
        "leave out --run-code",
    )
    token = secrets.token_hex()
    request = json.dumps({"program": program, "token": token, "seconds": seconds, "memory": memory})
    command = [sys.executable, "-I", "-B", str(Path(__file__).with_name("code_child.py"))]
    if _has_namespaces():
        command = [str(shutil.which("unshare")), *_NAMESPACES, *command]
    with (
        tempfile.TemporaryDirectory(prefix="dflash-hf-code-") as folder,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={
                "HOME": folder,
                "TMPDIR": folder,
                "PATH": os.defpath,
                "LANG": "C.UTF-8",
                "OMP_NUM_THREADS": "1",
            },
            start_new_session=True,
            text=True,
        ) as process,
    ):
        try:
            output = process.communicate(request, timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            return "time limit"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    try:
        result = json.loads(output)
    # Nothing is said where the kernel, or the program itself, has ended the child
    except json.JSONDecodeError:
        return "killed"
    return None if result.get("token") == token else result.get("error", "killed")


@functools.cache
def _has_namespaces() -> bool:
    """Returns True if a program may be run without network and in a process namespace."""
    unshare = shutil.which("unshare")
    if unshare is None:
        reason = "there is no `unshare` here"
    else:
        trial = subprocess.run(
            [unshare, *_NAMESPACES, "true"], capture_output=True, text=True, check=False
        )
        reason = trial.stderr.strip() if trial.returncode else None
    if reason is not None:
        logger.warning(
            "a model's code runs without namespaces of its own, under its other limits: %s", reason
        )
    return reason is None
