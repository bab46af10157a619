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


@pytest.fixture(autouse=True)
def whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifies chains of whole blocks where a test names neither trees nor a width: launches are counted by step."""
    from dflash_hf.generation import prefill
    from dflash_hf.generation.widths import FixedWidth

    resolve = prefill.resolve
    choose = prefill.choose_widths

    def resolved(request: Any, *args: Any) -> Any:
        options = request.draft.generation_config
        nodes = options.num_tree_nodes
        options.num_tree_nodes = 0 if nodes is None else nodes
        try:
            return resolve(request, *args)
        finally:
            options.num_tree_nodes = nodes

    def chooser(generator: Any, *args: Any) -> Any:
        options = generator.draft.generation_config
        is_named = options.verify_width is not None or options.num_tree_nodes is not None
        return choose(generator, *args) if is_named else FixedWidth(generator.verify_width)

    monkeypatch.setattr(prefill, "resolve", resolved)
    monkeypatch.setattr(prefill, "choose_widths", chooser)


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
        found = {
            id(value)
            for value in function.__globals__.values()
            if value is language or value is language.core
        }
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
