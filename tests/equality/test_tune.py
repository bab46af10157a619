"""Costs that `tune` has measured decide how much is verified, and no clock does."""

from __future__ import annotations

import itertools
import json
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from typer.testing import CliRunner

import dflash_hf
from dflash_hf import DFlashDraftModel
from dflash_hf.cli.main import app
from dflash_hf.generation import cost_table, options
from dflash_hf.generation import tune as tuning
from dflash_hf.generation.choice_costs import candidate_widths
from dflash_hf.generation.cost_table import CostTable, read_table, table_path, write_table
from helpers.widths import use_tables_in
from tiny import oracle_draft, prompts, shallow_target, tiny_draft, truth_of

pytestmark = pytest.mark.same_on_every_release

NEW = 40


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of Hugging Face is one of the test's own."""
    use_tables_in(tmp_path / "dflash_hf" / "step_costs", monkeypatch)
    return tmp_path


def half_pair(family: str = "qwen3") -> tuple[PreTrainedModel, DFlashDraftModel]:
    """Returns a tiny pair in bfloat16."""
    target = shallow_target(family).to(torch.bfloat16)
    return target, tiny_draft(target, 8)


def widths_of(target: Any, draft: DFlashDraftModel, lengths: list[int]) -> list[int]:
    """Returns the widths of a call's verifies."""
    inputs = prompts(lengths, seed=0)
    target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft)
    assert draft.last_stats is not None
    return draft.last_stats.verify_widths


