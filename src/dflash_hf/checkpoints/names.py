"""This module lists the names of the checkpoint formats. `checkpoints` defines them, but needs torch."""

from typing import Literal

FormatName = Literal[
    "dflash", "laguna", "zlab", "speculators", "muse", "deepspec-gemma4", "deepspec"
]
