"""A table of measured costs: what is between its numbers, and files that are no table of this pair and machine."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from dflash_hf.generation import cost_table
from dflash_hf.generation.cost_table import (
    VERSION,
    CostTable,
    about_pair,
    interpolated,
    read_table,
    table_path,
    write_table,
)
from dflash_hf.generation.step_costs import StepCosts
from dflash_hf.target_model.parts import find_target
from helpers.widths import known_costs, use_tables_in
from tiny import DFLASH2, tiny_draft, tiny_target

ABOUT = {"version": VERSION, "device": "this one"}
TABLE = CostTable(
    {1: {1: 1.0, 2: 1.5, 8: 3.0}, 8: {1: 2.0, 2: 4.0, 8: 16.0}},
    {1: 2.5, 8: 12.0},
)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of Hugging Face is one of the test's own."""
    use_tables_in(tmp_path / "dflash_hf" / "step_costs", monkeypatch)
    return tmp_path


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sentences that the log got."""
    sentences: list[str] = []
    monkeypatch.setattr(cost_table.logger, "warning_once", sentences.append)
    return sentences


def test_costs_lie_on_lines_between_known_ones() -> None:
    points = {1: 1.0, 3: 2.0, 5: 6.0}
    assert [interpolated(points, at) for at in (1, 2, 3, 4, 5)] == [1.0, 1.5, 2.0, 4.0, 6.0]
    assert interpolated(points, 7) == 10.0
    assert interpolated({4: 2.5}, 9) == 2.5


def test_lines_beyond_the_table_never_fall_below_it() -> None:
    assert interpolated({1: 3.0, 2: 2.0}, 9) == 2.0
    assert interpolated({4: 1.0, 8: 9.0}, 1) == 1.0


def test_rows_and_tokens_between_known_ones() -> None:
    assert TABLE.of_step(2, 1) == 1.5
    assert TABLE.of_step(5, 1) == pytest.approx(2.25)
    # In the middle between 1 and 8 rows.
    assert TABLE.of_step(1, 1) < TABLE.of_step(1, 4) < TABLE.of_step(1, 8)
    assert TABLE.of_chain(8, 8) == 12.0
    assert TABLE.covers(8)
    assert not TABLE.covers(9)


def test_a_written_table_is_read_again() -> None:
    assert read_table(ABOUT) is None
    assert write_table(TABLE, ABOUT) == table_path(ABOUT)
    assert read_table(ABOUT) == TABLE
    assert read_table({**ABOUT, "version": VERSION + 1}) is None


def test_a_later_table_takes_the_place_of_an_earlier_one(cache_folder: Path) -> None:
    write_table(TABLE, ABOUT)
    other = CostTable({1: {1: 7.0, 4: 8.0}}, {1: 9.0})
    write_table(other, ABOUT)
    assert read_table(ABOUT) == other
    files = [path for path in cache_folder.rglob("*") if path.is_file()]
    assert files == [table_path(ABOUT)]


def changed(change: Callable[[dict[str, Any]], None]) -> bytes:
    """Returns the text of a table's file with something changed."""
    written = json.loads(table_path(ABOUT).read_bytes())
    change(written)
    return json.dumps(written).encode()


