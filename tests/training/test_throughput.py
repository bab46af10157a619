"""What records tell of speed: tokens and rows that the steps had, their seconds, and the wait for their batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3ForCausalLM, TrainerCallback

from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.training import DFlashTrainer, Example
from helpers.training import draws, options, records

MakeDraft = Callable[..., DFlashDraftModel]
ROWS = draws(10)
NUM_TOKENS = sum(len(row.input_ids) for row in ROWS)
SECONDS_ASLEEP = 0.05


class SlowRows(Sequence[Example]):
    """Rows that take a time to be read, once somebody says so; it counts how often they were."""

    def __init__(self) -> None:
        self.lengths = [len(row.input_ids) for row in ROWS]
        self.is_slow = False
        self.num_slow = 0

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: Any) -> Any:
        if self.is_slow:
            time.sleep(SECONDS_ASLEEP)
            self.num_slow += 1
        return ROWS[index]


class SlowSave(TrainerCallback):
    """Takes a time behind each checkpoint."""

    def __init__(self) -> None:
        self.num_slow = 0

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(SECONDS_ASLEEP)
        self.num_slow += 1


def counted(told: list[dict[str, Any]], name: str) -> float:
    """The sum of what some records say, as a number and no rate."""
    return sum(record[name] * record["seconds"] for record in told)


def test_a_slow_loader_is_seen_as_waiting(
    target: Qwen3ForCausalLM, make_draft: MakeDraft, tmp_path: Path
) -> None:
    rows = SlowRows()
    trainer = DFlashTrainer(
        model=make_draft(), target=target, args=options(tmp_path), train_dataset=rows
    )
    rows.is_slow = True
    trainer.train()
    told = records(trainer)
    assert rows.num_slow > 0
    assert counted(told, "data_wait_share") >= rows.num_slow * SECONDS_ASLEEP
    assert all(0 < record["data_wait_share"] < 1 for record in told)


def test_a_slow_step_is_not_seen_as_waiting(
    target: Qwen3ForCausalLM, make_draft: MakeDraft, tmp_path: Path
) -> None:
    """The target's forward computes: a loader that is quick is not waited for."""
    num_slow = 0

    def sleep(*_: object) -> None:
        nonlocal num_slow
        num_slow += 1
        time.sleep(SECONDS_ASLEEP)

    trainer = DFlashTrainer(
        model=make_draft(), target=target, args=options(tmp_path), train_dataset=ROWS
    )
    handle = target.model.layers[0].register_forward_pre_hook(sleep)
    trainer.train()
    handle.remove()
    told = records(trainer)
    seconds = sum(record["seconds"] for record in told)
    assert num_slow >= 8
    assert counted(told, "data_wait_share") <= seconds - num_slow * SECONDS_ASLEEP


@pytest.mark.parametrize(
    "changes",
    [
        {"max_steps": 8},
        {"max_steps": 4, "gradient_accumulation_steps": 2},
        {"max_steps": 8, "logging_steps": 1, "packing_length": 32},
        {"max_steps": 8, "dataloader_num_workers": 1},
    ],
    ids=["batches", "accumulated", "packed", "by a worker"],
)
def test_rates_times_seconds_are_what_the_batches_hold(
    changes: dict[str, Any], target: Qwen3ForCausalLM, make_draft: MakeDraft, tmp_path: Path
) -> None:
    """Four batches are an epoch of ten rows; padding is no token."""
    args = options(tmp_path, include_num_input_tokens_seen="non_padding", **changes)
    trainer = DFlashTrainer(model=make_draft(), target=target, args=args, train_dataset=ROWS)
    trainer.train()
    told = records(trainer)
    epochs = round(told[-1]["epoch"])
    assert epochs >= 2
    assert counted(told, "tokens_per_second") == pytest.approx(epochs * NUM_TOKENS)
    assert counted(told, "rows_per_second") == pytest.approx(epochs * len(ROWS))
    assert told[-1]["num_input_tokens_seen"] == epochs * NUM_TOKENS, "Transformers' own count"


def test_a_resumed_run_counts_its_own_steps(
    target: Qwen3ForCausalLM, make_draft: MakeDraft, tmp_path: Path
) -> None:
    """Neither the steps before it nor checkpoints and evaluations are in its seconds, tokens and rows."""

    def make(callback: SlowSave, **changes: Any) -> DFlashTrainer:
        args = options(
            tmp_path, logging_steps=1, save_steps=1, eval_strategy="steps", eval_steps=2, **changes
        )
        return DFlashTrainer(
            model=make_draft(),
            target=target,
            args=args,
            train_dataset=ROWS,
            eval_dataset=draws(2),
            callbacks=[callback],
        )

    make(SlowSave(), save_total_limit=None).train()
    save = SlowSave()
    again = make(save, save_total_limit=None)
    began = time.perf_counter()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    wall = time.perf_counter() - began
    told = [record for record in records(again) if record["step"] > 4]
    assert [record["step"] for record in told] == [5, 6, 7, 8]
    assert counted(told, "tokens_per_second") == pytest.approx(NUM_TOKENS), "an epoch of four steps"
    assert counted(told, "rows_per_second") == pytest.approx(len(ROWS))
    assert save.num_slow == 4
    assert sum(record["seconds"] for record in told) <= wall - save.num_slow * SECONDS_ASLEEP
    assert all(record["seconds"] > 0 for record in told)
    assert all(0 < record["data_wait_share"] < 1 for record in told)
