"""`dflash-hf train` in several processes: all train and measure, the first one does the rest; then it is done."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from safetensors.torch import load_file
from transformers.distributed import DistributedConfig

import dflash_hf.cli.train_stages as stages
from dflash_hf import load_draft
from dflash_hf.cli import train_target
from dflash_hf.cli.train_settings import BATCHES_PER_STEP, STAGES, TrainSettings
from dflash_hf.cli.train_state import RunState, locked
from helpers import (
    forked_python,
    training_command_many,
    training_command_ranks,
    training_command_refused,
)
from helpers.training_command import SMALL, train, write_rows

LIMIT = 240  # seconds after which a start counts as hung


def told(text: str) -> list[tuple[str, str]]:
    """The lines of stages, as name and rest."""
    parts = [line.partition(": ")[::2] for line in text.splitlines()]
    return [(name, rest) for name, rest in parts if name in STAGES]


def told_by(stage: dict[str, Any]) -> dict[str, Any]:
    """What a stage told when it ended, without its times."""
    facts = stage["facts"]
    return {name: value for name, value in facts.items() if "second" not in name}


def run_python(*words: object) -> subprocess.CompletedProcess[str]:
    """Runs a module or a file to its end."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, *map(str, words)]
    return checked(
        subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment)
    )


def run_forked(*words: object) -> subprocess.CompletedProcess[str]:
    """Runs a file to its end in a fork, which has loaded what it needs."""
    return checked(forked_python.run(words, os.environ, LIMIT))


