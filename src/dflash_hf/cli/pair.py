"""The bundled pairs, and loading any pair, for the subcommands.

Subcommands import torch and Transformers when they run: `--help` and a wrong option are answered without.
"""

from __future__ import annotations

from pathlib import Path

from dflash_hf.evaluation.loading import check_place, load_pair, takes_images

# A clone has the bundled pair beside the package; an installed wheel has not.
BUNDLED = Path(__file__).resolve().parents[3] / "demos" / "toy"
VISION = "vision"  # the folder of a pair for images within that of a pair for texts
BUNDLED_VISION = BUNDLED / VISION


__all__ = ["BUNDLED", "BUNDLED_VISION", "VISION", "check_place", "load_pair", "takes_images"]
