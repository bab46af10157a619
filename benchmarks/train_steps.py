"""Ten training steps of a draft at published shapes, with random weights, on one GPU: do they run, how long, how much.

    python benchmarks/train_steps.py                  # Qwen3-8B's shapes in bfloat16
    python benchmarks/train_steps.py --tiny           # the same code on a CPU, in seconds

Two rows of 2,048 random tokens, half of each an answer, and up to 512 blocks in each.
The first two steps compile and choose kernels and are not in the median. The loss must fall, because all batches are
of the same rows, and everything must stay finite. Writes `train.json` to `$OUT`, else to benchmarks/results, and
prints the record as the last line.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import typer
from harness.machine import RESULTS, provenance
from harness.report import finish, show
from harness.shapes import SHAPES, build_pair, shape_of
from harness.trial import check_device, device_of, dtype_of
from transformers import TrainerCallback

from dflash_hf.pair.answers import synchronize
from dflash_hf.training import DFlashTrainer, DFlashTrainingArguments, Example

NOT_COUNTED = 2


class Clock(TrainerCallback):
    """Takes down the seconds of every step, and its loss.

    Args:
        place (`torch.device`): Where the work is done.
    """

    def __init__(self, place: torch.device) -> None:
        self.place, self.began = place, 0.0
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first step begins."""
        synchronize(self.place)
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One ends, and the next begins."""
        synchronize(self.place)
        now = time.perf_counter()
        self.seconds.append(now - self.began)
        self.began = now

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Every step has a record."""
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.began = time.perf_counter()


def main(
    is_tiny: Annotated[
        bool, typer.Option("--tiny", help="Tiny doubles of the shapes: for tests.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="Where it runs; CUDA if there is any.")] = None,
    model: Annotated[str, typer.Option(help=f"Of {', '.join(SHAPES)}.")] = "qwen3-8b",
    rows: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 2,
    length: Annotated[int, typer.Option(min=64, help="Tokens of each.")] = 2048,
    steps: Annotated[int, typer.Option(min=NOT_COUNTED + 1, help="Steps.")] = 10,
    out: Annotated[
        Path | None, typer.Option(help="The record; train.json in $OUT or benchmarks/results.")
    ] = None,
) -> None:
    """Take some training steps of a pair with random weights."""
    place = device_of(device)
    if model not in SHAPES:
        raise typer.BadParameter(
            f"expected a model among {', '.join(SHAPES)}, got {model!r}; choose one of them"
        )
    check_device(place, is_tiny)
    shape = shape_of(model, is_tiny)
    dtype = dtype_of(is_tiny)
    if is_tiny:
        length = 64
    pair = build_pair(model, shape, dtype, place)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, shape.vocab - 2, (rows, length), generator=generator).tolist()
    mask = [0] * (length // 2) + [1] * (length - length // 2)
    clock = Clock(place)
    with tempfile.TemporaryDirectory() as folder:
        args = DFlashTrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=rows,
            warmup_steps=0,
            logging_steps=1,
            save_strategy="no",
            use_cpu=place.type == "cpu",
            bf16=True,
            attention="auto",
            disable_tqdm=True,
        )
        trainer = DFlashTrainer(
            # As `dflash-hf train` does: float32 weights, whose products are in bfloat16.
            model=pair.draft.float(),
            target=pair.target,
            args=args,
            train_dataset=[Example(input_ids=row, loss_mask=mask) for row in ids],
            callbacks=[clock],
        )
        if place.type == "cuda":
            torch.cuda.reset_peak_memory_stats(place)
        try:
            trainer.train()
        except FloatingPointError as error:
            print(error, file=sys.stderr)
    losses, seconds = clock.losses or [math.nan], clock.seconds or [math.nan]
    is_right = len(losses) == steps and math.isfinite(losses[-1]) and losses[-1] < losses[0]
    row: dict[str, Any] = {
        "model": model,
        "dtype": pair.dtype,
        "rows": rows,
        "length": length,
        "steps": len(clock.losses),
        "step_ms": statistics.median(seconds[NOT_COUNTED:] or seconds) * 1e3,
        "first_step_seconds": seconds[0],
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "peak_mib": torch.cuda.max_memory_allocated(place) / 2**20
        if place.type == "cuda"
        else None,
        "loss_falls": is_right,
    }
    show("Training steps with random weights", [row], [(key, key) for key in row])
    facts = {"benchmark": "train", "is_tiny": is_tiny, **provenance(place)}
    path = out or Path(os.environ.get("OUT", RESULTS)) / "train.json"
    finish({"provenance": facts, "rows": [row]}, path, quiet=not is_tiny)
    if not is_right:
        print(f"expected a loss that falls, got {losses}", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
