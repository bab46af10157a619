"""This module knows the bundled pairs: their folders, what to ask them, and which pair a subcommand takes.

Subcommands import torch and Transformers only when they run, so that `--help` and wrong options need neither.
"""

from __future__ import annotations

import logging
from importlib.resources import files
from pathlib import Path

from dflash_hf.data.image_files import has_pillow
from dflash_hf.errors import require
from dflash_hf.pair.loading import has_bfloat16_instructions

logger = logging.getLogger(__name__)

# Whether the package runs from a clone, as with `pip install -e` and in the tests.
CLONE = Path(__file__).resolve().parents[3]
IS_CLONE = (CLONE / "demos" / "toy").is_dir()
# The pair for texts. A wheel has it within the package. In a clone it is in the folder of the scripts that made it.
BUNDLED = (
    CLONE / "demos" / "toy"
    if IS_CLONE
    else Path(str(files("dflash_hf") / "bundled_pair")).resolve()
)
_TOY = "A toy, trained in this repository. It was trained only for these tasks:"
# What to ask a bundled pair. The pair for texts is in the wheel. The others are only in a clone.
ABOUT = {
    "text": f"{_TOY} sums, short Python functions, records as JSON or YAML, and small talk.",
    "vision": (
        f"{_TOY} drawings of shapes, signs and bar charts. Ask for the shape at a place, for the number of shapes, or "
        "for the text on a sign."
    ),
    "hybrid": f"{_TOY} short Python functions, records as JSON or YAML, and small talk.",
    "smollm2": "A very small real language model. Its answers are often wrong, with the draft and without it.",
}


def _folders(name: str, dtype: str = "float32") -> tuple[Path, Path]:
    """Returns the folders of a pair. SmolLM2 was saved in two dtypes, each in its own folder."""
    if name == "smollm2":
        fetched = CLONE / "build" / "smollm2"
        target = fetched / "target"
        if dtype == "bfloat16":
            target = fetched / "target-bf16"
        return target, CLONE / "demos" / "smollm2" / "draft"
    folder = BUNDLED if name == "text" else CLONE / "demos" / "toy" / name
    return folder / "target", folder / "draft"


def _quicker_dtype() -> str:
    """Returns the dtype in which SmolLM2 answers faster on this machine, and logs it.

    On a CPU with instructions for bfloat16 this is bfloat16. On other CPUs it is float32 (docs/speed.md). On an
    accelerator it is bfloat16, which reads half the bytes.
    """
    from dflash_hf.devices import accelerator

    if accelerator() is not None or has_bfloat16_instructions():
        logger.warning(
            "SmolLM2 is loaded in bfloat16, because it is faster here in bfloat16; --dtype float32 loads float32."
        )
        return "bfloat16"
    logger.warning(
        "SmolLM2 is loaded in float32, because this CPU has no instructions for bfloat16; --dtype bfloat16 loads "
        "bfloat16."
    )
    return "float32"


def named_pair(name: str, dtype: str = "auto") -> tuple[str, str]:
    """Returns the folders of target and draft of a pair in `ABOUT`. `dtype` matters only for smollm2.

    Raises `ValueError` for another name, for a pair that needs a clone if there is none, and for a pair that is
    missing. For smollm2, a clone contains only the draft, and `make real` downloads the target.
    """
    require(
        name in ABOUT,
        f"--pair among {', '.join(ABOUT)}",
        name,
        "name one of them, or give --target and --draft",
    )
    is_in_wheel = name == "text"
    if not is_in_wheel and not IS_CLONE:
        raise ValueError(
            f"expected a clone for the pair {name}, got an installed package, which has the pair text only; run "
            "`pip install -e .` in a clone, or give --target and --draft"
        )
    if name == "smollm2" and dtype == "auto":
        dtype = _quicker_dtype()
    target, draft = _folders(name, dtype)
    if name == "smollm2":
        require(
            target.is_dir(), f"SmolLM2 in {target}", None, "run `make real` first, to fetch SmolLM2"
        )
    action = "install dflash-hf again, or give --target and --draft"
    require(target.is_dir(), f"the pair {name} in {target.parent}", None, action)
    return str(target), str(draft)


def check_one_pair(pair: str | None, target: str | None, draft: str | None) -> None:
    """Raises `ValueError` if a pair is named together with `--target` or `--draft`, or a target is given alone.

    A draft alone is used with the bundled target. A target fits only its own draft, so it cannot be given alone.
    """
    if pair is not None and (target, draft) != (None, None):
        raise ValueError("expected --pair, or --target and --draft, got both; leave one out")
    if target is not None and draft is None:
        raise ValueError(
            "expected --draft beside --target, got --target alone; give a draft that was trained for this target "
            f"(`dflash-hf drafts --target {target}` lists published drafts)"
        )


def given_or_bundled(
    target: str | None, draft: str | None, name: str, dtype: str = "auto"
) -> tuple[str, str]:
    """Returns target and draft as they are given. A missing one is taken from the pair `name`.

    Raises `ValueError` as [`named_pair`] does, if the pair is needed.
    """
    if target and draft:
        return target, draft
    bundled_target, bundled_draft = named_pair(name, dtype)
    return target or bundled_target, draft or bundled_draft


def default_pair() -> str:
    """Returns the name of the pair to chat with: the real one if it is downloaded, otherwise a toy that loads."""
    names = ["smollm2"]
    if has_pillow():
        names.append("vision")
    for name in names:
        target, draft = _folders(name)
        if target.is_dir() and draft.is_dir():
            return name
    return "text"


def about(target: str, draft: str) -> str:
    """Returns a sentence that says what to ask a bundled pair; an empty text for other pairs."""
    given = [Path(target).resolve(), Path(draft).resolve()]
    for name, text in ABOUT.items():
        for dtype in ("float32", "bfloat16"):
            if [path.resolve() for path in _folders(name, dtype)] == given:
                return text
    return ""
