"""What Transformers logs as deprecated on calls that this package makes.

Warnings of Python's are errors by `filterwarnings` in pyproject.toml. Transformers says much of it in its log alone.
"""

from __future__ import annotations

import logging
import sys
from types import FrameType

# Whose frames stand between a call and what is logged about it.
BETWEEN = {"contextlib", "functools", "helpers", "logging", "torch", "transformers"}
# Functions of this package that hand on calls of `generate` as they are: the caller's arguments, not ours.
SHIM = ("dflash_hf.patching", "generate")
HANDED_ON = {SHIM, ("dflash_hf.generation.generate", "generate_with")}


class DeprecationLog(logging.Handler):
    """Keeps the records of a logger, and of those below it, that call something deprecated that `package` has called.

    Args:
        package (`str`): The name of the package; who else calls may call what they like.
    """

    def __init__(self, package: str) -> None:
        super().__init__(logging.WARNING)
        self.package = package
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the message of a record that is about a call of the package's."""
        message = record.getMessage()
        if "deprecated" in message.lower() and caller(sys._getframe()) == self.package:
            self.messages.append(message)


def caller(frame: FrameType | None) -> str | None:
    """Returns the package of the innermost frame that is not only in between, or `None` if all are.

    `generate` may be called by Transformers itself, for an assistant model: then that is the caller.
    """
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        function = (module, frame.f_code.co_name)
        package = module.partition(".")[0]
        if package not in BETWEEN and function not in HANDED_ON:
            return package
        if function == SHIM and _package_of(frame.f_back) == "transformers":
            return "transformers"
        frame = frame.f_back
    return None


def _package_of(frame: FrameType | None) -> str:
    """The package whose code a frame runs."""
    return "" if frame is None else frame.f_globals.get("__name__", "").partition(".")[0]
