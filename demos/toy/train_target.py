"""Train the toy target, a small Qwen3 model, from its configuration on generated conversations.

The run is a function of its options: samples come from a numbered stream that never repeats, and its length is set in
steps. One step takes a pool of conversations, sorts it by length and runs it in micro-batches of similar length.
"""

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import torch
import torch.nn.functional as F
import typer
from build_tokenizer import MAX_LENGTH, TARGET_DIR, build_tokenizer
from fast_forward import fast_logits
from rich import print as rich_print
from safetensors.torch import save_file
from tasks import KINDS, Kind, make_sample
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

IGNORE: Final = -100
# Lengths are rounded up to this many tokens, so that matrix shapes stay regular.
LENGTH_STEP: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """One conversation as token ids, with the mask of the tokens that the assistant writes."""

    kind: Kind
    input_ids: list[int]
    is_answer: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Right-padded conversations of similar length; B rows, S tokens."""

    kinds: list[Kind]
    input_ids_BS: torch.Tensor
    labels_BS: torch.Tensor
    weights_BS: torch.Tensor


def make_config(tokenizer: PreTrainedTokenizerBase) -> Qwen3Config:
    """Return the configuration of the target: deep and thin, 5 M parameters."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=12,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def encode(tokenizer: PreTrainedTokenizerBase, kind: Kind, index: int) -> Encoded:
    """Encode the training conversation of a kind at an index."""
    encoded = tokenizer.apply_chat_template(
        make_sample(kind, "train", index).conversation(), return_assistant_tokens_mask=True, return_dict=True
    )
    return Encoded(kind=kind, input_ids=encoded["input_ids"], is_answer=encoded["assistant_masks"])


def pad_batch(rows: list[Encoded], pad_id: int, prompt_weight: float) -> MicroBatch:
    """Pad rows on the right; labels are shifted by one, and prompt tokens get a small weight."""
    longest = max(len(row.input_ids) for row in rows)
    length = math.ceil(longest / LENGTH_STEP) * LENGTH_STEP
    input_ids_BS = torch.full((len(rows), length), pad_id)
    labels_BS = torch.full((len(rows), length), IGNORE)
    weights_BS = torch.zeros(len(rows), length)
    for at, row in enumerate(rows):
        size = len(row.input_ids)
        input_ids_BS[at, :size] = torch.tensor(row.input_ids)
        labels_BS[at, : size - 1] = torch.tensor(row.input_ids[1:])
        answer = torch.tensor(row.is_answer[1:], dtype=torch.float32)
        weights_BS[at, : size - 1] = answer + (1 - answer) * prompt_weight
    return MicroBatch(
        kinds=[row.kind for row in rows], input_ids_BS=input_ids_BS, labels_BS=labels_BS, weights_BS=weights_BS
    )


def sample_numbers(kinds: list[Kind], index: int) -> list[tuple[Kind, int]]:
    """Return the (kind, sample number) pairs of one round; a kind that occurs n times takes n numbers per round."""
    numbers = []
    for at, kind in enumerate(kinds):
        numbers.append((kind, index * kinds.count(kind) + kinds[:at].count(kind)))
    return numbers


def step_batches(
    tokenizer: PreTrainedTokenizerBase, kinds: list[Kind], first_index: int, pool: int, micro: int, weight: float
) -> Iterator[list[MicroBatch]]:
    """Yield, without end, the micro-batches of each step from the numbered stream of samples."""
    index = first_index
    while True:
        rows = []
        while len(rows) < pool:
            rows += [encode(tokenizer, kind, number) for kind, number in sample_numbers(kinds, index)]
            index += 1
        rows.sort(key=lambda row: len(row.input_ids))
        yield [pad_batch(rows[at : at + micro], tokenizer.pad_token_id, weight) for at in range(0, len(rows), micro)]


def token_losses(model: Qwen3ForCausalLM, batch: MicroBatch, fast: bool) -> torch.Tensor:
    """Return the loss of every position, shape (B, S), zero where there is no label."""
    ids = batch.input_ids_BS
    logits_BSV = fast_logits(model, ids) if fast else model(input_ids=ids, use_cache=False).logits
    loss = F.cross_entropy(logits_BSV.flatten(0, 1).float(), batch.labels_BS.flatten(), reduction="none")
    return loss.view_as(batch.labels_BS)