DAMAGES: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "torn": lambda: table_path(ABOUT).read_bytes()[:-40],
    "a list": lambda: b"[1, 2]",
    "no UTF-8": lambda: b"\xff\xfe{}",
    "deep": lambda: b"[" * 100_000,
    "large": lambda: b" " * 2_000_000,
    "another machine": lambda: changed(lambda written: written.update(about={"device": "x"})),
    "no chains": lambda: changed(lambda written: written.pop("chains")),
    "no steps": lambda: changed(lambda written: written.update(steps={}, chains={})),
    "rows without a plain step": lambda: changed(lambda written: written["steps"]["8"].pop("1")),
    "not a number": lambda: changed(lambda written: written["steps"]["8"].update({"2": None})),
    "a time of zero": lambda: changed(lambda written: written["steps"]["8"].update({"2": 0.0})),
    "nan": lambda: changed(lambda written: written["chains"].update({"8": float("nan")})),
    "a time without an end": lambda: changed(
        lambda written: written["steps"]["8"].update({"2": 10**400})
    ),
    "tokens without an end": lambda: changed(
        lambda written: written["steps"]["8"].update({"1" + 400 * "0": 1.0})
    ),
    "tokens below one": lambda: changed(lambda written: written["steps"]["8"].update({"0": 1.0})),
    "words for rows": lambda: changed(lambda written: written["chains"].update(many=1.0)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_as_good_as_none(damage: str, warnings: list[str]) -> None:
    write_table(TABLE, ABOUT)
    damaged = DAMAGES[damage]()
    table_path(ABOUT).write_bytes(damaged)
    assert read_table(ABOUT) is None
    (sentence,) = warnings
    assert str(table_path(ABOUT)) in sentence
    assert "dflash-hf tune" in sentence
    assert "\n" not in sentence
    # It stays as it was: somebody may want to look at it.
    assert table_path(ABOUT).read_bytes() == damaged


def test_a_folder_in_place_of_the_file(warnings: list[str]) -> None:
    table_path(ABOUT).mkdir(parents=True)
    assert read_table(ABOUT) is None
    assert len(warnings) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_cache_folder_of_another_user(cache_folder: Path, warnings: list[str]) -> None:
    write_table(TABLE, ABOUT)
    cache_folder.chmod(0o700)
    os.seteuid(65534)
    try:
        assert known_costs(cast(Any, "not asked"), may_be_modelled=False) is None
        assert read_table(ABOUT) is None
    finally:
        os.seteuid(0)
    assert len(warnings) == 1


def test_no_file_is_no_reason_for_a_word(warnings: list[str]) -> None:
    assert read_table(ABOUT) is None
    assert not warnings


def test_other_circumstances_are_told_once(
    monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    # A file of another pair, and one that is damaged, are no reason for a word.
    write_table(TABLE, {**ABOUT, "threads": 2, "version": VERSION + 1})
    damaged = write_table(TABLE, {**ABOUT, "threads": 4})
    damaged.write_bytes(b"[1, 2]")
    assert read_table({**ABOUT, "threads": 1}) is None
    assert not warnings
    write_table(TABLE, {**ABOUT, "threads": 2})
    run = {**ABOUT, "threads": 1, "device": "that one"}
    about_of = functools.cache(cost_table._about_of)
    monkeypatch.setattr(cost_table, "_about_of", about_of)
    for _ in range(2):
        assert read_table(run) is None
    (sentence,) = warnings
    assert "device='this one', threads=2, and this run has device='that one', threads=1" in sentence
    assert "dflash_hf.tune(target, draft)" in sentence
    # The files were looked at once, not at every call.
    assert about_of.cache_info().hits == 0


def test_a_full_disk_leaves_the_table_before(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(TABLE, ABOUT)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cost_table.os, "replace", full)
    with pytest.raises(ValueError, match=r"expected to write .*No space left.*HF_HOME"):
        write_table(CostTable({1: {1: 7.0}}, {1: 9.0}), ABOUT)
    assert read_table(ABOUT) == TABLE
    files = [path for path in cache_folder.rglob("*") if path.is_file()]
    assert files == [table_path(ABOUT)]


def test_a_cache_folder_that_is_a_file(cache_folder: Path) -> None:
    (cache_folder / "dflash_hf").write_text("in the way")
    with pytest.raises(ValueError, match="expected to write"):
        write_table(TABLE, ABOUT)


def _write_often(seconds: float) -> None:
    """Writes a table of equal numbers a few hundred times."""
    for _ in range(300):
        write_table(CostTable({1: {1: seconds, 8: seconds}}, {1: seconds}), ABOUT)


def test_processes_that_write_at_once_leave_whole_files(warnings: list[str]) -> None:
    # Forked: they have the folder of this test.
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_often, args=(seconds,)) for seconds in (1.0, 2.0)]
    for writer in writers:
        writer.start()
    found: set[float] = set()
    while any(writer.is_alive() for writer in writers):
        table = read_table(ABOUT)
        if table is not None:
            found |= {*table.steps[1].values(), *table.chains.values()}
            assert len({*table.steps[1].values(), *table.chains.values()}) == 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert found <= {1.0, 2.0}
    assert not warnings


def test_a_table_is_for_one_pair_and_dtype() -> None:
    model = tiny_target("qwen3")
    target = find_target(model)

    def about(**kind: Any) -> dict[str, Any]:
        draft = tiny_draft(model, 6, **kind)
        return about_pair(target, draft, StepCosts.of(target, draft, 6), is_tree=True)

    found = about()
    assert found == about()
    json.dumps(found)
    assert found != about(**DFLASH2)
    assert found != about(markov_rank=4)
    in_float8 = tiny_draft(model, 6)
    in_float8.generation_config.draft_dtype = "float8_e4m3fn"
    costs = StepCosts.of(target, in_float8, 6)
    assert found != about_pair(target, in_float8, costs, is_tree=True)
    assert found["target_class"] == "Qwen3ForCausalLM"
    # One layer in another dtype is enough, wherever it is.
    model.model.layers[2].mlp.float()
    assert found != about()
