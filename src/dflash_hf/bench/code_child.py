"""The other side of [`dflash_hf.bench.code_runner`]: runs one program under limits, and says if it ran to its end.

It is started by its path in an interpreter of its own and imports nothing of this package.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import types
from collections.abc import Callable
from typing import Any

# Audit events (docs.python.org, "Audit events table") that end the run: processes, signals, the network, changes to
# files. What writes a file without one of these meets RLIMIT_FSIZE.
REFUSED = frozenset(
    (
        *(
            "os.exec",
            "os.fork",
            "os.forkpty",
            "os.kill",
            "os.killpg",
            "os.posix_spawn",
            "os.spawn",
            "os.system",
        ),
        *("pty.spawn", "subprocess.Popen"),
        *(
            "os.chflags",
            "os.chmod",
            "os.chown",
            "os.link",
            "os.mkdir",
            "os.remove",
            "os.removexattr",
            "os.rename",
        ),
        *(
            "os.rmdir",
            "os.setxattr",
            "os.symlink",
            "os.truncate",
            "os.utime",
            "sqlite3.connect",
            "webbrowser.open",
        ),
    )
)
REFUSED_FAMILIES = ("ctypes.", "shutil.", "socket.", "syslog.", "tempfile.")
# They act without audit events. NumPy, for one, does without ctypes.
REFUSED_MODULES = frozenset(("_cffi_backend", "_ctypes", "_posixshmem", "ctypes"))
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main() -> None:
    """Reads `{"program", "token", "seconds", "memory"}` from stdin; writes `{"token"}` or `{"error"}` to stdout."""
    request = json.load(sys.stdin)
    results = os.dup(sys.stdout.fileno())
    with open(os.devnull, "w") as nowhere:
        # What the program prints is nobody's business
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    _limit(request["seconds"], request["memory"])
    sys.addaudithook(_refuser(lambda event: _finish(results, {"error": f"refused: {event}"})))
    _finish(results, _run(request["program"], request["token"]))


def _run(program: str, token: str) -> dict[str, str]:
    # Not __main__: a demonstration at the end of an answer is no part of it
    module = types.ModuleType("answer")
    sys.modules[module.__name__] = module
    result = {"token": token}
    try:
        exec(compile(program, "answer.py", "exec"), module.__dict__)
    except BaseException as error:  # SystemExit too: the tests behind it have not run
        result = {"error": type(error).__name__}
    return result


def _finish(results: int, result: dict[str, str]) -> None:
    os.write(results, json.dumps(result).encode())
    os._exit(0)  # neither its threads nor its atexit functions are waited for


def _limit(seconds: float, memory: int) -> None:
    limits = {
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,  # of threads either; root is not bound by it
    }
    for kind, limit in limits.items():
        # macOS has no RLIMIT_AS; a limit may be lower already
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit, limit))


def _refuser(end: Callable[[str], None]) -> Callable[[str, tuple[Any, ...]], None]:
    def refuse(event: str, args: tuple[Any, ...]) -> None:
        if event == "import" and args[0] in REFUSED_MODULES:
            raise ImportError(f"{args[0]} is refused here")
        is_write = event == "open" and isinstance(args[2], int) and args[2] & WRITES
        # It ends here and now: an exception could be caught by the program.
        if is_write or event in REFUSED or event.startswith(REFUSED_FAMILIES):
            end(event)

    return refuse


if __name__ == "__main__":
    main()
