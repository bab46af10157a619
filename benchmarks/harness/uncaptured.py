"""Captured steps without CUDA graphs: the same operations over fixed buffers, on any device.

The package captures its steps or runs them eagerly. Here the three functions are replaced that decide this, wherever
they are called, for the drafts that are named.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator
from contextlib import contextmanager

from dflash_hf.generation import checks, decode, places
from dflash_hf.generation.run import Run
from dflash_hf.generation.static_step import StaticStep
from dflash_hf.generation_config import Engine
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import Target

_drafts: weakref.WeakSet[DFlashDraftModel] = weakref.WeakSet()
# The package's own functions, for all other drafts.
_choose_engine = decode.choose_engine
_start_engine = decode.start_engine
_check_capturable = checks.check_capturable


@contextmanager
def uncaptured(draft: DFlashDraftModel) -> Generator[None]:
    """Has a draft's steps of `"cuda_graph"` run uncaptured, on any device, in any thread."""
    _drafts.add(draft)
    try:
        yield
    finally:
        _drafts.discard(draft)


def _is_uncaptured(draft: DFlashDraftModel) -> bool:
    return draft in _drafts and draft.generation_config.engine == "cuda_graph"


def _choose(target: Target, draft: DFlashDraftModel) -> Engine:
    """Stands for `options.choose_engine`."""
    if _is_uncaptured(draft):
        return "cuda_graph"
    return _choose_engine(target, draft)


def _start(run: Run) -> StaticStep | None:
    """Stands for `cuda_graph.start_engine`."""
    if _is_uncaptured(run.generator.draft):
        return StaticStep(run)
    return _start_engine(run)


def _check(target: Target, draft: DFlashDraftModel) -> None:
    """Stands for `checks.check_capturable`."""
    if not _is_uncaptured(draft):
        _check_capturable(target, draft)


decode.choose_engine = _choose
places.choose_engine = _choose
decode.start_engine = _start
places.start_engine = _start
checks.check_capturable = _check
