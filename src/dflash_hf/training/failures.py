"""This module defines the errors that end a training: a checkpoint that cannot be written, a step that is not finite.

Their messages say what to do in Python. The command line uses only `found`, and adds advice for the command line.
"""

from __future__ import annotations

from dflash_hf.errors import one_line


class TrainingFailure(Exception):
    """An error that ends a training.

    Args:
        found (`str`): The part of the message that says what was expected and what was found. It is put on one line.
        action (`str`): The part of the message that says what to do in Python.
    """

    def __init__(self, found: str, action: str) -> None:
        self.found = one_line(found)
        super().__init__(f"{self.found}; {action}")


class CheckpointError(TrainingFailure, OSError):
    """Raised if a checkpoint cannot be written."""


class NotFiniteError(TrainingFailure, FloatingPointError):
    """Raised at a step whose gradients are not finite."""
