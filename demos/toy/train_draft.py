"""Train a toy draft: a small DFlash draft for one of the toy targets, on answers that the target itself wrote.

The run is a function of its options and of the target: training prompts come from the training split, their answers
are regenerated greedily, and the result is measured on held-out prompts by walking the target's own answers.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import draft_data
import hybrid_draft_data
import torch
import typer
import vision_draft_data
from answers import CACHE_DIR, counts_of
from rich import print as rich_print
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from dflash_hf.block.positions import build_target_layer_ids
from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import find_target
from dflash_hf.training import DFlashTrainer, DFlashTrainingArguments, Example, walked_acceptance

MAX_PAIR_BYTES: Final = 16 * 2**20

CARD: Final = """---
library_name: transformers
tags: [dflash, speculative-decoding, toy]
---

# Toy DFlash draft

A draft of {parameters:,} parameters for the toy target next to it (`../target`): {layers} layers, blocks of
{block_size} tokens, taps on target layers {taps}. It exists to run tests and demos on a CPU in seconds; it knows
nothing beyond {subject}.

```python
import dflash_hf
from dflash_hf import DFlashDraftModel
{example}
```

## Acceptance

Mean tokens committed per verify, the target's own token included, greedy, block {block_size}, on {held_out} held-out
prompts per kind (at most {block_size}):

| kind | acceptance length |
| --- | --- |
{rows}

## Training

