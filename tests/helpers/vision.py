"""Tiny vision-language targets built from configs, and prompts with pictures whose tensors are made by hand.

Laid out as each family's processor lays them out, so that neither torchvision nor a tokenizer is needed.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from tiny import COMMON, HYBRIDS, MIXED

IMAGE, START, END, VIDEO = 58, 59, 60, 61
WORDS = 57  # ids below are text
PATCH = 4

Grid = tuple[int, int]  # patches of a picture, rows by columns; Qwen's are multiples of two

_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_QWEN3_VISION = {
    "depth": 4,  # as deep as the text decoder
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": PATCH,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 2],
    "initializer_range": 0.3,
}
_SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": PATCH,
    "initializer_range": 0.3,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

# name -> class prefix, text settings, vision settings, others
VISION: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3-vl": ("Qwen3VL", {"head_dim": 8, "rope_parameters": _MROPE}, _QWEN3_VISION, _QWEN_IDS),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        {"head_dim": 8, "rope_parameters": _MROPE, **_MOE},
        _QWEN3_VISION,
        _QWEN_IDS,
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        {"rope_parameters": _MROPE},
        {
            "depth": 4,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": PATCH,
            "out_hidden_size": 32,
            "window_size": 16,
            "fullatt_block_indexes": [1, 3],
            "initializer_range": 0.3,
        },
        _QWEN_IDS,
    ),
    "gemma3": (
        "Gemma3",
        {"head_dim": 8, "sliding_window": 9, "layer_types": MIXED},
        {"model_type": "siglip_vision_model", **_SIGLIP},
        {
            "mm_tokens_per_image": 4,
            "image_token_id": IMAGE,
            "boi_token_index": START,
            "eoi_token_index": END,
            "tie_word_embeddings": False,
        },
    ),
    "paligemma": (
        "PaliGemma",
        {"model_type": "gemma", "head_dim": 8, "tie_word_embeddings": False},
        {"model_type": "siglip_vision_model", "vision_use_head": False, **_SIGLIP},
        {"image_token_id": IMAGE, "projection_dim": 32, "tie_word_embeddings": False},
    ),
    "smolvlm": (
        "SmolVLM",
        {"model_type": "llama", "head_dim": 8},
        _SIGLIP,
        {"image_token_id": IMAGE, "scale_factor": 2, "pad_token_id": 0},
    ),
    "idefics3": (
        "Idefics3",
        {"model_type": "llama", "head_dim": 8},
        _SIGLIP,
        {"image_token_id": IMAGE, "scale_factor": 2, "pad_token_id": 0},
    ),
    "llava-onevision": (
        "LlavaOnevision",
        {"model_type": "qwen2"},
        {"model_type": "siglip_vision_model", "vision_use_head": False, **_SIGLIP},
        {
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16], [32, 32]],
        },
    ),
}

_ROPE35 = {"rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5}}
_VISION35 = {
    name: value for name, value in _QWEN3_VISION.items() if name != "deepstack_visual_indexes"
}
# The same with recurrent layers; what reads VISION need not know them.
VISION_HYBRIDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3.5-vl": ("Qwen3_5", HYBRIDS["qwen3.5"][1] | _ROPE35, _VISION35, _QWEN_IDS),
    "qwen3.5-vl-moe": ("Qwen3_5Moe", HYBRIDS["qwen3.5-moe"][1] | _ROPE35, _VISION35, _QWEN_IDS),
}


def vision_target(
    name: str, seed: int = 0, text: dict[str, Any] | None = None, **others: Any
) -> PreTrainedModel:
    """Builds a family's image-text-to-text model: random weights, eval mode, float64.

    `others` go to its config and its text config, `text` to the latter alone.
    """
    prefix, of_family, vision, other = (VISION | VISION_HYBRIDS)[name]
    config_class = getattr(transformers, f"{prefix}Config")
    text_config = {**COMMON, **of_family, **others, **(text or {})}
    config = config_class(text_config=text_config, vision_config=vision, **{**other, **others})
    torch.manual_seed(seed)
    model = (
        getattr(transformers, f"{prefix}ForConditionalGeneration")(config).to(torch.float64).eval()
    )
    if name.endswith("-moe"):
        model.set_experts_implementation("eager")
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(
            ("bias", "image_newline", "position_embedding")
        ) or "mm_input_projection" in (parameter_name):
            torch.nn.init.normal_(parameter, std=0.2)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def shallow_vision_target(name: str, seed: int = 0) -> PreTrainedModel:
    """Builds a `vision_target` whose text model has two layers, one of each kind where the family has two.

    For the same tests as `tiny.shallow_target`; pictures are encoded by all layers, once a prompt.
    """
    _, of_family, _, _ = (VISION | VISION_HYBRIDS)[name]
    layers: dict[str, Any] = {"num_hidden_layers": 2}
    if "layer_types" in of_family:
        layers["layer_types"] = of_family["layer_types"][1:3]
    return vision_target(name, seed, layers)


def _pixels(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _pictures(
    model: PreTrainedModel, name: str, rows: list[list[Grid]], generator: torch.Generator
) -> Any:
    """The pictures' tensors, and how many tokens each picture of each row takes."""
    grids = [grid for row in rows for grid in row]
    if not grids:
        return {}, [[] for _ in rows]
    if name.startswith("qwen"):
        num = sum(h * w for h, w in grids)
        tensors = {
            "pixel_values": _pixels((num, 3 * 2 * PATCH * PATCH), generator),
            "image_grid_thw": torch.tensor([[1, h, w] for h, w in grids]),
        }
        return tensors, [[h * w // 4 for h, w in row] for row in rows]
    if name in ("smolvlm", "idefics3"):
        pixels = torch.zeros(len(rows), max(map(len, rows)), 3, 16, 16, dtype=torch.float64)
        for index, row in enumerate(rows):
            pixels[index, : len(row)] = _pixels((len(row), 3, 16, 16), generator)
        return {"pixel_values": pixels}, [[4] * len(row) for row in rows]
    if name in ("gemma3", "paligemma"):
        num = 4 if name == "gemma3" else 16
        return {"pixel_values": _pixels((len(grids), 3, 16, 16), generator)}, [
            [num] * len(row) for row in rows
        ]
    sizes = torch.tensor([[h * PATCH, w * PATCH] for h, w in grids])
    # A whole picture and the tiles of the best grid of them.
    tiles = [1 + (1 + (h > 4)) * (1 + (w > 4)) for h, w in grids]
    pixels = torch.zeros(len(grids), max(tiles), 3, 16, 16, dtype=torch.float64)
    for index, num in enumerate(tiles):
        pixels[index, :num] = _pixels((num, 3, 16, 16), generator)
    tensors = {"pixel_values": pixels, "image_sizes": sizes}
    with torch.no_grad():
        features: Any = model.get_image_features(**tensors).pooler_output
    lengths = iter([len(feature) for feature in features])
    return tensors, [[next(lengths) for _ in row] for row in rows]


def vision_prompts(
    model: PreTrainedModel,
    name: str,
    rows: list[list[Grid]],
    seed: int,
    words: tuple[int, ...] = (5, 3, 7),
) -> dict[str, Tensor]:
    """Left-padded prompts: row `i` has the pictures `rows[i]`, with `words[i % len(words)]` words around each."""
    generator = torch.Generator().manual_seed(seed)
    tensors, num_tokens = _pictures(model, name, rows, generator)
    ids: list[list[int]] = []
    for index, row in enumerate(num_tokens):
        num = words[index % len(words)]
        row_ids = torch.randint(3, WORDS, (num,), generator=generator).tolist()
        for tokens in row:
            after = torch.randint(3, WORDS, (num - 1,), generator=generator).tolist()
            row_ids += [START, *[IMAGE] * tokens, END, *after]
        ids.append(row_ids)
    longest = max(map(len, ids))
    input_ids = torch.tensor([[0] * (longest - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
    inputs = {"input_ids": input_ids, "attention_mask": mask, **tensors}
    if name.startswith("qwen"):
        inputs["mm_token_type_ids"] = (input_ids == IMAGE).int()
    if name in ("gemma3", "paligemma"):
        inputs["token_type_ids"] = (input_ids == IMAGE).int()
    return inputs
