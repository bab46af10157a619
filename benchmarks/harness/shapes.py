"""Targets of published shapes and their drafts, built with random weights: one table, and a tiny double of each row.

Shapes are those of the published configs. Where no draft is published for a target (`draft_source`), its draft has the
target's widths, five layers and taps by z-lab's rule: what a draft for it would be, for times only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
)

from dflash_hf import DFlashConfig, DFlashDraftModel

from .pair import Pair

# Allocates nothing: rotary tables are made as they are needed.
MAX_LENGTH = 131072
Family = Literal["qwen3", "qwen3_moe", "llama", "qwen3_vl", "qwen3_5"]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A target's sizes and its draft's.

    Args:
        family (`str`): Which of Transformers' models it is.
        hidden, mlp, layers, heads, groups, size, vocab (`int`): Width, width of the MLP, depth, query and key heads,
            size of a head, vocabulary.
        is_tied (`bool`): Whether the head is the embedding.
        experts, chosen, expert_mlp (`int`): Experts of a layer, how many a token goes to, and their width; 0 if dense.
        rope (`dict`): The target's `rope_parameters`.
        eps (`float`): Epsilon of its norms.
        taps (`tuple[int, ...]`): Layers the draft taps.
        draft_layers, draft_mlp, block, mask_token (`int`): The draft's depth, MLP, block and mask token. Its other
            widths are the target's.
        draft_heads (`tuple[int, int, int]`, *optional*): Its query heads, key heads and size of a head where those are
            not the target's either.
        draft_source (`str`): Where the draft's sizes are from.
        is_tiny (`bool`): Whether it is a double for tests.
    """

    family: Family
    hidden: int
    mlp: int
    layers: int
    heads: int
    groups: int
    vocab: int
    size: int = 128
    is_tied: bool = False
    experts: int = 0
    chosen: int = 0
    expert_mlp: int = 0
    rope: dict[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 1_000_000.0}
    )
    eps: float = 1e-6
    taps: tuple[int, ...] = (1, 9, 17, 25, 33)
    draft_layers: int = 5
    draft_mlp: int = 0
    draft_heads: tuple[int, int, int] | None = None
    block: int = 16
    mask_token: int = 151669
    draft_source: str
    is_tiny: bool = False

    @property
    def takes_pictures(self) -> bool:
        """Returns True if the target is a vision model; only its text side is run."""
        return self.family == "qwen3_vl"


