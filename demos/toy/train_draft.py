"""Train the toy draft: a small DFlash draft for the toy target, on answers that the target itself wrote.

The run is a function of its options and of the target: training prompts come from the training split, their answers
are regenerated greedily, and the result is measured on held-out prompts by walking the target's own answers.
"""

import json
import os
import time
from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from build_tokenizer import TARGET_DIR
from draft_data import CACHE_DIR, answered_examples
from rich import print as rich_print
from safetensors.torch import load_file, save_file
from tasks import KINDS, Kind
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.positions import build_target_layer_ids
from dflash_hf.target import find_target
from dflash_hf.training import DFlashTrainer, DFlashTrainingConfig, Example, walked_acceptance

DRAFT_DIR: Final = Path(__file__).resolve().parent / "draft"
MAX_PAIR_BYTES: Final = 16 * 2**20

CARD: Final = """---
library_name: transformers
tags: [dflash, speculative-decoding, toy]
---

# Toy DFlash draft

A draft of {parameters:,} parameters for the toy target next to it (`../target`): {layers} layers, blocks of
{block_size} tokens, taps on target layers {taps}. It exists to run tests and demos on a CPU in seconds; it knows
nothing beyond the four generated kinds of task.

```python
import dflash_hf
from dflash_hf import DFlashDraftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained("demos/toy/target")
tokenizer = AutoTokenizer.from_pretrained("demos/toy/target")
draft = DFlashDraftModel.from_pretrained("demos/toy/draft")
messages = [{{"role": "user", "content": "Compute 41 + 80 - 99 + 14."}}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
out = target.generate(**inputs, assistant_model=draft, max_new_tokens=256)
```

## Acceptance

Mean tokens committed per verify, the target's own token included, greedy, block {block_size}, on {held_out} held-out
prompts per kind (at most {block_size}):

| kind | acceptance length |
| --- | --- |
{rows}

## Training

`python demos/toy/train_draft.py`: {examples:,} prompts of the training split, answers regenerated greedily by the
target, {steps:,} steps of {batch} sequences with up to {anchors} random anchors each, seed {seed}, {minutes:.0f}
minutes on one CPU thread. Weights are stored in float16.
"""


def make_draft(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, layers: int, taps: int, block_size: int
) -> DFlashDraftModel:
    """Return a fresh draft of the target's shape."""
    config = target.config
    return DFlashDraftModel(
        DFlashConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rope_parameters=dict(config.rope_parameters),
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            block_size=block_size,
            mask_token_id=tokenizer.mask_token_id,
            num_target_layers=config.num_hidden_layers,
            target_layer_ids=build_target_layer_ids(config.num_hidden_layers, taps),
            dtype="float32",
        )
    )


def save_draft(draft: DFlashDraftModel, out: Path) -> int:
    """Write the draft with float16 weights and a float32 config, each file at once; return the weights' bytes."""
    scratch = out.parent / f".{out.name}.tmp"
    draft.save_pretrained(scratch)
    weights = scratch / "model.safetensors"
    state = {name: tensor.to(torch.float16).contiguous() for name, tensor in load_file(weights).items()}
    save_file(state, weights, metadata={"format": "pt"})
    size = weights.stat().st_size
    out.mkdir(parents=True, exist_ok=True)
    for path in scratch.iterdir():
        os.replace(path, out / path.name)
    scratch.rmdir()
    return size


def measure(target: PreTrainedModel, draft: DFlashDraftModel, held_out: dict[Kind, list[Example]]) -> dict[str, float]:
    """Return the walked acceptance length of each kind, and pooled over all verifies of all kinds."""
    found = find_target(target)
    committed: list[list[int]] = []
    lengths: dict[str, float] = {}
    for kind, examples in held_out.items():
        walked = walked_acceptance(draft, found, examples)
        lengths[kind] = walked.acceptance_length
        committed += walked.committed
    lengths["pooled"] = sum(map(sum, committed)) / sum(map(len, committed))
    return lengths


def write_card(out: Path, lengths: dict[str, float], **facts: object) -> None:
    """Write the model card."""
    rows = "\n".join(f"| {kind} | {length:.2f} |" for kind, length in lengths.items())
    (out / "README.md").write_text(CARD.format(rows=rows, **facts), encoding="utf-8")


