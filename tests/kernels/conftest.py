"""Triton's interpreter, which names the language's functions anew at every call of one function by another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def conditions_stay_conditions() -> Iterator[None]:
    """Triton 3.9's interpreter makes integers of a scalar's comparison spread over a mask, and refuses those."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    spread = interpreter.InterpreterBuilder.create_splat

    def spread_condition(self: Any, kind: Any, value: Any) -> Any:
        found = spread(self, kind, value)
        if value.data.dtype == bool:
            found.data = found.data.astype(bool)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_splat", spread_condition)
        yield


@pytest.fixture(scope="session", autouse=True)
def language_named_once() -> Iterator[None]:
    """Once a launch: a quarter of the time of these tests."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton import language
    from triton.runtime import interpreter

    name_all, named = interpreter._patch_lang, set[int]()

    def name_once(function: Any) -> Any:
        found = {id(value) for value in function.__globals__.values() if value is language or value is language.core}
        if found <= named:
            return None  # nobody asks for it: the launch ends what it has begun
        scope = name_all(function)
        if scope is not None and not named:  # older releases never end it
            restore = scope.restore

            def end() -> None:
                named.clear()
                restore()

            scope.restore = end
            named.update(found)
        return scope

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", name_once)
        yield
