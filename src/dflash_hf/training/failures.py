"""What ends a training: a checkpoint that cannot be written, and a step that is not finite.

Their messages say what to do in Python. The command line takes what was `found` of them, and says what to do there.
"""

from __future__ import annotations


class CheckpointError(OSError):
    """Raised where a checkpoint cannot be written.

    Args:
        found (`str`): What was expected, and what was found.
        action (`str`): What to do in Python.
    """

    def __init__(self, found: str, action: str) -> None:
        super().__init__(f"{found}; {action}")
        self.found = found


class NotFiniteError(FloatingPointError):
    """Raised at a step whose gradients are not finite; arguments as of [`CheckpointError`]."""

    def __init__(self, found: str, action: str) -> None:
        super().__init__(f"{found}; {action}")
        self.found = found
