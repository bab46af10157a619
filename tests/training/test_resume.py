"""A run that was ended at any place and resumed is the same run, bit for bit."""

import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM, Trainer, TrainerCallback

from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.training import DFlashTrainer
from helpers import killed_run
from helpers.training import draws, options, records

needs_muon = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon"
)
OPTIMS = ["adamw_torch", pytest.param("muon", marks=needs_muon)]
# Whatever happens in a step that another program could be told of, in order.
EVENTS = [
    "step_begin",
    "substep_end",
    "pre_optimizer_step",
    "optimizer_step",
    "step_end",
    "log",
    "evaluate",
    "save",
]
MakeDraft = Callable[..., DFlashDraftModel]


class Killed(Exception):
    """Stands for the end of the process."""


class Kill(TrainerCallback):
    """Ends a run at the first event of this name from a step on."""

    def __init__(self, step: int, event: str) -> None:
        self.step = step
        setattr(self, f"on_{event}", self._end)

    def _end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self.step:
            raise Killed


def make(
    target: Qwen3ForCausalLM, draft: DFlashDraftModel, folder: Path, *callbacks: Any, **changes: Any
) -> Any:
    """A trainer with all that a step may depend on: dropout, accumulation, epochs, evaluations."""
    fields = {
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 4,
        **changes,
    }
    data = {"train_dataset": draws(10), "eval_dataset": draws(2)}
    return DFlashTrainer(
        model=draft,
        target=target,
        args=options(folder, **fields),
        callbacks=list(callbacks),
        **data,
    )


def assert_same(one: DFlashDraftModel, two: DFlashDraftModel) -> None:
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name


@pytest.mark.parametrize("kind", [{}, {"markov_rank": 4}], ids=["dflash", "dspark"])
@pytest.mark.parametrize("optim", OPTIMS)
def test_resumed_run_is_the_same_run_bit_for_bit(
    optim: str,
    kind: dict[str, Any],
    target: Qwen3ForCausalLM,
    make_draft: MakeDraft,
    tmp_path: Path,
) -> None:
    whole, first = (make_draft(attention_dropout=0.1, **kind) for _ in range(2))
    trainer = make(target, whole, tmp_path / "a", optim=optim)
    trainer.train()
    with pytest.raises(Killed):
        make(target, first, tmp_path / "b", Kill(4, "save"), optim=optim, save_steps=4).train()
    checkpoint = tmp_path / "b" / "checkpoint-4"
    resumed = make_draft(attention_dropout=0.1, initializer_range=0.5, **kind)
    torch.rand(5)
    again = make(
        target, resumed, tmp_path / "c", optim=optim, resume_from_checkpoint=str(checkpoint)
    )
    torch.rand(5)
    again.train()
    assert_same(whole, resumed)
    assert records(again)[-1]["loss"] == records(trainer)[-1]["loss"]
    assert not torch.equal(first.fc.weight, whole.fc.weight)
    assert torch.equal(DFlashDraftModel.from_pretrained(checkpoint).fc.weight, first.fc.weight)


@pytest.mark.parametrize(
    ("optim", "num_kills"),
    [pytest.param("adamw_torch", 8), pytest.param("muon", 3, marks=needs_muon)],
)
def test_a_run_killed_at_many_places_is_the_same_run(
    optim: str, num_kills: int, target: Qwen3ForCausalLM, make_draft: MakeDraft, tmp_path: Path
) -> None:
    steps, chance = num_kills + 12, random.Random(5)
    changes = {"optim": optim, "max_steps": steps, "save_steps": 3, "save_total_limit": 2}
    whole = make_draft(attention_dropout=0.1)
    make(target, whole, tmp_path / "whole", **changes).train()
    # Every kind of event, if there are as many kills.
    events = [*chance.sample(EVENTS, len(EVENTS)), *chance.choices(EVENTS, k=num_kills)][:num_kills]
    places = sorted(chance.sample(range(1, steps - 3), num_kills))
    kills = [Kill(step, event) for step, event in zip(places, events, strict=True)]
    killed = 0
    for kill in [*kills, None]:
        draft = make_draft(attention_dropout=0.1, initializer_range=0.5 if killed else 0.2)
        is_begun = bool(list((tmp_path / "run").glob("checkpoint-*")))
        if not is_begun:  # the initial draft is a part of the run
            draft = make_draft(attention_dropout=0.1)
        trainer = make(target, draft, tmp_path / "run", *([kill] if kill else []), **changes)
        torch.rand(chance.randrange(5))
        if kill is None:
            trainer.train(resume_from_checkpoint=True)
            assert_same(whole, draft)
        else:
            with pytest.raises(Killed):
                trainer.train(resume_from_checkpoint=is_begun)
            killed += 1
    assert killed == num_kills


