"""Which cells a run has: every combination that a method looks at, once, each with its baseline."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_hf.bench.cells import RunSettings, make_cells
from helpers.bench_runs import TOY


def cells(**given: Any) -> dict[str, str | None]:
    """Names of cells -> their baselines."""
    base: dict[str, Any] = {"out": TOY, "data": ("x",), "target": str(TOY), "draft": str(TOY)}
    return {cell.model_id: cell.baseline for cell in make_cells(RunSettings(**{**base, **given}))}


SWEEPS: list[tuple[dict[str, Any], dict[str, str | None]]] = [
    ({}, {"plain": None, "dflash": "plain"}),
    ({"methods": ("dflash",)}, {"dflash": None}),
    ({"batch": (8,)}, {"plain": None, "dflash": "plain"}),
    (
        {"batch": (1, 8)},
        {
            "plain-batch1": None,
            "plain-batch8": None,
            "dflash-batch1": "plain-batch1",
            "dflash-batch8": "plain-batch8",
        },
    ),
    (
        {"block_size": (4, 8), "verify_width": (None, 2)},
        {
            "plain": None,
            "dflash-block4-widthdefault": "plain",
            "dflash-block4-width2": "plain",
            "dflash-block8-widthdefault": "plain",
            "dflash-block8-width2": "plain",
        },
    ),
    (
        # 0 is a chain, and not what is left out.
        {"num_tree_nodes": (0, 8)},
        {"plain": None, "dflash-tree0": "plain", "dflash-tree8": "plain"},
    ),
    (
        # A chain looks for nothing in the text.
        {"num_tree_nodes": (0, 8), "max_matching_ngram_size": (0, 4)},
        {
            "plain": None,
            "dflash-tree0": "plain",
            "dflash-tree8-ngram0": "plain",
            "dflash-tree8-ngram4": "plain",
        },
    ),
    (
        # Greedy decoding has one cell: no rule of proposing, no top-p.
        {"temperature": (0.0, 1.0), "proposal": ("argmax", "sample"), "top_p": (0.9,)},
        {
            "plain-temperature0": None,
            "plain-temperature1": None,
            "dflash-temperature0": "plain-temperature0",
            "dflash-temperature1-argmax": "plain-temperature1",
            "dflash-temperature1-sample": "plain-temperature1",
        },
    ),
    (
        {"methods": ("plain", "plain-static", "server"), "dtype": ("float32", "bfloat16")},
        {
            "plain-float32": None,
            "plain-bfloat16": None,
            "plain-static-float32": "plain-float32",
            "plain-static-bfloat16": "plain-bfloat16",
            "server": None,  # which of the two it would be is not known
        },
    ),
    ({"methods": ("plain", "server")}, {"plain": None, "server": "plain"}),
]


@pytest.mark.parametrize(("given", "expected"), SWEEPS)
def test_cells(given: dict[str, Any], expected: dict[str, str | None]) -> None:
    assert cells(**given) == expected


def test_methods_that_take_one_row_say_so() -> None:
    found = make_cells(
        RunSettings(
            out=TOY,
            data=("x",),
            target=str(TOY),
            draft=str(TOY),
            batch=(1, 2),
            methods=("plain", "dflash", "stock"),
        )
    )
    reasons = {cell.model_id: cell.failed for cell in found if cell.failed}
    assert reasons == {
        "stock-batch2": "expected batch 1 for stock, which takes one question at a time, got 2"
    }


def test_the_draft_is_also_compared_with_this_package_without_it() -> None:
    settings = RunSettings(
        out=TOY,
        data=("x",),
        target=str(TOY),
        draft=str(TOY),
        methods=("plain", "undrafted", "dflash"),
        batch=(1, 8),
        verify_width=(4, 8),
    )
    found = {cell.model_id: cell.own_baseline for cell in make_cells(settings)}
    assert found == {
        "plain-batch1": None,
        "plain-batch8": None,
        "undrafted-batch1": None,
        "undrafted-batch8": None,
        "dflash-batch1-width4": "undrafted-batch1",
        "dflash-batch1-width8": "undrafted-batch1",
        "dflash-batch8-width4": "undrafted-batch8",
        "dflash-batch8-width8": "undrafted-batch8",
    }


def test_code_that_cannot_be_run_is_refused_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = RunSettings(
        out=TOY, data=("x",), methods=("plain",), target=str(TOY / "target"), run_code=True
    )
    settings.check()
    nowhere = SimpleNamespace(name="nt")
    monkeypatch.setattr("dflash_hf.bench.cells.os", nowhere, raising=False)
    with pytest.raises(ValueError, match=r"expected Linux or macOS .*leave out --run-code"):
        settings.check()
    replace(settings, run_code=False).check()