def checked(run: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """Returns a run that has ended well."""
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    return run


@pytest.fixture
def in_float64() -> Any:
    """Fresh drafts are in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_processes_are_one_that_accumulates(ranks: int, tmp_path: Path, in_float64: None) -> None:
    """Each has its target on its own device, waits for days, and all make the draft that one makes."""
    words: list[object] = [
        *("--dataset", write_rows(tmp_path / "rows.jsonl"), *SMALL, "--dtype", "float64"),
        *("--per-device-train-batch-size", 1, "--max-steps", 3, "--max-new-tokens", 6),
    ]
    many, one = tmp_path / "many", tmp_path / "one"
    run_forked(
        *(training_command_many.__file__, ranks, tmp_path / "facts", "train", *words),
        *("--output-dir", many),
    )
    alone = ["--gradient-accumulation-steps", ranks, "--stages", "prepare,regenerate,run"]
    result = train(*words, *alone, "--output-dir", one)
    assert result.exit_code == 0, result.output
    for rank in range(ranks):
        facts = json.loads((tmp_path / f"facts.{rank}").read_text())
        assert set(facts["devices"]) == {"cpu:0"}, "no target is spread over all devices"
        assert min(facts["waits"]) >= 24 * 3600
    ours = load_file(many / "draft" / "model.safetensors")
    theirs = load_file(one / "draft" / "model.safetensors")
    assert {value.dtype for value in ours.values()} == {torch.float64}
    assert all((value - theirs[name]).abs().max() < 1e-6 for name, value in ours.items())
    state = json.loads((many / "stages.json").read_text())
    assert [state[stage]["finished"] for stage in STAGES] == [True] * 5


@pytest.mark.skipif(
    not hasattr(DistributedConfig, "dp_replicate_size"), reason="this Transformers has no groups"
)
def test_groups_that_share_a_target_train_as_plain_processes(
    tmp_path: Path, in_float64: None
) -> None:
    """Four processes that hold two targets answer and train as two that hold one each, and go on as one."""
    many = training_command_many.__file__
    words: list[object] = [
        *("train", "--dataset", write_rows(tmp_path / "rows.jsonl", 6), *SMALL),
        *("--dtype", "float64", "--max-new-tokens", 6, "--max-steps", 2),
        *("--per-device-train-batch-size", 1, "--draft-vocab-size", 64, "--answer-batch", 1),
        *("--temperature", 0.8, "--stages", "prepare,regenerate,run,export"),
    ]
    shared, plain = tmp_path / "shared", tmp_path / "plain"
    share = ("--tensor-parallel-size", 2)
    run = run_forked(many, 4, tmp_path / "facts", *words, *share, "--output-dir", shared)
    assert [name for name, _ in told(run.stdout)] == ["prepare", "regenerate", "run", "export"]
    run_forked(many, 2, tmp_path / "facts", *words, "--output-dir", plain)
    answers = ("--stages", "prepare,regenerate", "--output-dir", tmp_path / "group")
    run_forked(many, 2, tmp_path / "facts", *words, *share, *answers)
    for name in ("train.jsonl", "held_out.jsonl"):
        folders = (shared, plain, tmp_path / "group")
        assert len({(folder / "answered" / name).read_text() for folder in folders}) == 1
    ours, theirs = (load_file(folder / "draft" / "model.safetensors") for folder in (shared, plain))
    assert {value.dtype for value in ours.values() if value.is_floating_point()} == {torch.float64}
    assert all((value - theirs[name]).abs().max() < 1e-6 for name, value in ours.items())
    states = [json.loads((folder / "stages.json").read_text()) for folder in (shared, plain)]
    for stage in ("regenerate", "run"):
        assert states[0][stage]["target"] == states[1][stage]["target"]
        assert told_by(states[0][stage]) == told_by(states[1][stage])
    assert states[0]["run"]["made_from"][BATCHES_PER_STEP] == 2
    # The run goes on from its last checkpoint in one process, which holds the whole target
    shutil.rmtree(shared / "draft")
    alone = ("--tensor-parallel-size", 1, "--gradient-accumulation-steps", 2)
    result = train(*words[1:], *alone, "--output-dir", shared)
    assert result.exit_code == 0, result.output
    again = load_file(shared / "draft" / "model.safetensors")
    assert all(value.equal(again[name]) for name, value in ours.items())


def test_a_process_loads_its_target_on_its_own_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    fourth = SimpleNamespace(process_index=3, num_processes=8, device=torch.device("cuda", 3))
    monkeypatch.setattr(accelerate, "PartialState", lambda **options: fourth)
    monkeypatch.setattr(train_target, "load_target", lambda *place: loaded.append(place[2]))
    for device in ("auto", "cuda:0"):
        settings = TrainSettings(target="org/x", output_dir=tmp_path, device=device)
        train_target.TargetOnce(settings).look()
    assert loaded == ["cuda:3", "cuda:0"]


def test_a_process_answers_with_a_draft_on_its_targets_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[Any] = []
    monkeypatch.setattr(
        stages, "load_draft", lambda *name, dtype, device_map: places.append(device_map)
    )
    settings = TrainSettings(target="org/x", output_dir=tmp_path, draft="org/draft")
    model: Any = torch.nn.Linear(1, 1, device="cpu")
    model.dtype = torch.float32
    target: Any = SimpleNamespace(take=lambda: (model, None))
    state = RunState(settings, ["regenerate"], False)
    for name in (stages.HELD_OUT, stages.TRAIN):
        path = state.folder("prepare") / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    stages._regenerate(settings, state, target)
    assert places == [{"": torch.device("cpu")}]


def test_steps_of_other_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight processes that take one batch each go on as one that takes eight, and as nothing else."""
    settings = TrainSettings(
        target="org/x", output_dir=tmp_path, arguments={"gradient_accumulation_steps": 8}
    )
    state = RunState(settings, ["run"], False)
    state.write("run")
    (tmp_path / "draft").mkdir()
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "8")
        of_eight = TrainSettings(target="org/x", output_dir=tmp_path)
        RunState(of_eight, [*STAGES], False).check()
        of_more = replace(settings, arguments={"gradient_accumulation_steps": 2})
        what = f"got a change: {BATCHES_PER_STEP} was 8 and is 16; add --redo"
        with pytest.raises(ValueError, match=what):
            RunState(of_more, [*STAGES], False).check()
        # Four processes with one target count as one
        shared = replace(of_eight, tensor_parallel_size=4)
        what = f"got a change: {BATCHES_PER_STEP} was 8 and is 2; add --redo"
        with pytest.raises(ValueError, match=what):
            RunState(shared, [*STAGES], False).check()
        of_four = replace(shared, arguments={"gradient_accumulation_steps": 4})
        RunState(of_four, [*STAGES], False).check()


