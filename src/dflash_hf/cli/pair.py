"""The bundled pairs, and loading any pair.

Subcommands import torch and Transformers when they run: `--help` and a wrong option are answered without.
"""

from __future__ import annotations

from pathlib import Path

from dflash_hf.evaluation.loading import load_pair

# A clone has the bundled pair beside the package; an installed wheel has not.
BUNDLED = Path(__file__).resolve().parents[3] / "demos" / "toy"
BUNDLED_VISION = BUNDLED / "vision"  # the pair for images lies within that for texts

__all__ = ["BUNDLED", "BUNDLED_VISION", "load_pair"]
