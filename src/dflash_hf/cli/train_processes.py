"""What the first of several processes does alone, and how the others learn of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from accelerate.utils import broadcast_object_list

from dflash_hf.cli.train_settings import num_processes, process_index
from dflash_hf.errors import REFUSED

Value = TypeVar("Value")


def by_the_first(work: Callable[[], Value]) -> Value:
    """Returns in every process what the first one returns, which alone does the work; all processes call it.

    The first process raises an error of the work. The others end without a word: the first one says what is wrong.

    Raises:
        typer.Exit: If the first process fails and this is another one.
    """
    if num_processes() == 1:
        return work()
    said: list[Any] = [True, None]
    if process_index() == 0:
        try:
            said = [False, work()]
        except Exception:
            broadcast_object_list(said)
            raise
    has_failed, value = broadcast_object_list(said)
    if has_failed:
        raise typer.Exit(REFUSED)
    return value