def make_optimizers(model: Qwen3ForCausalLM, lr: float, embedding_lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=embedding_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def lr_factor(step: int, steps: int, warmup: int) -> float:
    """Return the cosine factor with linear warm-up for a zero-based step."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def save_target(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Write the checkpoint with float16 weights and a float32 config; each file is replaced at once."""
    scratch = out.parent / f".{out.name}.tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.save_pretrained(scratch)
    GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    ).save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    state = {name: p.detach().to(torch.float16).contiguous() for name, p in model.named_parameters()}
    save_file(state, scratch / "model.safetensors", metadata={"format": "pt"})
    (scratch / "model.safetensors").chmod(0o644)
    for path in scratch.iterdir():
        os.replace(path, out / path.name)
    scratch.rmdir()


def train_step(model: Qwen3ForCausalLM, batches: list[MicroBatch], fast: bool) -> tuple[dict[Kind, list[float]], int]:
    """Accumulate the gradient of one step and return (the answer losses of each kind, the number of tokens)."""
    total = float(sum(batch.weights_BS.sum().item() for batch in batches))
    by_kind: dict[Kind, list[float]] = defaultdict(list)
    for batch in batches:
        loss_BS = token_losses(model, batch, fast)
        ((loss_BS * batch.weights_BS).sum() / total).backward()
        answer_BS = batch.weights_BS == 1
        rows = (loss_BS.detach() * answer_BS).sum(1) / answer_BS.sum(1)
        for kind, row in zip(batch.kinds, rows.tolist(), strict=True):
            by_kind[kind].append(row)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return by_kind, sum(int((batch.weights_BS > 0).sum()) for batch in batches)


def main(
    steps: Annotated[int, typer.Option(help="Number of optimizer steps that the rate schedule spans.")] = 1200,
    stop_after: Annotated[int, typer.Option(help="Stop after this step of the schedule, 0 for its end.")] = 0,
    pool: Annotated[int, typer.Option(help="Conversations per step.")] = 32,
    micro: Annotated[int, typer.Option(help="Conversations per forward pass.")] = 8,
    lr: Annotated[float, typer.Option(help="Peak rate of Muon, for the matrices.")] = 4e-3,
    embedding_lr: Annotated[float, typer.Option(help="Peak rate of AdamW, for embedding and norms.")] = 4e-3,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 40,
    prompt_weight: Annotated[float, typer.Option(help="Loss weight of the tokens that the user writes.")] = 0.1,
    kinds: Annotated[str, typer.Option(help="Kinds in the mix, separated by commas; repeat one to weigh it.")] = "",
    first_index: Annotated[int, typer.Option(help="Number of the first sample; raise it to continue a run.")] = 0,
    init_from: Annotated[Path | None, typer.Option(help="Checkpoint to continue from.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the checkpoint.")] = TARGET_DIR,
    save_every: Annotated[int, typer.Option(help="Steps between intermediate checkpoints, 0 for none.")] = 250,
    log_every: Annotated[int, typer.Option(help="Steps between log lines.")] = 20,
    threads: Annotated[int, typer.Option(help="Torch threads.")] = 1,
    fast: Annotated[bool, typer.Option(help="Use the bfloat16 forward pass of fast_forward.py.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights.")] = 0,
) -> None:
    """Train the target and save it with its tokenizer."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(init_from) if init_from else build_tokenizer()
    config = make_config(tokenizer)
    model = Qwen3ForCausalLM.from_pretrained(init_from) if init_from else Qwen3ForCausalLM(config)
    model.train()
    optimizers = make_optimizers(model, lr, embedding_lr)
    bases = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    mix: list[Kind] = [kind for kind in kinds.split(",") if kind] or list(KINDS)
    rich_print(f"{model.num_parameters():,} parameters, {steps} steps of {pool} conversations, mix {mix}")
    stream = step_batches(tokenizer, mix, first_index, pool, micro, prompt_weight)
    began, tokens, losses = time.perf_counter(), 0, defaultdict(list)
    last = stop_after or steps
    for step in range(last):
        factor = lr_factor(step, steps, warmup)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, base in zip(groups, bases, strict=True):
            group["lr"] = base * factor
        by_kind, count = train_step(model, next(stream), fast)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        tokens += count
        for kind, values in by_kind.items():
            losses[kind] += values
        if (step + 1) % log_every == 0 or step + 1 == last:
            seconds = time.perf_counter() - began
            means = {kind: round(sum(values) / len(values), 4) for kind, values in sorted(losses.items())}
            line = {"step": step + 1, "seconds": round(seconds), "tokens": tokens, "tok_s": round(tokens / seconds)}
            typer.echo(json.dumps(line | means))
            losses.clear()
        if save_every and (step + 1) % save_every == 0 and step + 1 < last:
            save_target(model, tokenizer, out)
    save_target(model, tokenizer, out)
    rich_print(f"saved to {out} after {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    typer.run(main)
