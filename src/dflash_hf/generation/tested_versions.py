"""The newest Transformers that the tests have passed on, and what is said on a newer one. Nothing is decided by it."""

from __future__ import annotations

import functools
from typing import Any

import transformers
from packaging.version import Version
from transformers.utils import logging

# As constraints.txt pins it.
NEWEST_TRANSFORMERS = "5.24.0"

logger: Any = logging.get_logger(__name__)


@functools.cache  # both versions stay the same as long as the process runs
def warn_if_newer() -> None:
    """Logs one line, once, if the installed Transformers is newer than the newest one that was tested."""
    if Version(transformers.__version__) > Version(NEWEST_TRANSFORMERS):
        logger.warning(
            f"DFlash drafts were tested with Transformers up to {NEWEST_TRANSFORMERS}; this is "
            f"{transformers.__version__}, which may have changed what they rely on"
        )