def test_a_resumed_run_saves_at_the_steps_asked_for_now(
    target: Qwen3ForCausalLM, make_draft: MakeDraft, tmp_path: Path
) -> None:
    whole, resumed = make_draft(), make_draft(initializer_range=0.5)
    make(target, whole, tmp_path, save_steps=4, logging_steps=4).train()
    rmtree(tmp_path / "checkpoint-8")
    again = make(target, resumed, tmp_path, save_steps=3, logging_steps=1, save_total_limit=None)
    again.train(resume_from_checkpoint=True)
    assert_same(whole, resumed)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-4",
        "checkpoint-6",
        "checkpoint-8",
    ]
    assert [row["step"] for row in records(again) if "loss" in row][-4:] == [5, 6, 7, 8]


def test_records_behind_the_checkpoint_are_dropped(
    target: Qwen3ForCausalLM, make_draft: MakeDraft, tmp_path: Path
) -> None:
    """Their steps are done again. Lines that are no records, or that a kill has cut, are dropped too."""
    changes: dict[str, Any] = {"save_steps": 2, "logging_steps": 1}
    with pytest.raises(Killed):
        make(target, make_draft(), tmp_path, Kill(3, "log"), **changes).train()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '3\n{"loss": 2.0}\n{"step": 4, "lo')
    make(target, make_draft(), tmp_path, **changes).train(resume_from_checkpoint=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_records_before_the_first_checkpoint_are_dropped(
    target: Qwen3ForCausalLM, make_draft: MakeDraft, tmp_path: Path
) -> None:
    """The run begins anew; what was measured before its first step stays."""
    changes: dict[str, Any] = {"save_steps": 8, "logging_steps": 1}
    stopped = make(target, make_draft(), tmp_path, Kill(3, "log"), **changes)
    stopped.evaluate()
    with pytest.raises(Killed):
        stopped.train()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "lo')
    make(target, make_draft(), tmp_path, **changes).train()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert rows[0].keys() >= {"step", "eval_acceptance_length"}


@pytest.mark.parametrize("step", [1, 5])
def test_a_resumed_run_is_evaluated_at_its_start_once(
    step: int, target: Qwen3ForCausalLM, make_draft: MakeDraft, tmp_path: Path
) -> None:
    """Killed before its first checkpoint the run begins anew, and later it has been evaluated by then."""
    changes: dict[str, Any] = {"save_steps": 3, "eval_on_start": True}
    with pytest.raises(Killed):
        make(target, make_draft(), tmp_path, Kill(step, "step_end"), **changes).train()
    again = make(target, make_draft(), tmp_path, **changes)
    again.train(resume_from_checkpoint=step > 3)
    assert again.args.eval_on_start
    for checkpoint in tmp_path.glob("checkpoint-*"):
        saved = torch.load(checkpoint / "training_args.bin", weights_only=False)
        assert saved.eval_on_start, checkpoint
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    for rows in (map(json.loads, lines), again.state.log_history):
        assert [row["step"] for row in rows if "eval_acceptance_length" in row] == [0, 4, 8]


@pytest.mark.parametrize("event", ["epoch_end", "evaluate"])
@pytest.mark.parametrize(
    ("max_steps", "step"), [(4, 4), (3, 3), (4, 2)], ids=["last", "last in an epoch", "earlier"]
)
def test_a_run_killed_between_a_checkpoint_and_its_evaluation_is_the_same_run(
    max_steps: int,
    step: int,
    event: str,
    target: Qwen3ForCausalLM,
    make_draft: MakeDraft,
    tmp_path: Path,
) -> None:
    """An epoch of two steps: what was not measured is measured once, and no step comes behind the last one."""
    changes: dict[str, Any] = {
        "max_steps": max_steps,
        "save_steps": 1,
        "eval_strategy": "epoch",
        "lr_scheduler_type": "constant",
    }
    whole, resumed = make_draft(), make_draft(initializer_range=0.5)
    trainer = make(target, whole, tmp_path / "whole", **changes)
    trainer.train()
    folder = tmp_path / "run"
    with pytest.raises(Killed):
        make(target, make_draft(), folder, Kill(step, event), **changes).train()
    again = make(target, resumed, folder, **changes)
    assert again.train(resume_from_checkpoint=True).global_step == max_steps
    assert_same(whole, resumed)
    name = "eval_acceptance_length"
    expected = [(row["step"], row[name]) for row in records(trainer, name)]
    assert [at for at, _ in expected] == [2, max_steps]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for rows in (again.state.log_history, lines):
        assert [(row["step"], row[name]) for row in rows if name in row] == expected
    steps = {path.name.rpartition("-")[2] for path in folder.glob("checkpoint-*")}
    assert max(steps) == str(max_steps)


def test_the_best_draft_is_found_in_a_folder_that_moved(
    target: Qwen3ForCausalLM, make_draft: MakeDraft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was killed behind its last step still ends with its best draft, from another working folder too."""
    changes: dict[str, Any] = {
        "load_best_model_at_end": True,
        "save_steps": 2,
        "eval_steps": 2,
        "save_total_limit": 1,
    }
    lengths = {2: 3, 4: 2, 6: 1, 8: 1}

    class Falling(DFlashTrainer):
        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            found = super().evaluation_loop(*args, **kwargs)
            found.metrics["eval_acceptance_length"] = lengths[self.state.global_step]
            return found

    monkeypatch.setattr(sys.modules[__name__], "DFlashTrainer", Falling)
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "before")
    with pytest.raises(Killed):
        make(target, make_draft(), Path("run"), Kill(8, "save"), **changes).train()
    best = DFlashDraftModel.from_pretrained(tmp_path / "before" / "run" / "checkpoint-2")
    monkeypatch.chdir(tmp_path / "after")
    (tmp_path / "before" / "run").rename("run")
    again = make_draft(initializer_range=0.5)
    make(target, again, Path("run"), **changes).train(resume_from_checkpoint=True)
    assert_same(best, again)


def test_an_unfinished_checkpoint_is_passed_over(
    target: Qwen3ForCausalLM, make_draft: MakeDraft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one that lacks a part, nor the remains of an earlier run in the same folder, nor a torn file."""
    whole, first, resumed = make_draft(), make_draft(), make_draft(initializer_range=0.5)
    make(target, whole, tmp_path, save_steps=2, save_total_limit=None).train()

    def killed(self: DFlashTrainer, folder: str) -> None:
        if folder.endswith("checkpoint-4"):
            raise Killed

    options: dict[str, Any] = {"save_steps": 2, "save_total_limit": None}
    stopped = make(target, first, tmp_path, **options, learning_rate=2e-3)
    with monkeypatch.context() as patch:
        patch.setattr(DFlashTrainer, "_save_rng_state", killed)
        with pytest.raises(Killed):
            stopped.train()
    assert not (tmp_path / "checkpoint-4" / "trainer_state.json").exists()
    for step in (6, 8):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text('{"global_step": ')
    again = make(target, resumed, tmp_path, **options)
    with monkeypatch.context() as patch:
        patch.setattr(
            again,
            "get_train_dataloader",
            lambda: pytest.fail("which one it is shows before any data"),
        )
        with pytest.raises(
            ValueError, match=r"expected a checkpoint folder with trainer_state\.json, got .*-4; "
        ):
            again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert again.train(resume_from_checkpoint=True).global_step == 8
    assert records(again)[0]["step"] == 4


def test_a_checkpoint_of_steps_with_other_rows_is_refused(
    target: Qwen3ForCausalLM, make_draft: MakeDraft, tmp_path: Path
) -> None:
    """A run would leave rows out or take them twice; only the last two checkpoints are kept."""
    make(target, make_draft(), tmp_path, save_steps=2).train()
    names = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert names == ["checkpoint-6", "checkpoint-8"]
    for changes, sentence in (
        ({"gradient_accumulation_steps": 4}, "expected 2 batches per step as in .*, got 4; with 1"),
        ({"per_device_train_batch_size": 1}, "expected 3 rows per batch as in .*, got 1; set"),
    ):
        again = make(target, make_draft(), tmp_path, **changes)
        with pytest.raises(ValueError, match=sentence):
            again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 0


def test_a_checkpoint_of_other_batches_is_refused(
    target: Qwen3ForCausalLM, make_draft: MakeDraft, tmp_path: Path
) -> None:
    make(target, make_draft(), tmp_path, save_steps=2, max_steps=2).train()
    for changes, sentence in (
        ({"packing_length": 32}, "expected packing_length None as in .*, got 32; go on with"),
        ({"data_seed": 5}, "expected data_seed 42 as in .*, got 5; go on with"),
    ):
        again = make(target, make_draft(), tmp_path, **changes)
        with pytest.raises(ValueError, match=sentence):
            again.train(resume_from_checkpoint=True)
    args = options(tmp_path, gradient_accumulation_steps=2)
    other = DFlashTrainer(model=make_draft(), target=target, args=args, train_dataset=draws(9))
    with pytest.raises(ValueError, match=r"expected lengths of train_dataset .* as in"):
        other.train(resume_from_checkpoint=True)
    make(target, make_draft(), tmp_path, data_seed=42).train(resume_from_checkpoint=True)
    # A checkpoint of Transformers' own trainer
    path = tmp_path / "checkpoint-2" / "trainer_state.json"
    state = json.loads(path.read_text())
    del state["stateful_callbacks"]["Records"]
    path.write_text(json.dumps(state))
    again = make(target, make_draft(), tmp_path)
    with pytest.raises(ValueError, match=r"expected a checkpoint of a DFlashTrainer in .*-2, got"):
        again.train(resume_from_checkpoint=str(path.parent))


def test_a_full_disk_is_told_and_the_run_goes_on_afterwards(
    target: Qwen3ForCausalLM, make_draft: MakeDraft, tmp_path: Path
) -> None:
    """A limit on the size of files, above the weights' and below that of the optimizer's state."""
    whole, draft = make_draft(), make_draft()
    make(target, whole, tmp_path / "a").train()
    trainer = make(target, draft, tmp_path / "b", save_steps=2)
    weights = 4 * draft.num_parameters()

    class Fill(TrainerCallback):
        """Leaves room for the checkpoint of step 2 alone."""

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(1.3 * weights), limits[1]))

    trainer.add_callback(Fill())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(
            OSError,
            match=r"expected to write .*checkpoint-4, got .*; make room on the disk or make it writable, then go on "
            r"from .*checkpoint-2 with resume_from_checkpoint=True$",
        ):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    resumed = make_draft(initializer_range=0.5)
    make(target, resumed, tmp_path / "b", save_steps=2).train(resume_from_checkpoint=True)
    assert_same(whole, resumed)


