"""The names of the checkpoint layouts; what they are is in `checkpoints`, which needs torch."""

from typing import Literal

Layout = Literal["dflash", "zlab", "speculators", "muse", "deepspec"]

__all__ = ["Layout"]
