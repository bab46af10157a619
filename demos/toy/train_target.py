"""Train the toy target of a pair, a small Qwen3 or Qwen3.5 model, from its configuration on generated conversations.

The run is a function of its options: samples come from a numbered stream that never repeats, and its length is set in
steps. One step takes a pool of conversations, sorts it by length and runs it in micro-batches of similar length.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
import typer
from build_tokenizer import MAX_LENGTH, TARGET_DIR, build_tokenizer
from fast_forward import fast_logits
from hybrid_target import (
    HYBRID_DIR,
    HYBRID_KINDS,
    hybrid_logits,
    make_hybrid_config,
    make_hybrid_model,
)
from rich import print as rich_print
from target_training import IGNORE, round_up, save_target, train
from tasks import KINDS, Kind, make_sample
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3_5ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)


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

    @property
    def num_tokens(self) -> int:
        """Tokens that have a label."""
        return int((self.weights_BS > 0).sum())


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
        make_sample(kind, "train", index).conversation(),
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    return Encoded(kind=kind, input_ids=encoded["input_ids"], is_answer=encoded["assistant_masks"])


def pad_batch(rows: list[Encoded], pad_id: int, prompt_weight: float) -> MicroBatch:
    """Pad rows on the right; labels are shifted by one, and prompt tokens get a small weight."""
    length = round_up(max(len(row.input_ids) for row in rows))
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
        kinds=[row.kind for row in rows],
        input_ids_BS=input_ids_BS,
        labels_BS=labels_BS,
        weights_BS=weights_BS,
    )


def sample_numbers(kinds: list[Kind], index: int) -> list[tuple[Kind, int]]:
    """Return the (kind, sample number) pairs of one round; a kind that occurs n times takes n numbers per round."""
    numbers = []
    for at, kind in enumerate(kinds):
        numbers.append((kind, index * kinds.count(kind) + kinds[:at].count(kind)))
    return numbers


def step_batches(
    tokenizer: PreTrainedTokenizerBase,
    kinds: list[Kind],
    first_index: int,
    pool: int,
    micro: int,
    weight: float,
) -> Iterator[list[MicroBatch]]:
    """Yield, without end, the micro-batches of each step from the numbered stream of samples."""
    index = first_index
    while True:
        rows = []
        while len(rows) < pool:
            rows += [
                encode(tokenizer, kind, number) for kind, number in sample_numbers(kinds, index)
            ]
            index += 1
        rows.sort(key=lambda row: len(row.input_ids))
        yield [
            pad_batch(rows[at : at + micro], tokenizer.pad_token_id, weight)
            for at in range(0, len(rows), micro)
        ]


def fresh_target(
    pair: Literal["text", "hybrid"],
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return an untrained target with its tokenizer; the hybrid one shares the stored tokenizer of the text target."""
    if pair == "text":
        tokenizer = build_tokenizer()
        return Qwen3ForCausalLM(make_config(tokenizer)), tokenizer
    tokenizer = AutoTokenizer.from_pretrained(TARGET_DIR)
    return make_hybrid_model(make_hybrid_config(tokenizer, MAX_LENGTH)), tokenizer


def token_losses(model: PreTrainedModel, batch: MicroBatch, fast: bool) -> torch.Tensor:
    """Return the loss of every position, shape (B, S), zero where there is no label."""
    ids = batch.input_ids_BS
    if not fast:
        logits_BSV = model(input_ids=ids, use_cache=False).logits
    elif isinstance(model, Qwen3_5ForCausalLM):
        logits_BSV = hybrid_logits(model, ids)
    else:
        logits_BSV = fast_logits(model, ids)
    loss = F.cross_entropy(
        logits_BSV.flatten(0, 1).float(), batch.labels_BS.flatten(), reduction="none"
    )
    return loss.view_as(batch.labels_BS)


def main(
    pair: Annotated[
        Literal["text", "hybrid"], typer.Option(help="Which of the two pairs of texts.")
    ] = "text",
    steps: Annotated[
        int, typer.Option(help="Number of optimizer steps that the rate schedule spans.")
    ] = 1200,
    stop_after: Annotated[
        int, typer.Option(help="Stop after this step of the schedule, 0 for its end.")
    ] = 0,
    pool: Annotated[int, typer.Option(help="Conversations per step.")] = 32,
    micro: Annotated[int, typer.Option(help="Conversations per forward pass.")] = 8,
    lr: Annotated[float, typer.Option(help="Peak rate of Muon, for the matrices.")] = 4e-3,
    embedding_lr: Annotated[
        float, typer.Option(help="Peak rate of AdamW, for embedding and norms.")
    ] = 4e-3,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 40,
    prompt_weight: Annotated[
        float, typer.Option(help="Loss weight of the tokens that the user writes.")
    ] = 0.1,
    kinds: Annotated[
        str, typer.Option(help="Kinds in the mix, separated by commas; repeat one to weigh it.")
    ] = "",
    first_index: Annotated[
        int, typer.Option(help="Number of the first sample; raise it to continue a run.")
    ] = 0,
    init_from: Annotated[Path | None, typer.Option(help="Checkpoint to continue from.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the checkpoint, if not the pair's own.")
    ] = None,
    save_every: Annotated[
        int, typer.Option(help="Steps between intermediate checkpoints, 0 for none.")
    ] = 250,
    log_every: Annotated[int, typer.Option(help="Steps between log lines.")] = 20,
    threads: Annotated[int, typer.Option(help="Torch threads.")] = 1,
    fast: Annotated[
        bool, typer.Option(help="Use the faster forward pass written for the pair.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights.")] = 0,
) -> None:
    """Train the target and save it with its tokenizer."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    out = out or (HYBRID_DIR / "target" if pair == "hybrid" else TARGET_DIR)
    if init_from:
        model, tokenizer = (
            AutoModelForCausalLM.from_pretrained(init_from),
            AutoTokenizer.from_pretrained(init_from),
        )
    else:
        model, tokenizer = fresh_target(pair)
    model.train()
    mix: list[Kind] = [kind for kind in kinds.split(",") if kind] or list(
        HYBRID_KINDS if pair == "hybrid" else KINDS
    )
    rich_print(
        f"{model.num_parameters():,} parameters, {steps} steps of {pool} conversations, mix {mix}"
    )
    train(
        model,
        step_batches(tokenizer, mix, first_index, pool, micro, prompt_weight),
        lambda batch: token_losses(model, batch, fast),
        lambda: save_target(model, tokenizer, out),
        rates=(lr, embedding_lr),
        steps=steps,
        stop_after=stop_after,
        warmup=warmup,
        save_every=save_every,
        log_every=log_every,
    )


if __name__ == "__main__":
    typer.run(main)