def test_a_disk_that_takes_no_checkpoint_names_none(
    target: Qwen3ForCausalLM, make_draft: MakeDraft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Trainer, "_save_checkpoint", refuse)
    sentence = r"Read-only file system; .* then begin again: no checkpoint of this run is whole$"
    with pytest.raises(OSError, match=sentence):
        make(target, make_draft(), tmp_path, save_steps=2).train()


@pytest.mark.slow
def test_a_process_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    """SIGKILL at five random moments, while a step or a checkpoint is under way."""
    killed_run.train(tmp_path / "whole")
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, killed_run.__file__, str(tmp_path / "run")]
    environment, chance = os.environ | {"PYTHONPATH": paths}, random.Random(3)
    for kill in (True,) * 5 + (False,):
        before = len(list((tmp_path / "run").glob("checkpoint-*/trainer_state.json")))
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            while kill and process.poll() is None:
                if len(list((tmp_path / "run").glob("checkpoint-*/trainer_state.json"))) > before:
                    time.sleep(chance.random())
                    process.send_signal(signal.SIGKILL)
                    break
                time.sleep(0.01)
            _, said = process.communicate()
        assert process.returncode == (-signal.SIGKILL if kill else 0), said.decode()
    for one, two in zip(
        *(sorted((tmp_path / name).glob("*.safetensors")) for name in ("whole", "run")), strict=True
    ):
        assert one.read_bytes() == two.read_bytes()
