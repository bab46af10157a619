"""The plan of a training against a step whose memory is counted, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from dflash_hf import DFlashConfig
from dflash_hf.block.positions import build_target_layer_ids
from dflash_hf.training.plan import GB, Plan, Sizes
from helpers.training_memory import peak_memory

QWEN3_8B = Qwen3Config(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    dtype="bfloat16",
)
QWEN3_2B = Qwen3Config(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
    dtype="bfloat16",
)
SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
    dtype="bfloat16",
)


def draft_for(target: Any, layers: int, block_size: int) -> DFlashConfig:
    """The config of a draft as wide as its target."""
    return DFlashConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=getattr(target, "head_dim", None)
        or target.hidden_size // target.num_attention_heads,
        block_size=block_size,
        mask_token_id=0,
        num_target_layers=target.num_hidden_layers,
        target_layer_ids=build_target_layer_ids(target.num_hidden_layers, 5),
    )


CASES: dict[str, tuple[PreTrainedConfig, int, Sizes]] = {
    "8B": (QWEN3_8B, 5, Sizes(per_device_train_batch_size=1, max_length=4096)),
    "2B, four rows, checkpointed, Muon": (
        QWEN3_2B,
        5,
        Sizes(
            per_device_train_batch_size=4,
            max_length=2048,
            num_anchors=256,
            checkpointing=True,
            optim="muon",
        ),
    ),
    "135M, eight rows of few blocks": (
        SMOLLM2,
        3,
        Sizes(
            per_device_train_batch_size=8,
            max_length=1024,
            num_anchors=32,
            block_size=8,
            chunk_blocks=64,
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_planned_memory_is_what_a_step_takes(case: str) -> None:
    target, layers, sizes = CASES[case]
    draft = draft_for(target, layers, sizes.block_size)
    found = Plan(target, draft, sizes, num_examples=None)
    counted = peak_memory(
        target,
        draft,
        batch_size=sizes.per_device_train_batch_size,
        length=sizes.max_length,
        num_anchors=sizes.num_anchors,
        chunk_blocks=sizes.chunk_blocks,
        checkpointing=sizes.checkpointing,
        optimizer="muon" if sizes.optim == "muon" else "adamw",
    )
    told = {name: round(value / GB, 2) for name, value in (counted | found.bytes_by_part).items()}
    assert found.peak_bytes == pytest.approx(counted["peak"], rel=0.1), told
