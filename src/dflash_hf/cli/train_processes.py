"""This module lets the first of several processes do work alone, and sends the result to the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from accelerate.utils import broadcast_object_list

from dflash_hf.cli.train_settings import num_processes, process_index
from dflash_hf.errors import REFUSED

Value = TypeVar("Value")


def by_the_first(work: Callable[[], Value]) -> Value:
    """Lets the first process do some work, and returns its result in every process. All processes must call it.

    If the work fails, the first process raises the error. The other processes end without a message.

    Raises:
        typer.Exit: If the work has failed in the first process and this is another process.
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