def main(
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 3000,
    prompts: Annotated[int, typer.Option(help="Training prompts of each kind.")] = 1500,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 8,
    anchors: Annotated[int, typer.Option(help="Most anchors per sequence.")] = 16,
    layers: Annotated[int, typer.Option(help="Layers of the draft.")] = 3,
    taps: Annotated[int, typer.Option(help="Tapped layers of the target.")] = 4,
    block_size: Annotated[int, typer.Option(help="Slots per block, the anchor included.")] = 16,
    optim: Annotated[str, typer.Option(help="adamw or muon.")] = "muon",
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 8e-3,
    gamma: Annotated[float, typer.Option(help="Decay of the loss over slots.")] = 7.0,
    held_out: Annotated[int, typer.Option(help="Held-out prompts of each kind for the final measurement.")] = 24,
    eval_steps: Annotated[int, typer.Option(help="Steps between evaluations, 0 for none.")] = 400,
    save_steps: Annotated[int, typer.Option(help="Steps between checkpoints, 0 for none.")] = 400,
    target_dir: Annotated[Path, typer.Option("--target", help="Folder of the target.")] = TARGET_DIR,
    out: Annotated[Path, typer.Option(help="Folder of the draft.")] = DRAFT_DIR,
    run_dir: Annotated[Path, typer.Option(help="Folder of checkpoints and metrics.")] = CACHE_DIR / "run",
    resume: Annotated[Path | None, typer.Option(help="Checkpoint folder to continue from.")] = None,
    threads: Annotated[int, typer.Option(help="Torch threads.")] = 1,
    bf16: Annotated[bool, typer.Option(help="Train with bfloat16 autocast.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the weights, the order and the anchors.")] = 0,
) -> None:
    """Regenerate answers, train the draft, save it and measure it on held-out prompts."""
    began = time.perf_counter()
    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    target = AutoModelForCausalLM.from_pretrained(target_dir, dtype="float32").eval()
    train = answered_examples(target, tokenizer, target_dir, prompts)
    held: dict[Kind, list[Example]] = {
        kind: answered_examples(target, tokenizer, target_dir, held_out, "heldout", (kind,)) for kind in KINDS
    }
    rich_print(f"{len(train):,} answers after {time.perf_counter() - began:.0f} s")
    torch.manual_seed(seed)
    draft = make_draft(target, tokenizer, layers, taps, block_size)
    args = DFlashTrainingConfig(
        output_dir=str(run_dir),
        optim="muon" if optim == "muon" else "adamw",
        learning_rate=lr,
        adam_beta2=0.98,
        max_steps=steps,
        per_device_train_batch_size=batch,
        num_anchors=anchors,
        gamma=gamma,
        mixed_precision="bf16" if bf16 else "no",
        seed=seed,
        logging_steps=20,
        eval_steps=eval_steps,
        save_steps=save_steps,
        save_total_limit=1,
        resume_from_checkpoint=str(resume) if resume else None,
    )
    # A third of the held-out prompts is enough to watch a run.
    watched = [example for examples in held.values() for example in examples[: max(1, held_out // 3)]]
    DFlashTrainer(target, draft, train, args, eval_dataset=watched).train()
    size = save_draft(draft, out)
    pair = size + (target_dir / "model.safetensors").stat().st_size
    if pair > MAX_PAIR_BYTES:
        raise ValueError(f"expected target and draft within {MAX_PAIR_BYTES:,} bytes, got {pair:,}; drop draft layers")
    # What is measured is what was stored.
    stored = DFlashDraftModel.from_pretrained(out, dtype=torch.float32).eval()
    lengths = measure(target, stored, held)
    minutes = (time.perf_counter() - began) / 60
    write_card(
        out,
        lengths,
        parameters=stored.num_parameters(),
        layers=layers,
        block_size=block_size,
        taps=", ".join(map(str, stored.config.target_layer_ids or [])),
        held_out=held_out,
        examples=len(train),
        steps=steps,
        batch=batch,
        anchors=anchors,
        seed=seed,
        minutes=minutes,
    )
    summary = {kind: round(length, 3) for kind, length in lengths.items()}
    typer.echo(json.dumps(summary | {"bytes": size, "pair_bytes": pair, "minutes": round(minutes, 1)}))


if __name__ == "__main__":
    typer.run(main)
