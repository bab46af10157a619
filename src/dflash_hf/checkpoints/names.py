"""The names of the checkpoint formats; what they are is in `checkpoints`, which needs torch."""

from typing import Literal

FormatName = Literal[
    "dflash", "laguna", "zlab", "speculators", "muse", "deepspec-gemma4", "deepspec"
]
