"""The bundled pairs, loading any pair, and reading options that several subcommands have.

Subcommands import torch and Transformers when they run: `--help` and a wrong option are answered without.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from dflash_hf.errors import require
from dflash_hf.evaluation.loading import check_place, load_pair, takes_images

# A clone has the bundled pair beside the package; an installed wheel has not.
BUNDLED = Path(__file__).resolve().parents[3] / "demos" / "toy"
VISION = "vision"  # the folder of a pair for images within that of a pair for texts
BUNDLED_VISION = BUNDLED / VISION
SMOLLM2 = BUNDLED.parent / "smollm2"  # a draft; `make real` fetches its target
PAIRS = ("text", "vision", "hybrid", "smollm2")
MAX_TOKENS = 2**31 - 1  # of an answer: what a tensor of counts holds
MAX_SEED = 2**32 - 1


def named_pair(name: str) -> tuple[str, str]:
    """Returns the folders of target and draft of a pair that comes with a clone.

    Args:
        name (`str`): One of `PAIRS`.

    Raises:
        ValueError: If there is no such pair, or its target has not been fetched.
    """
    require(name in PAIRS, f"--pair among {', '.join(PAIRS)}", name, "name one of them, or give --target and --draft")
    if name != "smollm2":
        folder = BUNDLED if name == "text" else BUNDLED / name
        return str(folder / "target"), str(folder / "draft")
    target = BUNDLED.parents[1] / "build" / "smollm2" / "target-bf16"
    require(target.is_dir(), f"SmolLM2 in {target}", None, "run `make real` first, which fetches it")
    return str(target), str(SMOLLM2 / "draft")


def template_options(text: str, no_thinking: bool) -> dict[str, Any]:
    """Returns the options of a chat template, from `--chat-template-kwargs` and `--no-thinking`.

    Raises:
        ValueError: If the text is no JSON object.
    """
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(
            f"expected a JSON object as --chat-template-kwargs, got {text!r}; write it in one pair of '...'"
        )
    return {**found, **({"enable_thinking": False} if no_thinking else {})}


def width_of(text: str) -> int | Literal["auto"]:
    """Returns what `--verify-width` says; raises `ValueError` if it is neither a whole number nor `auto`."""
    return "auto" if text == "auto" else int(text)


__all__ = [
    "BUNDLED",
    "BUNDLED_VISION",
    "MAX_SEED",
    "MAX_TOKENS",
    "PAIRS",
    "VISION",
    "check_place",
    "load_pair",
    "named_pair",
    "takes_images",
    "template_options",
    "width_of",
]
