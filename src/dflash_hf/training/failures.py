"""What ends a training: a checkpoint that cannot be written, and a step that is not finite.

Their messages say what to do in Python. The command line takes what was `found` of them, and says what to do there.
"""

from __future__ import annotations

from dflash_hf.errors import one_line


class TrainingFailure(Exception):
    """What ends a training.

    Args:
        found (`str`): What was expected, and what was found; kept on one line.
        action (`str`): What to do in Python.
    """

    def __init__(self, found: str, action: str) -> None:
        self.found = one_line(found)
        super().__init__(f"{self.found}; {action}")


class CheckpointError(TrainingFailure, OSError):
    """Raised where a checkpoint cannot be written."""


class NotFiniteError(TrainingFailure, FloatingPointError):
    """Raised at a step whose gradients are not finite."""
