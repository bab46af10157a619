"""Train the vision target, a small Qwen3-VL model, from its configuration on generated questions about pictures.

The run is a function of its options: samples come from a numbered stream that never repeats, and its length is set in
steps. One step takes a pool of conversations, sorts it by length and runs it in micro-batches of similar length.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import torch.nn.functional as F
import typer
from build_tokenizer import MAX_LENGTH
from fast_forward import decoder_logits
from rich import print as rich_print
from scene_tasks import VISION_KINDS, VisionKind, make_vision_sample
from target_training import IGNORE, round_up, save_target, train
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from vision_processor import (
    IMAGE,
    MERGE,
    PATCH,
    VIDEO,
    VISION_DIR,
    VISION_END,
    VISION_START,
    Encoded,
    build_vision_tokenizer,
    encode_sample,
    image_processor,
)

from dflash_hf.processing_qwen3_vl import Qwen3VLProcessor

TARGET_DIR: Final = VISION_DIR / "target"


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Right-padded conversations of similar length with all their pictures; B rows, S tokens."""

    kinds: list[str]
    input_ids_BS: torch.Tensor
    attention_mask_BS: torch.Tensor
    labels_BS: torch.Tensor
    weights_BS: torch.Tensor
    pixel_values: torch.Tensor
    image_grid_thw: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding, those of pictures included."""
        return int(self.attention_mask_BS.sum())


def make_config(tokenizer: PreTrainedTokenizerBase) -> Qwen3VLConfig:
    """Return the configuration of the target: 10 text layers and 4 vision layers, 6 M parameters."""
    ids: Any = tokenizer.convert_tokens_to_ids([IMAGE, VIDEO, VISION_START, VISION_END])
    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 10,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": MAX_LENGTH,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "dtype": "float32",
        },
        vision_config={
            "depth": 4,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_heads": 4,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "out_hidden_size": 192,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [1, 2],
            "dtype": "float32",
        },
        image_token_id=ids[0],
        video_token_id=ids[1],
        vision_start_token_id=ids[2],
        vision_end_token_id=ids[3],
        tie_word_embeddings=True,
        dtype="float32",
    )


def pad_batch(rows: list[Encoded], pad_id: int, image_id: int, prompt_weight: float) -> MicroBatch:
    """Pad rows on the right; labels are shifted by one, prompt text gets a small weight, image tokens none."""
    length = round_up(max(len(row.input_ids) for row in rows))
    input_ids_BS = torch.full((len(rows), length), pad_id)
    attention_mask_BS = torch.zeros(len(rows), length, dtype=torch.long)
    labels_BS = torch.full((len(rows), length), IGNORE)
    weights_BS = torch.zeros(len(rows), length)
    for at, row in enumerate(rows):
        size = len(row.input_ids)
        ids = torch.tensor(row.input_ids)
        input_ids_BS[at, :size] = ids
        attention_mask_BS[at, :size] = 1
        labels_BS[at, : size - 1] = ids[1:]
        answer = torch.tensor(row.is_answer[1:], dtype=torch.float32)
        weights_BS[at, : size - 1] = (answer + (1 - answer) * prompt_weight) * (ids[1:] != image_id)
    return MicroBatch(
        kinds=[row.kind for row in rows],
        input_ids_BS=input_ids_BS,
        attention_mask_BS=attention_mask_BS,
        labels_BS=labels_BS,
        weights_BS=weights_BS,
        pixel_values=torch.cat([row.pixel_values for row in rows]),
        image_grid_thw=torch.cat([row.image_grid_thw for row in rows]),
    )


def step_batches(
    tokenizer: PreTrainedTokenizerBase,
    kinds: list[VisionKind],
    first_index: int,
    pool: int,
    micro: int,
    weight: float,
) -> Iterator[list[MicroBatch]]:
    """Yield, without end, the micro-batches of each step; a kind that occurs n times takes n samples a round."""
    image_id: Any = tokenizer.convert_tokens_to_ids(IMAGE)
    index = first_index
    while True:
        rows: list[Encoded] = []
        while len(rows) < pool:
            for at, kind in enumerate(kinds):
                number = index * kinds.count(kind) + kinds[:at].count(kind)
                rows.append(encode_sample(tokenizer, make_vision_sample(kind, "train", number)))
            index += 1
        rows.sort(key=lambda row: len(row.input_ids))
        yield [
            pad_batch(rows[at : at + micro], tokenizer.pad_token_id, image_id, weight)
            for at in range(0, len(rows), micro)
        ]


def fast_logits(model: Qwen3VLForConditionalGeneration, batch: MicroBatch) -> torch.Tensor:
    """Return the bfloat16 logits (B, S, V); equal to the model's up to rounding."""
    inner = model.model
    x_BSD = F.embedding(batch.input_ids_BS, inner.language_model.embed_tokens.weight).to(
        torch.bfloat16
    )
    is_image_BS = batch.input_ids_BS == model.config.image_token_id
    added: list[torch.Tensor] = []
    if len(batch.image_grid_thw):
        with torch.autocast("cpu", torch.bfloat16):
            vision = inner.visual(
                batch.pixel_values.to(torch.bfloat16), grid_thw=batch.image_grid_thw
            )
        x_BSD = x_BSD.masked_scatter(
            is_image_BS[..., None], vision.pooler_output.to(torch.bfloat16)
        )
        empty = torch.zeros_like(x_BSD)
        added = [
            empty.masked_scatter(is_image_BS[..., None], feature.to(torch.bfloat16))
            for feature in vision.deepstack_features
        ]
    positions, _ = inner.get_rope_index(
        batch.input_ids_BS,
        mm_token_type_ids=is_image_BS.int(),
        image_grid_thw=batch.image_grid_thw if len(batch.image_grid_thw) else None,
        attention_mask=batch.attention_mask_BS,
    )
    return decoder_logits(inner.language_model, model.lm_head, x_BSD, positions, added)