`python demos/toy/train_draft.py --pair {pair}`: {examples:,} prompts of the training split, answers regenerated
greedily by the target, {steps:,} steps of {batch} sequences with up to {anchors} random anchors each, seed {seed},
{minutes:.0f} minutes on one CPU thread. Weights are stored in float16.
"""


def make_draft(
    target: PreTrainedModel,
    mask_token_id: int,
    layers: int,
    taps: int,
    block_size: int,
    init_from: Path | None,
) -> DFlashDraftModel:
    """Return a draft to train further, or a fresh one of the target's shape.

    Its positions are plain indices, whatever the target's are.
    """
    if init_from is not None:
        return DFlashDraftModel.from_pretrained(init_from, dtype=torch.float32)
    config: Any = target.config.get_text_config()
    return DFlashDraftModel(
        DFlashConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": config.rope_parameters["rope_theta"],
            },
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            block_size=block_size,
            mask_token_id=mask_token_id,
            num_target_layers=config.num_hidden_layers,
            target_layer_ids=build_target_layer_ids(config.num_hidden_layers, taps),
            dtype="float32",
        )
    )


def save_draft(draft: DFlashDraftModel, out: Path, target_dir: Path) -> tuple[int, int]:
    """Write the draft with float16 weights and a float32 config, each file at once.

    Returns the bytes of its weights and of both models' weights. Raises a `ValueError` if those are too many.
    """
    scratch = out.parent / f".{out.name}.tmp"
    draft.save_pretrained(scratch)
    weights = scratch / "model.safetensors"
    state = {
        name: tensor.to(torch.float16).contiguous() for name, tensor in load_file(weights).items()
    }
    save_file(state, weights, metadata={"format": "pt"})
    size = weights.stat().st_size
    both = size + (target_dir / "model.safetensors").stat().st_size
    out.mkdir(parents=True, exist_ok=True)
    for path in scratch.iterdir():
        os.replace(path, out / path.name)
    scratch.rmdir()
    if both > MAX_PAIR_BYTES:
        raise ValueError(
            f"expected target and draft within {MAX_PAIR_BYTES:,} bytes, got {both:,}; drop draft layers"
        )
    return size, both


def measure(
    target: PreTrainedModel, draft: DFlashDraftModel, held_out: Mapping[str, Sequence[Example]]
) -> dict[str, float]:
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


def write_card(
    out: Path, draft: DFlashDraftModel, lengths: dict[str, float], **facts: object
) -> None:
    """Write the model card."""
    rows = "\n".join(f"| {kind} | {length:.2f} |" for kind, length in lengths.items())
    card = CARD.format(
        rows=rows,
        parameters=draft.num_parameters(),
        layers=draft.config.num_hidden_layers,
        block_size=draft.config.block_size,
        taps=", ".join(map(str, draft.config.target_layer_ids or [])),
        **facts,
    )
    (out / "README.md").write_text(card, encoding="utf-8")


def main(
    pair: Annotated[
        Literal["text", "vision", "hybrid"], typer.Option(help="Which of the pairs.")
    ] = "text",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 3000,
    prompts: Annotated[
        str, typer.Option(help="Prompts of each kind, as 500 or 500,talk=2000; '' for the pair's.")
    ] = "",
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 8,
    anchors: Annotated[int, typer.Option(help="Most anchors per sequence.")] = 16,
    layers: Annotated[int, typer.Option(help="Layers of the draft.")] = 3,
    taps: Annotated[int, typer.Option(help="Tapped layers of the target.")] = 4,
    block_size: Annotated[int, typer.Option(help="Slots per block, the anchor included.")] = 16,
    optim: Annotated[str, typer.Option(help="adamw or muon.")] = "muon",
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 8e-3,
    loss: Annotated[str, typer.Option(help="cross_entropy, dpace or kl.")] = "cross_entropy",
    held_out: Annotated[
        int, typer.Option(help="Held-out prompts of each kind for the final measurement.")
    ] = 24,
    eval_steps: Annotated[
        int, typer.Option(min=1, help="Steps between evaluations, each with a checkpoint.")
    ] = 400,
    target_dir: Annotated[
        Path | None, typer.Option("--target", help="Folder of the target, if not its own.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the draft, if not its own.")] = None,
    run_dir: Annotated[Path, typer.Option(help="Folder of checkpoints and metrics.")] = CACHE_DIR
    / "run",
    init_from: Annotated[Path | None, typer.Option(help="Draft to train further.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Checkpoint folder to continue from.")] = None,
    threads: Annotated[int, typer.Option(help="Torch threads.")] = 1,
    bf16: Annotated[bool, typer.Option(help="Train with bfloat16 autocast.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the weights, the order and the anchors.")] = 0,
) -> None:
    """Regenerate answers, train the draft, save it and measure it on held-out prompts."""
    began = time.perf_counter()
    torch.set_num_threads(threads)
    data: Any = {"text": draft_data, "vision": vision_draft_data, "hybrid": hybrid_draft_data}[pair]
    target_dir, out = target_dir or data.TARGET_DIR, out or data.DRAFT_DIR
    target, processing_class = data.load_target(target_dir)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    wanted = counts_of(prompts or data.NUM_PROMPTS, data.KINDS)
    train = data.answered_examples(target, processing_class, target_dir, wanted)
    held: dict[str, Sequence[Example]] = {
        kind: data.answered_examples(
            target, processing_class, target_dir, {kind: held_out}, "heldout"
        )
        for kind in data.KINDS
    }
    rich_print(f"{len(train):,} answers after {time.perf_counter() - began:.0f} s")
    torch.manual_seed(seed)
    draft = make_draft(target, tokenizer.mask_token_id, layers, taps, block_size, init_from)
    args = DFlashTrainingArguments(
        output_dir=str(run_dir),
        optim=optim if optim == "muon" else "adamw_torch",
        learning_rate=lr,
        adam_beta2=0.98,
        max_steps=steps,
        per_device_train_batch_size=batch,
        num_anchors=anchors,
        loss=loss,
        bf16=bf16,
        use_cpu=not torch.cuda.is_available(),
        seed=seed,
        logging_steps=20,
        eval_strategy="steps",
        eval_steps=eval_steps,
        save_steps=eval_steps,
        save_total_limit=1,
        resume_from_checkpoint=str(resume) if resume else None,
    )
    # A third of the held-out prompts is enough to watch a run.
    watched = [
        example for examples in held.values() for example in examples[: max(1, held_out // 3)]
    ]
    DFlashTrainer(
        model=draft, target=target, args=args, train_dataset=train, eval_dataset=watched
    ).train()
    size, pair_size = save_draft(draft, out, target_dir)
    # What is measured is what was stored.
    stored = DFlashDraftModel.from_pretrained(out, dtype=torch.float32).eval()
    lengths = measure(target, stored, held)
    minutes = (time.perf_counter() - began) / 60
    write_card(
        out,
        stored,
        lengths,
        pair=pair,
        subject=data.SUBJECT,
        example=data.EXAMPLE,
        **{
            "held_out": held_out,
            "examples": len(train),
            "steps": steps,
            "batch": batch,
            "anchors": anchors,
        },
        **{"seed": seed, "minutes": minutes},
    )
    summary = {kind: round(length, 3) for kind, length in lengths.items()}
    typer.echo(
        json.dumps(summary | {"bytes": size, "pair_bytes": pair_size, "minutes": round(minutes, 1)})
    )


if __name__ == "__main__":
    typer.run(main)
