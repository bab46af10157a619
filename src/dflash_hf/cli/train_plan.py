"""`dflash-hf train --plan`: what a run will take, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.benchmark import Timer
from transformers import AutoConfig

from dflash_hf.checkpoints.files import read_config, stored_tensors
from dflash_hf.checkpoints.formats import detect_format, make_config
from dflash_hf.checkpoints.fresh import fresh_config
from dflash_hf.cli.train_settings import TrainSettings
from dflash_hf.cli.train_stages import make_arguments
from dflash_hf.cli.train_state import FOLDERS
from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.devices import accelerator
from dflash_hf.training.plan import GB, Plan, Sizes, check_fits, meta_model

BYTES_PER_TOKEN = 4  # of English text, about
MATMUL_SECONDS = 0.5


def print_plan(settings: TrainSettings, console: Console) -> None:
    """Prints steps, hours and peak memory of a training.

    Raises:
        ValueError: If it does not fit this machine's device; with what to lower.
    """
    target: Any = AutoConfig.from_pretrained(settings.target)
    draft: DFlashConfig = draft_config(settings, target)
    sizes = Sizes.of(make_arguments(settings), settings.max_length, draft.block_size)
    num_examples, mean_length = count_examples(settings)
    found = Plan(
        target,
        draft,
        sizes,
        num_examples=num_examples,
        mean_length=mean_length,
        target_dtype=settings.dtype,
    )
    table = Table(title=f"Training a draft for {settings.target}", show_header=False)
    rate = matmul_rate(torch.bfloat16 if sizes.mixed_precision else torch.float32)
    hours = found.hours(rate)
    examples = "not known before prepare" if num_examples is None else f"{num_examples:,}"
    table.add_row(
        "examples",
        f"{examples}, {mean_length:,.0f} tokens on average, about" if mean_length else examples,
    )
    table.add_row(
        "steps", "not known before prepare" if found.steps is None else f"{found.steps:,}"
    )
    table.add_row(
        "operations per step", f"{(found.target_flops + found.draft_flops) / 1e12:,.2f} TFLOP"
    )
    if hours is not None:
        told = f"{hours:,.1f}, at the {rate / 1e12:,.2f} TFLOP/s that products of large matrices reach here"
        table.add_row("hours of training, at least", told)
    for name, size in found.bytes_by_part.items():
        table.add_row(f"  {name}", f"{size / GB:,.2f} GB")
    table.add_row("peak memory of a device", f"{found.peak_bytes / GB:,.2f} GB")
    device = accelerator_memory()
    if device is not None:
        table.add_row("this device has", f"{device / GB:,.1f} GB")
    console.print(table)
    if device is not None:
        check_fits(found, device)


def draft_config(settings: TrainSettings, target: Any) -> Any:
    """Returns the config of the draft that would be trained: of the one that is given, or of a fresh one."""
    if settings.draft is not None:
        raw = read_config(settings.draft, {})
        form = detect_format(raw)
        ours = {form.our_name(name) for name in stored_tensors(settings.draft)}
        return make_config(form.read_config(raw, frozenset(ours)))
    sizes = {"num_hidden_layers": settings.num_hidden_layers, "block_size": settings.block_size}
    fields: dict[str, Any] = {"mask_token_id": 0, **sizes, **settings.draft_options}
    options = {name: fields.pop(name) for name in ("num_taps", "draft_token_ids") if name in fields}
    return fresh_config(meta_model(target), fields, **options)


def count_examples(settings: TrainSettings) -> tuple[int | None, float | None]:
    """Returns how many sequences there are to train on and their mean length in tokens, as far as files say.

    Those of a finished stage, else of the files in `--dataset`, of which some are held out; lengths are estimated from
    the size of the texts.
    """
    for name in (*FOLDERS["regenerate"], *FOLDERS["prepare"]):
        file = settings.output_dir / name / "train.jsonl"
        if file.is_file() and file.stat().st_size:
            return _count([file], settings)
    files = [
        Path(name)
        for name in settings.dataset
        if Path(name).suffix == ".jsonl" and Path(name).is_file()
    ]
    if len(files) != len(settings.dataset):
        known = settings.num_prompts
        return (None if known is None else known + settings.self_prompts), None
    if not files:
        return settings.self_prompts, None
    count, mean = _count(files, settings)
    most = min(count, settings.num_prompts or count)
    return most - min(settings.num_eval, most // 5) + settings.self_prompts, mean


def _count(files: list[Path], settings: TrainSettings) -> tuple[int, float | None]:
    count = 0
    tokens = 0.0
    for file in files:
        with file.open("rb") as opened:
            for line in opened:
                count += bool(line.strip())
                answer = settings.max_new_tokens if settings.answers == "target" else 0
                if b'"answer_ids"' in line:
                    answer = len(json.loads(line)["answer_ids"])
                tokens += min(settings.max_length, answer + len(line) / BYTES_PER_TOKEN)
    return count, tokens / count if count else None


def matmul_rate(dtype: Any) -> float:
    """Returns the operations per second of this machine's device in products of large matrices."""
    device = accelerator() or torch.device("cpu")
    size = 512 if device.type == "cpu" else 4096
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    wait = "" if device.type == "cpu" else "; torch.accelerator.synchronize()"
    timer = Timer(
        f"torch.mm(left, right){wait}",
        globals={"torch": torch, "left": left, "right": right},
        num_threads=torch.get_num_threads(),
    )
    return 2 * size**3 / timer.blocked_autorange(min_run_time=MATMUL_SECONDS).median


def accelerator_memory() -> int | None:
    """Returns the memory of this machine's accelerator in bytes, `None` where there is none."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