def token_losses(
    model: Qwen3VLForConditionalGeneration, batch: MicroBatch, fast: bool
) -> torch.Tensor:
    """Return the loss of every position, shape (B, S), zero where there is no label."""
    if fast:
        logits_BSV = fast_logits(model, batch)
    else:
        pictures = {"pixel_values": batch.pixel_values, "image_grid_thw": batch.image_grid_thw}
        logits_BSV = model(
            input_ids=batch.input_ids_BS,
            attention_mask=batch.attention_mask_BS,
            mm_token_type_ids=(batch.input_ids_BS == model.config.image_token_id).int(),
            use_cache=False,
            **(pictures if len(batch.image_grid_thw) else {}),
        ).logits
    loss = F.cross_entropy(
        logits_BSV.flatten(0, 1).float(), batch.labels_BS.flatten(), reduction="none"
    )
    return loss.view_as(batch.labels_BS)


def main(
    steps: Annotated[
        int, typer.Option(help="Number of optimizer steps that the rate schedule spans.")
    ] = 2200,
    stop_after: Annotated[
        int, typer.Option(help="Stop after this step of the schedule, 0 for its end.")
    ] = 0,
    pool: Annotated[int, typer.Option(help="Conversations per step.")] = 36,
    micro: Annotated[int, typer.Option(help="Conversations per forward pass.")] = 9,
    lr: Annotated[float, typer.Option(help="Peak rate of Muon, for the matrices.")] = 4e-3,
    other_lr: Annotated[
        float, typer.Option(help="Peak rate of AdamW, for everything else.")
    ] = 4e-3,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 40,
    prompt_weight: Annotated[
        float, typer.Option(help="Loss weight of the text that the user writes.")
    ] = 0.1,
    kinds: Annotated[
        str, typer.Option(help="Kinds in the mix, separated by commas; repeat one to weigh it.")
    ] = "",
    first_index: Annotated[
        int, typer.Option(help="Number of the first sample; raise it to continue a run.")
    ] = 0,
    init_from: Annotated[Path | None, typer.Option(help="Checkpoint to continue from.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the checkpoint.")] = TARGET_DIR,
    save_every: Annotated[
        int, typer.Option(help="Steps between intermediate checkpoints, 0 for none.")
    ] = 200,
    log_every: Annotated[int, typer.Option(help="Steps between log lines.")] = 20,
    threads: Annotated[int, typer.Option(help="Torch threads.")] = 1,
    fast: Annotated[
        bool, typer.Option(help="Use the bfloat16 forward pass of fast_forward.py.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights.")] = 0,
) -> None:
    """Train the target and save it with its tokenizer and image processor."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(init_from) if init_from else build_vision_tokenizer()
    if init_from:
        model = Qwen3VLForConditionalGeneration.from_pretrained(init_from, dtype="float32")
    else:
        model = Qwen3VLForConditionalGeneration(make_config(tokenizer))
    model.train()
    # Two matrix products beat the fused CPU attention in the backward pass of pictures this small.
    model.model.visual.set_attn_implementation("eager")
    mix: Any = [kind for kind in kinds.split(",") if kind] or list(VISION_KINDS)
    rich_print(
        f"{model.num_parameters():,} parameters, {steps} steps of {pool} conversations, mix {mix}"
    )
    train(
        model,
        step_batches(tokenizer, mix, first_index, pool, micro, prompt_weight),
        lambda batch: token_losses(model, batch, fast),
        lambda: save_target(model, Qwen3VLProcessor(image_processor(), tokenizer), out),
        rates=(lr, other_lr),
        steps=steps,
        stop_after=stop_after,
        warmup=warmup,
        save_every=save_every,
        log_every=log_every,
    )


if __name__ == "__main__":
    typer.run(main)
