"""What a checkpoint may say about sampling beside temperature, top-p and top-k, set so that it leaves out no token.

The command line, the chat and the benchmark sample as they are asked to, whatever the target's own config says.
"""

from __future__ import annotations

from typing import Any, Final

NO_FILTERS: Final[dict[str, Any]] = {
    "min_p": None,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
