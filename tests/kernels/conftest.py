"""Triton's interpreter, which names the language's functions anew at every call of one function by another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch


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
def nothing_computed_in_vain() -> Iterator[None]:
    """Looks for no overflow of integers: outside of its debug mode, the interpreter computes that and tells nobody."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    assert not options.debug
    find_kind = interpreter._get_np_dtype
    kinds: dict[str, Any] = {}

    def numpy_kind(kind: Any) -> Any:
        """Every operation asks for it, and makes a table of all."""
        scalar = kind.scalar
        if scalar.name not in kinds:
            kinds[scalar.name] = find_kind(scalar)
        return kinds[scalar.name]

    with pytest.MonkeyPatch.context() as patch:
        found = replace(options, sanitize_overflow=False)
        patch.setattr(interpreter.interpreter_builder, "options", found)
        patch.setattr(interpreter, "_get_np_dtype", numpy_kind)
        yield


@pytest.fixture(autouse=True)
def whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifies chains of whole blocks where a test names neither trees nor a width: launches are counted by step."""
    from dflash_hf.generation import options, prefill
    from dflash_hf.generation.widths import FixedWidth
    from helpers.whole_blocks import CHOOSING

    resolve = prefill.resolve
    choose = options.choose_widths

    def resolved(request: Any, *args: Any) -> Any:
        asked = request.draft.generation_config
        nodes = asked.num_tree_nodes
        asked.num_tree_nodes = 0 if nodes is None else nodes
        try:
            return resolve(request, *args)
        finally:
            asked.num_tree_nodes = nodes

    def chooser(generator: Any, *args: Any) -> Any:
        asked = generator.draft.generation_config
        is_named = asked.verify_width is not None or asked.num_tree_nodes is not None
        return choose(generator, *args) if is_named else FixedWidth(generator.verify_width)

    monkeypatch.setattr(prefill, "resolve", resolved)
    for module in CHOOSING:
        monkeypatch.setattr(module, "choose_widths", chooser)


@pytest.fixture(scope="session", autouse=True)
def language_named_once() -> Iterator[None]:
    """Once for all launches: nothing is compiled in this process, which would need the names as they were."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton import language
    from triton.runtime import interpreter

    name_all, named = interpreter._patch_lang, set[int]()
    scopes: list[Any] = []
    kept = SimpleNamespace(restore=lambda: None)  # what a launch ends behind it

    def name_once(function: Any) -> Any:
        found = {
            id(value)
            for value in function.__globals__.values()
            if value is language or value is language.core
        }
        if not found <= named:
            scopes.append(name_all(function))
            named.update(found)
        return kept

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", name_once)
        yield
    while scopes:
        scope = scopes.pop()
        if scope is not None:  # of a release that ends it
            scope.restore()


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter cuts bfloat16 off where a GPU rounds: here it rounds."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    convert = interpreter._convert_float

    def rounded(values: Any, given: Any, wanted: Any, mode: Any) -> Any:
        if str(wanted) != "bf16" or str(given) != "fp32":
            return convert(values, given, wanted, mode)
        floats = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
        return (
            floats.to(torch.bfloat16)
            .view(torch.int16)
            .numpy()
            .view(np.uint16)
            .reshape(values.shape)
        )

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
