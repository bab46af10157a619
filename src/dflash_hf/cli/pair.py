"""The bundled pairs, loading any pair, and reading options that several subcommands have.

Subcommands import torch and Transformers when they run: `--help` and a wrong option are answered without.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from dflash_hf.errors import require
from dflash_hf.evaluation.loading import load_pair

# A clone has the bundled pair beside the package; an installed wheel has not.
BUNDLED = Path(__file__).resolve().parents[3] / "demos" / "toy"
BUNDLED_VISION = BUNDLED / "vision"  # the pair for images lies within that for texts
_TOY = "A toy, trained in this repository. It knows only what it was trained for:"
ABOUT = {  # what a pair of the clone can be asked
    "text": f"{_TOY} sums, short Python functions, records as JSON or YAML, and small talk.",
    "vision": f"{_TOY} drawings of shapes, signs and bar charts. Ask what is where, how many, or what is written.",
    "hybrid": f"{_TOY} short Python functions, records as JSON or YAML, and small talk.",
    "smollm2": "A real language model, a very small one: what it says is often wrong, with the draft and without.",
}
MAX_TOKENS = 2**31 - 1  # of an answer: what a tensor of counts holds
MAX_SEED = 2**32 - 1


def _folders(name: str) -> tuple[Path, Path]:
    if name == "smollm2":  # in float32, as its numbers were measured
        return BUNDLED.parents[1] / "build" / "smollm2" / "target", BUNDLED.parent / "smollm2" / "draft"
    folder = BUNDLED if name == "text" else BUNDLED / name
    return folder / "target", folder / "draft"


def named_pair(name: str) -> tuple[str, str]:
    """Returns the folders of target and draft of a pair of `ABOUT`, which come with a clone.

    That of smollm2 is a draft: raises `ValueError` if `make real` has not fetched its target, or for another name.
    """
    require(name in ABOUT, f"--pair among {', '.join(ABOUT)}", name, "name one of them, or give --target and --draft")
    target, draft = _folders(name)
    is_here = name != "smollm2" or target.is_dir()
    require(is_here, f"SmolLM2 in {target}", None, "run `make real` first, which fetches it")
    return str(target), str(draft)


def default_pair() -> str:
    """Returns the name of the pair to chat with: the real one where it has been fetched, else a toy that is there."""
    return next((name for name in ("smollm2", "vision") if all(map(Path.is_dir, _folders(name)))), "text")


def about(target: str, draft: str) -> str:
    """Returns a sentence on what a pair that comes with a clone can be asked, and none about other pairs."""
    given = [Path(target).resolve(), Path(draft).resolve()]
    return next((text for name, text in ABOUT.items() if [path.resolve() for path in _folders(name)] == given), "")


def template_options(text: str, no_thinking: bool) -> dict[str, Any]:
    """Returns the options of a chat template, by two of ours; raises `ValueError` if the text is no JSON object."""
    found: Any = None
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
    what = "a JSON object as --chat-template-kwargs"
    require(isinstance(found, dict), what, text, "write it in one pair of '...'")
    return found | ({"enable_thinking": False} if no_thinking else {})


def width_of(text: str) -> int | Literal["auto"]:
    """Returns a whole number or `"auto"`, as some options have it; raises `ValueError` if it is neither."""
    return "auto" if text == "auto" else int(text)


__all__ = ["BUNDLED", "BUNDLED_VISION", "about", "default_pair", "load_pair", "named_pair", "template_options"]
