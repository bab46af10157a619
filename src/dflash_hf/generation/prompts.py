"""What `generate` prepared of the prompts: their positions, the prefill's inputs, and what every forward gets."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from dflash_hf.target import Target

# Inputs of a forward that go along with the tokens, column by column.
PER_TOKEN = {"attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}
# Sizes of the images: Transformers hands them to every forward, where they do nothing beside explicit positions.
IMAGE_SIZES = {"image_grid_thw", "video_grid_thw", "second_per_grid_ts"}


def run_prefill(
    target: Target,
    input_ids: torch.LongTensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    past: int,
    num_columns: int,
) -> Any:
    """Runs `GenerationMixin._prefill` over the columns that the cache does not have yet.

    Older Transformers cut a continued conversation into chunks as if nothing was cached, so that is done here.

    Args:
        target (`Target`): The target.
        input_ids (`torch.LongTensor` of shape `[B, S]`): The whole conversation, or its new tokens.
        generation_config, model_kwargs: As `generate` prepared them.
        past (`int`): Columns in `model_kwargs["past_key_values"]`.
        num_columns (`int`): Columns of the whole conversation.

    Returns:
        What the target returned for the last chunk.
    """
    model: Any = target.model
    if not past or model_kwargs.get("inputs_embeds") is not None:  # embeddings are cut by `_prefill` itself
        return model._prefill(input_ids, generation_config, model_kwargs)
    config = copy.copy(generation_config)
    config.prefill_chunk_size = None
    new = input_ids[:, past - num_columns :]
    outputs, end = None, past
    for chunk in torch.split(new, generation_config.prefill_chunk_size or new.shape[1], dim=1):
        end += chunk.shape[1]
        left = num_columns - end
        cut = {
            name: value[..., : value.shape[-1] - left]
            for name in PER_TOKEN
            if (value := model_kwargs.get(name)) is not None
        }
        outputs = model._prefill(chunk, config, {**model_kwargs, **cut})
    return outputs


def prompt_positions(
    target: Target, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any], past: int
) -> Tensor:
    """Returns the index in its row of every token of the conversation, cached or new: `[B, T]`, negative for padding.

    With nothing cached a mask may go on behind the prompt: plain `generate` then shifts all positions by as much,
    which is in `position_delta`.

    Raises:
        ValueError: If a row ends in padding, or has padding between tokens where windows are counted in columns; also
            in a mask that `generate` inferred from pad ids.
    """
    mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
    batch, columns = input_ids.shape if embeds is None else embeds.shape[:2]
    if mask is None:
        if embeds is None and past:
            # A mask of ones is dropped on the way; its width says what is cached already.
            columns = getattr(generation_config, "_mask_length", columns)
        return torch.arange(columns, device=input_ids.device).expand(batch, -1)
    mask = mask.to(input_ids.device) != 0
    mask = mask if past else mask[:, :columns]
    if not bool(mask[:, -1].all()):
        raise ValueError(
            "expected left-padded prompts, got padding after the last token (without an attention_mask every pad "
            "token counts as padding); tokenize with padding_side='left' and pass attention_mask"
        )
    if bool((mask[:, 1:] < mask[:, :-1]).any()) and any(DynamicCache(config=target.config).is_sliding):
        raise ValueError(
            "expected no padding between tokens with a target that has sliding windows, which plain generate counts "
            "in columns, got some; pass the whole conversation left-padded, without past_key_values"
        )
    return (mask.long().cumsum(dim=1) - 1).masked_fill(~mask, -1)


def position_delta(target: Target, input_ids: Tensor, model_kwargs: dict[str, Any], positions: Tensor) -> Tensor:
    """Returns target position minus index at the last prompt token: what plain decoding goes on counting from.

    The target's own preparation of a step is asked, which may shift what `generate` prepared (PaliGemma counts from
    1). Shape `[B]`, or `[rows, B]` under M-RoPE, where a token has several positions: after an image as the last thing
    in a prompt they differ, and plain decoding counts each of them on.

    Raises:
        ValueError: If the target leaves out the positions that `generate` prepared, and counts by itself.
    """
    if model_kwargs.get("position_ids") is None:
        return torch.zeros_like(positions[:, -1])
    model: Any = target.model
    kwargs = {**model_kwargs, "past_key_values": DynamicCache(config=target.config), "use_cache": True}
    last = torch.zeros_like(positions[:, -1:], dtype=torch.long, device=input_ids.device)
    step = model.prepare_inputs_for_generation(last, next_sequence_length=1, is_first_iteration=False, **kwargs)
    position_ids = step.get("position_ids")
    if position_ids is None:
        raise ValueError(
            f"expected a target that takes its positions from generate, got {type(model).__name__}, which counts them "
            "itself; drop assistant_model"
        )
    return position_ids[..., -1].to(positions.device) - positions[:, -1]


def extra_inputs(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns what a verify gets besides ids, positions and cache: the caller's keywords, and nothing of an image."""
    own = {"past_key_values", "use_cache", "logits_to_keep", "inputs_embeds", "return_dict"}
    known = PER_TOKEN | IMAGE_SIZES | own | set(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL)
    return {name: value for name, value in model_kwargs.items() if name not in known and value is not None}


__all__ = ["extra_inputs", "position_delta", "prompt_positions", "run_prefill"]