ASSUMED = "assumed: five layers of the target's widths, taps by z-lab's rule"
SHAPES: dict[str, Shape] = {
    "qwen3-4b": Shape(
        family="qwen3", hidden=2560, mlp=9728, layers=36, heads=32, groups=8, vocab=151936, is_tied=True,
        draft_source="z-lab/Qwen3-4B-DFlash-b16",
    ),
    "qwen3-8b": Shape(
        family="qwen3", hidden=4096, mlp=12288, layers=36, heads=32, groups=8, vocab=151936,
        draft_source="z-lab/Qwen3-8B-DFlash-b16",
    ),
    "qwen3-30b-a3b": Shape(
        family="qwen3_moe", hidden=2048, mlp=6144, layers=48, heads=32, groups=4, vocab=151936,
        experts=128, chosen=8, expert_mlp=768, taps=(1, 12, 23, 34, 45), draft_source=ASSUMED,
    ),
    "llama-3.1-8b": Shape(
        family="llama", hidden=4096, mlp=14336, layers=32, heads=32, groups=8, vocab=128256, rope=LLAMA3_ROPE,
        eps=1e-5, taps=(1, 8, 15, 22, 29), mask_token=128002, block=10,
        draft_source="z-lab's draft for Llama-3.1-8B: its block; the rest " + ASSUMED,
    ),
    "qwen3-vl-8b": Shape(
        family="qwen3_vl", hidden=4096, mlp=12288, layers=36, heads=32, groups=8, vocab=151936,
        rope={
            "rope_type": "default", "rope_theta": 5_000_000.0, "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
        draft_source="the draft of qwen3-8b: the text tower has its shape",
    ),
    # Three of four layers are recurrent: Gated DeltaNet, 32 heads of 128 x 128.
    "qwen3.5-9b": Shape(
        family="qwen3_5", hidden=4096, mlp=12288, layers=32, heads=16, groups=4, size=256, vocab=248320,
        rope={
            "rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10], "mrope_interleaved": True,
        },
        taps=(1, 8, 15, 22, 29), mask_token=248070, draft_heads=(32, 8, 128), draft_source=ASSUMED,
    ),
}  # fmt: skip


def shape_of(model: str, is_tiny: bool) -> Shape:
    """Returns the shape of a model; in a trial its tiny double."""
    if is_tiny:
        return tiny(SHAPES[model])
    return SHAPES[model]


def tiny(shape: Shape) -> Shape:
    """Returns a double of a shape that runs on a CPU in milliseconds: the same structure, all sizes small."""
    rope = dict(shape.rope)
    if "mrope_section" in rope:
        rope["mrope_section"] = [2, 1, 1]
        if "partial_rotary_factor" in rope:
            rope["mrope_section"] = [1, 0, 0]
    return replace(
        shape,
        hidden=32,
        mlp=48,
        layers=6,
        heads=4,
        groups=2,
        size=8,
        vocab=96,
        experts=8 if shape.experts else 0,
        chosen=2 if shape.experts else 0,
        expert_mlp=16 if shape.experts else 0,
        rope=rope,
        taps=(0, 3),
        draft_layers=2,
        draft_heads=None,
        block=8,
        mask_token=95,
        is_tiny=True,
    )


def target_config(shape: Shape) -> PreTrainedConfig:
    """Returns the target's config."""
    shared: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.groups,
        "head_dim": shape.size,
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": shape.eps,
        "rope_parameters": dict(shape.rope),
        "tie_word_embeddings": shape.is_tied,
        "pad_token_id": 0,
        # Wide enough in the small ones for texts that do not repeat themselves, which would hide errors.
        "initializer_range": 0.25 if shape.is_tiny else 0.02,
    }
    match shape.family:
        case "qwen3":
            return Qwen3Config(**shared)
        case "llama":
            return LlamaConfig(**shared, bos_token_id=1, eos_token_id=2)
        case "qwen3_moe":
            return Qwen3MoeConfig(
                **shared,
                num_experts=shape.experts,
                num_experts_per_tok=shape.chosen,
                moe_intermediate_size=shape.expert_mlp,
                decoder_sparse_step=1,
                mlp_only_layers=[],
                norm_topk_prob=True,
            )
        case "qwen3_5":
            heads, size = (4, 8) if shape.is_tiny else (32, 128)
            return Qwen3_5TextConfig(
                **shared,
                linear_num_key_heads=heads // 2,
                linear_num_value_heads=heads,
                linear_key_head_dim=size,
                linear_value_head_dim=size,
            )
        case "qwen3_vl":
            # The vision tower is never run here; it is small so that it takes no memory from what is measured.
            vision = {
                "depth": 1,
                "hidden_size": 32,
                "num_heads": 2,
                "intermediate_size": 32,
                "in_channels": 3,
            }
            vision |= {
                "out_hidden_size": shape.hidden,
                "num_position_embeddings": 16,
                "patch_size": 4,
            }
            return Qwen3VLConfig(
                text_config=shared,
                vision_config={**vision, "deepstack_visual_indexes": []},
                tie_word_embeddings=shape.is_tied,
            )


def draft_config(shape: Shape, block_size: int | None = None) -> DFlashConfig:
    """Returns the draft's config; `block_size` instead of the shape's."""
    heads, groups, size = shape.draft_heads or (shape.heads, shape.groups, shape.size)
    return DFlashConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.draft_mlp or shape.mlp,
        num_hidden_layers=shape.draft_layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=size,
        rms_norm_eps=1e-6,
        max_position_embeddings=MAX_LENGTH,
        block_size=block_size or shape.block,
        mask_token_id=shape.mask_token,
        num_target_layers=shape.layers,
        target_layer_ids=list(shape.taps),
        initializer_range=0.25 if shape.is_tiny else 0.02,
    )


def build_pair(
    name: str,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    block_size: int | None = None,
    lengths: tuple[int, int] = (24, 64),
    seed: int = 0,
) -> Pair:
    """Builds a pair with random weights on a device; on `meta` it has shapes and no memory.

    Args:
        name (`str`): What the record calls it.
        shape (`Shape`): Its sizes.
        dtype, device: Of both models.
        block_size (`int`, *optional*): Tokens per block; default the shape's.
        lengths (`tuple[int, int]`): Shortest and longest prompt, in tokens.
        seed (`int`): Of the weights.
    """
    model_class = AutoModelForImageTextToText if shape.takes_pictures else AutoModelForCausalLM
    torch.manual_seed(seed)
    with torch.device(device):
        target = model_class.from_config(target_config(shape), dtype=dtype)
        draft = DFlashDraftModel._from_config(draft_config(shape, block_size), dtype=dtype)
    if shape.experts and device.type == "cpu":
        # The default one counts tokens on the host there
        target.set_experts_implementation("batched_mm")
    target.generation_config.eos_token_id = None
    target.generation_config.pad_token_id = 0
    return Pair(
        target=target.eval(),
        draft=draft.eval(),
        name=f"random {name} (seed {seed})",
        random_lengths=lengths,
    )