def about_of(target: Any, draft: DFlashDraftModel, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns what a call looks for a table by."""
    seen: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(cost_table, "TABLES", Path.cwd())
        patch.setattr(options, "read_table", seen.append)
        widths_of(target, draft, [5])
    (about,) = seen
    return about


def table_where(cheap: int, rows: tuple[int, ...] = (1, 4)) -> CostTable:
    """Returns a table in which steps of so many tokens cost next to nothing."""
    seconds = dict.fromkeys(candidate_widths(8), 1.0)
    seconds[cheap] = 1e-3
    return CostTable(dict.fromkeys(rows, seconds), dict.fromkeys(rows, 2.0))


@pytest.mark.parametrize("cheap", [1, 3, 8])
@pytest.mark.parametrize("asked", [None, "auto"])
def test_runs_verify_what_the_table_says(
    cheap: int, asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = half_pair()
    about = about_of(target, draft, monkeypatch)
    draft.generation_config.verify_width = asked
    write_table(table_where(cheap), about)
    widths = widths_of(target, draft, [5, 9])
    # Now and then another one is tried.
    assert widths.count(cheap) > 0.8 * len(widths)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("seed", [0, 1, 2, 4])  # with 3 one width is the cheapest throughout
def test_a_table_that_lies_changes_no_text(
    family: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target: Any = shallow_target(family)
    inputs = prompts([4, 11, 7], seed=0)
    plain = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = oracle_draft(target, truth_of(inputs, plain), seed)
    # In float64, where texts are equal whatever the widths are.
    monkeypatch.setattr(options, "computes_in_half", lambda target: True)
    source = random.Random(seed)
    steps = {
        rows: {width: source.uniform(0.01, 1.0) for width in candidate_widths(8)} for rows in (1, 3)
    }
    table = CostTable(steps, {rows: source.uniform(0.01, 1.0) for rows in steps})
    read: list[Any] = []

    def lying(about: Any) -> CostTable:
        read.append(about)
        return table

    monkeypatch.setattr(cost_table, "TABLES", Path.cwd())
    monkeypatch.setattr(options, "read_table", lying)
    drafted = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft)
    assert torch.equal(drafted, plain)
    assert len(read) == 1
    assert len(set(draft.last_stats.verify_widths)) > 1


def test_a_call_and_its_repetition_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = half_pair()
    dflash_hf.tune(target, draft, rows=(1, 2))
    calm = widths_of(target, draft, [5, 9])
    ticks = itertools.count()
    source = random.Random(0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) + source.random())
    assert widths_of(target, draft, [5, 9]) == calm


def test_tune_measures_every_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = half_pair()
    progress: list[str] = []
    tuned = dflash_hf.tune(target, draft, rows=(3, 1, 3), on_progress=progress.append)
    assert len(progress) == 2
    about = about_of(target, draft, monkeypatch)
    assert tuned.path == table_path(about)
    assert read_table(about) == tuned.table
    assert sorted(tuned.table.steps) == sorted(tuned.table.chains) == [1, 3]
    for seconds in tuned.table.steps.values():
        assert sorted(seconds) == sorted(candidate_widths(8))
        in_order = [seconds[width] for width in sorted(seconds)]
        assert in_order == sorted(in_order)


def test_tune_measures_larger_trees_where_they_are_asked_for() -> None:
    target, draft = half_pair()
    draft.generation_config.num_tree_nodes = "auto"
    tuned = dflash_hf.tune(target, draft, rows=(1,))
    assert max(tuned.table.steps[1]) == 32


def test_a_table_of_small_trees_is_none_for_larger_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = half_pair()
    about = about_of(target, draft, monkeypatch)
    write_table(table_where(cheap=1), about)
    draft.generation_config.num_tree_nodes = "auto"
    # The clock chooses, and begins with a draft.
    assert widths_of(target, draft, [5])[0] > 1


def test_chains_have_a_table_of_their_own() -> None:
    target, draft = half_pair()
    of_trees = dflash_hf.tune(target, draft, rows=(1,))
    draft.generation_config.num_tree_nodes = 0
    of_chains = dflash_hf.tune(target, draft, rows=(1,))
    assert of_trees.path != of_chains.path


def test_tune_measures_chains_of_a_hybrid() -> None:
    target, draft = half_pair("qwen3.5")
    tuned = dflash_hf.tune(target, draft, rows=(2,))
    assert sorted(tuned.table.steps[2]) == sorted(candidate_widths(8))
    assert set(widths_of(target, draft, [5, 9])) <= set(candidate_widths(8))


def test_tune_measures_a_target_with_stop_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = half_pair()
    monkeypatch.setattr(target.generation_config, "stop_strings", ["</s>"])
    assert dflash_hf.tune(target, draft, rows=(1,)).path.is_file()
    assert target.generation_config.stop_strings == ["</s>"]


def test_tune_leaves_models_as_they_were() -> None:
    target, draft = half_pair()
    before = {name: value.clone() for name, value in target.state_dict().items()}
    hooks = [len(part._forward_hooks) for part in target.modules()]
    dflash_hf.tune(target, draft, rows=(1,))
    assert hooks == [len(part._forward_hooks) for part in target.modules()]
    after = target.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert draft.generation_config.verify_width is None


@pytest.mark.parametrize("asked", [None, "auto"])
def test_float32_on_a_cpu_has_a_table_too(
    asked: Any, users_costs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = shallow_target("qwen3").float()
    draft = tiny_draft(target, 8)
    draft.generation_config.num_tree_nodes = asked
    dflash_hf.tune(target, draft, rows=(1,))
    asked: list[bool] = []
    read = options.read_table

    def watched(*args: Any) -> Any:
        table = read(*args)
        asked.append(table is not None)
        return table

    monkeypatch.setattr(options, "read_table", watched)
    inputs = prompts([5], seed=0)
    text = target.generate(**inputs, max_new_tokens=8, do_sample=False, assistant_model=draft)
    plain = target.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert torch.equal(text, plain)
    assert asked == [True]


def test_a_gpu_in_float32_needs_no_table(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = shallow_target("qwen3").float()
    check = tuning._check

    def on_a_gpu(request: Any, engine: str) -> None:
        there = SimpleNamespace(device=torch.device("cuda"), model=target)
        check(SimpleNamespace(target=there, draft=request.draft), engine)

    monkeypatch.setattr(tuning, "_check", on_a_gpu)
    monkeypatch.setattr(tuning, "computes_in_half", lambda _: False)
    with pytest.raises(ValueError, match="expected a target on a CPU or in half precision, got"):
        dflash_hf.tune(target, tiny_draft(target, 8))
    assert not list(cache_folder.iterdir())


@pytest.mark.parametrize("settings", [{"verify_width": 4}, {"num_tree_nodes": 6}])
def test_fixed_widths_need_no_table(settings: dict[str, int]) -> None:
    target, draft = half_pair()
    for name, value in settings.items():
        setattr(draft.generation_config, name, value)
    with pytest.raises(ValueError, match="leaves verify_width and the size of a tree open"):
        dflash_hf.tune(target, draft)


@pytest.mark.parametrize("rows", [(), (0, 1), (-2,), (1, 10**9)])
def test_rows_of_a_table_begin_with_one(rows: tuple[int, ...]) -> None:
    target, draft = half_pair()
    with pytest.raises(ValueError, match="expected numbers of rows from 1 to 4096"):
        dflash_hf.tune(target, draft, rows=rows)


def test_the_command_writes_the_table(tmp_path: Path) -> None:
    target, draft = "demos/toy/target", "demos/toy/draft"
    line = ["tune", "--target", target, "--draft", draft, "--rows"]
    shown = CliRunner().invoke(app, [*line, "1"])
    assert shown.exit_code == 0, shown.output
    assert "milliseconds of a step" in " ".join(shown.output.split())
    again = CliRunner().invoke(app, [*line, "1, 2", "--json"])
    written = json.loads(again.stdout)
    assert sorted(written["steps"]) == ["1", "2"]
    assert Path(written["file"]).is_relative_to(tmp_path)
    assert json.loads(Path(written["file"]).read_text())["steps"] == written["steps"]


@pytest.mark.parametrize(
    ("options_", "said"),
    [
        (["--rows", "1,x"], "expected whole numbers, separated by commas, as --rows"),
        (["--rows", "0"], "expected numbers of rows from 1 to 4096 as --rows"),
        (["--rows", "5000"], "expected numbers of rows from 1 to 4096 as --rows"),
        (["--pair", "text", "--target", "x"], "expected --pair, or --target and --draft"),
    ],
)
def test_the_command_refuses_in_a_sentence(
    options_: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_hf.cli.tune.load_pair", None)  # nothing is loaded before
    refused = CliRunner().invoke(app, ["tune", *options_])
    assert refused.exit_code == 2, refused.output
    assert said in " ".join(refused.output.split())
    assert "Traceback" not in refused.output


def test_a_wrapped_target_is_measured_as_the_target() -> None:
    target, draft = half_pair()
    tuned = dflash_hf.tune(target, draft, rows=(1,))
    compiled: Any = SimpleNamespace(_orig_mod=target)  # as torch.compile holds it
    assert dflash_hf.tune(compiled, draft, rows=(1,)).path == tuned.path
