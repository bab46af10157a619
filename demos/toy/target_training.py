"""What training the text target and the vision target have in common: the step, the schedule, the loop, the file."""

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import torch
import typer
from rich import print as rich_print
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedModel

IGNORE: Final = -100
# Lengths are rounded up to this many tokens, so that matrix shapes stay regular.
LENGTH_STEP: Final = 16


class Rows(Protocol):
    """A micro-batch: the kind of each row, the loss weights (B, S), 1 on answers, and the number of real tokens."""

    @property
    def kinds(self) -> list[Any]:
        """Kind of each row."""
        ...

    @property
    def weights_BS(self) -> torch.Tensor:
        """Weight of each position's loss."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        ...


BatchT = TypeVar("BatchT", bound=Rows)


def round_up(length: int) -> int:
    """Return a length rounded up to `LENGTH_STEP`."""
    return math.ceil(length / LENGTH_STEP) * LENGTH_STEP


def make_optimizers(
    model: PreTrainedModel, lr: float, other_lr: float
) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for embeddings, patches, norms and biases."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(
            matrices, lr=lr, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def lr_factor(step: int, steps: int, warmup: int) -> float:
    """Return the cosine factor with linear warm-up for a zero-based step."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def train_step(
    model: PreTrainedModel, batches: list[BatchT], losses_of: Callable[[BatchT], torch.Tensor]
) -> tuple[dict[Any, list[float]], int]:
    """Accumulate the gradient of one step and return (the answer losses of each kind, the number of tokens)."""
    total = float(sum(batch.weights_BS.sum().item() for batch in batches))
    by_kind: dict[Any, list[float]] = defaultdict(list)
    for batch in batches:
        loss_BS = losses_of(batch)
        ((loss_BS * batch.weights_BS).sum() / total).backward()
        answer_BS = batch.weights_BS == 1
        rows = (loss_BS.detach() * answer_BS).sum(1) / answer_BS.sum(1)
        for kind, row in zip(batch.kinds, rows.tolist(), strict=True):
            by_kind[kind].append(row)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return by_kind, sum(batch.num_tokens for batch in batches)


def train(
    model: PreTrainedModel,
    stream: Iterator[list[BatchT]],
    losses_of: Callable[[BatchT], torch.Tensor],
    save: Callable[[], None],
    *,
    rates: tuple[float, float],
    steps: int,
    stop_after: int,
    warmup: int,
    save_every: int,
    log_every: int,
) -> None:
    """Run the steps of a schedule, log the loss of each kind as JSON lines and save now and then, and at the end."""
    optimizers = make_optimizers(model, *rates)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    bases = [group["lr"] for group in groups]
    began, tokens, losses = time.perf_counter(), 0, defaultdict(list)
    last = stop_after or steps
    for step in range(last):
        for group, base in zip(groups, bases, strict=True):
            group["lr"] = base * lr_factor(step, steps, warmup)
        by_kind, count = train_step(model, next(stream), losses_of)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        tokens += count
        for kind, values in by_kind.items():
            losses[kind] += values
        if (step + 1) % log_every == 0 or step + 1 == last:
            seconds = time.perf_counter() - began
            means = {
                kind: round(sum(values) / len(values), 4) for kind, values in sorted(losses.items())
            }
            line = {
                "step": step + 1,
                "seconds": round(seconds),
                "tokens": tokens,
                "tok_s": round(tokens / seconds),
            }
            typer.echo(json.dumps(line | means))
            losses.clear()
        if save_every and (step + 1) % save_every == 0 and step + 1 < last:
            save()
    save()
    rich_print(f"saved after {time.perf_counter() - began:.0f} s")


def save_target(model: PreTrainedModel, processing_class: Any, out: Path) -> None:
    """Write the checkpoint with float16 weights and a float32 config; each file is replaced at once.

    Args:
        model (`PreTrainedModel`): The target.
        processing_class (`PreTrainedTokenizerBase` or `ProcessorMixin`): What encodes its prompts.
        out (`Path`): Folder.
    """
    scratch = out.parent / f".{out.name}.tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(scratch)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    ).save_pretrained(scratch)
    processing_class.save_pretrained(scratch)
    state = {
        name: p.detach().to(torch.float16).contiguous() for name, p in model.named_parameters()
    }
    save_file(state, scratch / "model.safetensors", metadata={"format": "pt"})
    (scratch / "model.safetensors").chmod(0o644)
    for path in scratch.iterdir():
        os.replace(path, out / path.name)
    scratch.rmdir()
