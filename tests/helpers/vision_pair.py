"""A folder laid out as the bundled pair for pictures is, with random weights: what a command does with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from helpers.processors import picture, published_folder, qwen_tokenizer
from tiny import tiny_draft

PATCH = 4

# Kind -> sizes of the pictures of each of its prompts.
KINDS: dict[str, list[list[tuple[int, int]]]] = {
    "count": [[(32, 24)], [(16, 40)], [(24, 24)]],
    "compare": [[(24, 16), (16, 24)], [(16, 16), (32, 16)], [(16, 24), (16, 16)]],
    "talk": [[], [], []],
}


def write_vision_pair(folder: Path, *, knows: bool = False) -> Path:
    """Writes target, draft, held-out prompts and their pictures in float64, and returns the folder.

    The target's texts repeat few tokens, so that the draft is right now and then.

    Args:
        folder (`Path`): Where.
        knows (`bool`): Makes the target write one token for ever, which the draft always guesses.
    """
    target = published_folder(folder / "target")
    tokenizer: Any = qwen_tokenizer()
    ids = {
        name: tokenizer.convert_tokens_to_ids(token)
        for name, token in (
            ("image_token_id", "<|image_pad|>"),
            ("video_token_id", "<|video_pad|>"),
            ("vision_start_token_id", "<|vision_start|>"),
            ("vision_end_token_id", "<|vision_end|>"),
        )
    }
    text = {
        "vocab_size": len(tokenizer) + 1,  # the last one is the draft's mask
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "initializer_range": 0.25,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 1, 1],
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": PATCH,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
    ).double()
    head: Any = model.get_output_embeddings()
    head.weight.data[0 if knows else 6 :] *= 0.0 if knows else 0.05
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = None
    model.generation_config.suppress_tokens = list(ids.values())
    model.save_pretrained(target)
    draft = tiny_draft(model, block_size=16)
    draft.norm.weight.data *= 4
    draft.save_pretrained(folder / "draft")
    _write_prompts(folder)
    return folder


def _write_prompts(folder: Path) -> None:
    """Writes held_out.jsonl, with paths of pictures relative to it."""
    (folder / "pictures").mkdir()
    rows: list[dict[str, Any]] = []
    number = 0
    for kind, prompts in KINDS.items():
        for index, sizes in enumerate(prompts):
            parts: list[dict[str, Any]] = []
            for width, height in sizes:
                path = f"pictures/{number:03}.png"
                picture(width, height, number).save(folder / path)
                parts.append({"type": "image", "path": path})
                number += 1
            question = f"Question {index} about {kind}?"
            content: Any = [*parts, {"type": "text", "text": question}] if parts else question
            rows.append(
                {"kind": kind, "messages": [{"role": "user", "content": content}], "answer": "Yes."}
            )
    (folder / "held_out.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