# As docs/training.md starts them.
LAUNCHERS: dict[str, list[object]] = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2],
    "accelerate": [
        *("-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu"),
        *("--num_processes", 2),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHERS)
def test_launchers_start_the_command(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    data = write_rows(tmp_path / "rows.jsonl")
    stages = ["--stages", "prepare,regenerate,run"]
    words = ["train", "--dataset", data, "--output-dir", out, *SMALL, *stages]
    run = run_python(*LAUNCHERS[name], "-m", "dflash_hf", *words)
    assert [stage for stage, _ in told(run.stdout)] == ["prepare", "regenerate", "run"]
    state = json.loads((out / "stages.json").read_text())
    assert state["run"]["made_from"][BATCHES_PER_STEP] == 2
    assert state["run"]["facts"]["steps"] == 4


def test_two_processes_share_what_they_can(tmp_path: Path) -> None:
    out, notes = tmp_path / "out", tmp_path / "stages"
    words = [
        "--dataset",
        write_rows(tmp_path / "rows.jsonl"),
        "--output-dir",
        out,
        *SMALL,
        "--bench-prompts",
        2,
        "--max-new-tokens",
        6,
    ]
    run = run_forked(training_command_ranks.__file__, notes, out, "train", *words)
    first_said, said_again = run.stdout.split("again\n")
    assert [name for name, _ in told(first_said)] == list(STAGES), "the first process alone speaks"
    first, second = ((tmp_path / f"stages.{rank}").read_text().split() for rank in (0, 1))
    assert (first, second) == (list(STAGES), ["regenerate", "run", "bench"])
    state = json.loads((out / "stages.json").read_text())
    assert [state[stage]["finished"] for stage in STAGES] == [True] * 5
    assert state["run"]["facts"]["steps"] == 4
    (measured,) = (
        m
        for m in json.loads((out / "bench" / "summary.json").read_text())["methods"]
        if m["method"] == "dflash"
    )
    assert measured["all"]["questions"] == 2
    draft = load_draft(out / "draft").state_dict()
    again = load_draft(out / "export" / "zlab").state_dict()
    assert all(value.equal(again[name]) for name, value in draft.items())
    lines = told(said_again)
    assert [(name, rest.partition(",")[0]) for name, rest in lines] == [
        (name, "done before") for name in STAGES
    ]
    assert said_again.endswith("changed: []\n")


NO_SCHEDULE: list[object] = ["--lr-scheduler-type", "cosine_with_min_lr"]
# Options -> the one sentence, of the first process.
REFUSED: dict[str, tuple[list[object], str]] = {
    "in the preflight": (NO_SCHEDULE, "expected options of the schedule cosine_with_min_lr"),
    "in a preflight that all share": (
        [*NO_SCHEDULE, "--tensor-parallel-size", 2, "--stages", "prepare,regenerate,run"],
        "expected options of the schedule cosine_with_min_lr",
    ),
    "in a stage": ([], "rows.jsonl, got None; fix the row"),
    "at the lock": ([], "expected one dflash-hf train at a time in --output-dir"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_first_refuses_for_all_processes(name: str, tmp_path: Path) -> None:
    words, sentence = REFUSED[name]
    out = tmp_path / "out"
    data = write_rows(tmp_path / "rows.jsonl")
    if name == "in a stage":
        with data.open("a") as file:
            file.write(json.dumps({"messages": [{"role": "user"}]}) + "\n")
    others = locked(out) if name == "at the lock" else nullcontext()
    script = training_command_refused.__file__
    with others:
        run = run_forked(script, "train", "--dataset", data, "--output-dir", out, *SMALL, *words)
    assert run.stdout.splitlines()[-1] == "statuses 2 2", run.stderr
    assert sentence in run.stderr
    assert run.stderr.count("Error:") == 1, run.stderr
    assert "Traceback" not in run.stderr
