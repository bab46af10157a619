"""This script is the child process of [`dflash_hf.bench.scores`]: it runs math-verify, or one program, under limits.

    python -P score_child.py math        asks math-verify, one answer a line, until stdin ends
    python -I -B score_child.py code     runs one program, and says if it ran to its end

It is started by its path in its own interpreter and imports nothing of this package. In the child, math-verify's time
limits work: they are signals and need a main thread. The parent can kill what they do not interrupt. Memory is
limited.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import types
from collections.abc import Callable
from typing import Any

MATH_MEMORY = 4 * 2**30  # bytes of address space
# Audit events (docs.python.org, "Audit events table") that end the run: processes, signals, the network, and changes
# to files. A write to a file without one of these events meets RLIMIT_FSIZE.
REFUSED_PROCESSES = (
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.kill",
    "os.killpg",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "pty.spawn",
    "subprocess.Popen",
)
REFUSED_CHANGES = (
    "os.chflags",
    "os.chmod",
    "os.chown",
    "os.link",
    "os.mkdir",
    "os.remove",
    "os.removexattr",
    "os.rename",
    "os.rmdir",
    "os.setxattr",
    "os.symlink",
    "os.truncate",
    "os.utime",
    "sqlite3.connect",
    "webbrowser.open",
)
REFUSED_FAMILIES = ("ctypes.", "shutil.", "socket.", "syslog.", "tempfile.")
# These modules act without audit events. NumPy, for example, works without ctypes.
REFUSED_MODULES = ("_cffi_backend", "_ctypes", "_posixshmem", "ctypes")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def answer_math() -> None:
    """Writes `"ready"`, then `true` or `false` for each line `[reference, answer]` of stdin."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # Windows has no such limits.
    with contextlib.suppress(ImportError):
        import resource

        _set_limits({resource.RLIMIT_AS: MATH_MEMORY})
    logging.disable(logging.CRITICAL)  # a time limit is no error here: the answer counts as wrong
    extraction = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    _write_line("ready")
    for line in sys.stdin:
        reference, answer = json.loads(line)
        _write_line(verify(parse(reference, extraction), parse(answer, extraction)))


def _write_line(reply: str | bool) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


def run_code() -> None:
    """Reads `{"program", "token", "seconds", "memory"}` from stdin. Writes `{"token"}` or `{"error"}` to stdout.

    The token proves that the program ran to its end, because the program itself does not know it.
    """
    import resource

    request = json.load(sys.stdin)
    results = os.dup(sys.stdout.fileno())
    with open(os.devnull, "w") as nowhere:
        # The program's own output is dropped.
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    limits = {
        resource.RLIMIT_CPU: int(request["seconds"]) + 1,
        resource.RLIMIT_AS: request["memory"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,  # this forbids threads too; root is not bound by it
    }
    _set_limits(limits)

    def refuse(event: str) -> None:
        _finish(results, {"error": f"refused: {event}"})

    sys.addaudithook(_hook(refuse))
    _finish(results, _run(request["program"], request["token"]))


def _set_limits(limits: dict[int, int]) -> None:
    import resource

    for kind, limit in limits.items():
        # macOS has no RLIMIT_AS, and a limit may already be lower.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit, limit))


def _hook(refuse: Callable[[str], None]) -> Callable[[str, tuple[Any, ...]], None]:
    """Returns an audit hook that calls `refuse` with each event that is refused."""
    refused = frozenset((*REFUSED_PROCESSES, *REFUSED_CHANGES))

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "import" and args[0] in REFUSED_MODULES:
            raise ImportError(f"{args[0]} is refused here")
        is_write = event == "open" and isinstance(args[2], int) and args[2] & WRITES
        # The run ends here at once, because the program could catch an exception.
        if is_write or event in refused or event.startswith(REFUSED_FAMILIES):
            refuse(event)

    return hook


def _run(program: str, token: str) -> dict[str, str]:
    # The module is not __main__, so that a demonstration at the end of an answer does not run.
    module = types.ModuleType("answer")
    sys.modules[module.__name__] = module
    result = {"token": token}
    try:
        exec(compile(program, "answer.py", "exec"), module.__dict__)
    except BaseException as error:  # SystemExit too, because the tests after it have not run
        result = {"error": type(error).__name__}
    return result


def _finish(results: int, result: dict[str, str]) -> None:
    os.write(results, json.dumps(result).encode())
    os._exit(0)  # without waiting for the program's threads and atexit functions


if __name__ == "__main__":
    if sys.argv[1] == "math":
        answer_math()
    else:
        run_code()
