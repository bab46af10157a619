"""A random pair that sees pictures, on disk, as `dflash-hf chat` loads it; its answers are words, and never end."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.processing_qwen3_vl import Qwen3VLProcessor
from helpers.processors import PICTURES, TEMPLATE, qwen_tokenizer

LENGTH = 4096
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.15,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
    "tie_word_embeddings": False,
}
_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
    "initializer_range": 0.15,
}


def write_pair(path: Path) -> Path:
    """Writes `target/` and `draft/` and returns their folder."""
    tokenizer = qwen_tokenizer()
    ids: Any = tokenizer.convert_tokens_to_ids
    config = Qwen3VLConfig(
        text_config={**_TEXT, "vocab_size": len(tokenizer)},
        vision_config=_VISION,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    target = Qwen3VLForConditionalGeneration(config).eval()
    # Only letters and spaces can be the largest logit of 263 tokens: a page shows them as they are.
    letters = torch.tensor([ids(letter) for letter in [*string.ascii_letters, "Ġ"]])
    rows = target.lm_head.weight.data
    kept = rows[letters].clone()
    rows.zero_()
    rows[letters] = kept
    target.generation_config.eos_token_id = None
    target.generation_config.pad_token_id = 0
    target.save_pretrained(path / "target")
    images = {name: value for name, value in PICTURES.items() if name != "processor_class"}
    Qwen3VLProcessor(Qwen2VLImageProcessorPil(**images), tokenizer, TEMPLATE).save_pretrained(
        path / "target"
    )
    draft = DFlashDraftModel(
        DFlashConfig(
            vocab_size=len(tokenizer),
            block_size=8,
            mask_token_id=0,
            num_target_layers=6,
            target_layer_ids=[1, 3],
            **{
                name: value
                for name, value in _TEXT.items()
                if name not in ("rope_parameters", "num_hidden_layers")
            },
            num_hidden_layers=1,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    )
    draft.save_pretrained(path / "draft")
    return path
