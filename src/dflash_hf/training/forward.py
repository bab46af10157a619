"""One training pass: the target's features of a batch, and the draft over many blocks of it at once.

This and decoding meet in the model and the taps; what a block sees here is what it would see in decoding.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from dflash_hf.configuration_dflash import AttentionKind
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target.hidden_states import Taps
from dflash_hf.target.parts import Target
from dflash_hf.training.anchors import Anchors, BlockMaskRule
from dflash_hf.training.collators import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What the target says about a batch.

    Args:
        taps (`torch.Tensor` of shape `[B, S, L * D]`): Outputs of the tapped layers.
        next_ids (`torch.Tensor` of shape `[B, S]`, int64, *optional*): The target's argmax after each token.
    """

    taps: Tensor
    next_ids: Tensor | None = None


def forward_inputs(model: PreTrainedModel, batch: Batch) -> dict[str, Any]:
    """Returns what the target's forward gets for a batch.

    Answer tokens of type 0 get the type that `generate` gives to new tokens: some targets attend both ways within a
    prompt, where all is of type 0.

    Args:
        model (`PreTrainedModel`): The target.
        batch (`Batch`): The rows.
    """
    inputs: dict[str, Any] = dict(batch.model_inputs)
    if "token_type_ids" in inputs:
        types: Tensor = inputs["token_type_ids"]
        asked: Any = model
        kwargs = {"token_type_ids": torch.zeros(1, 1, dtype=torch.long, device=types.device)}
        kwargs = asked._update_model_kwargs_for_generation(ModelOutput(), kwargs)
        new = batch.loss_mask & (types == 0)
        inputs["token_type_ids"] = types.masked_fill(new, int(kwargs["token_type_ids"][0, -1]))
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask.to(torch.long), **inputs}


@torch.no_grad()
def target_features(
    target: Target,
    layer_ids: list[int],
    batch: Batch,
    *,
    after_deepstack: bool = False,
    with_head: bool = False,
    top_level: bool = False,
) -> Features:
    """Runs the frozen target over a batch and records the tapped layers; sets no mode, keeps no gradient.

    Args:
        target (`Target`): The target, in eval mode.
        layer_ids (`list[int]`): Layers to tap.
        batch (`Batch`): Right-padded rows on the target's device.
        after_deepstack (`bool`): Tap after DeepStack's additions, as the draft's `tap_after_deepstack` says.
        with_head (`bool`): Also apply the head and return `next_ids`.
        top_level (`bool`): Call the model itself even where its decoder alone would do, as with images.
    """
    through_model = top_level or with_head or bool(batch.model_inputs)
    decoder = None if through_model else target.model.get_decoder()
    module = target.model if decoder is None else decoder
    inputs = forward_inputs(target.model, batch)
    if through_model and not with_head and "logits_to_keep" in inspect.signature(target.model.forward).parameters:
        inputs["logits_to_keep"] = 1
    with Taps(target.layers, layer_ids, after_deepstack=after_deepstack).open() as taps:
        output = module(**inputs, use_cache=False)
        return Features(taps=taps.take(), next_ids=output.logits.argmax(dim=-1) if with_head else None)


def attention_kinds(draft: DFlashDraftModel) -> list[AttentionKind]:
    """Returns `(window, causal, from_anchor)` of each draft layer."""
    return [draft.config.attention_kind(index) for index in range(draft.config.num_hidden_layers)]


def block_inputs(input_ids_BS: Tensor, anchors: Anchors, mask_token_id: int) -> Tensor:
    """Returns the ids `[anchor, MASK, ...]` of every block: int64 of shape `[B, A * K]`."""
    ids = torch.full_like(anchors.positions, mask_token_id)
    ids[:, :, 0] = input_ids_BS.gather(1, anchors.indices)
    return ids.flatten(1)


def run_blocks(
    draft: DFlashDraftModel,
    target: Target,
    batch: Batch,
    features: Tensor,
    anchors: Anchors,
    flex: bool = False,
    module: torch.nn.Module | None = None,
) -> Tensor:
    """Runs the draft over all blocks in one forward.

    Args:
        draft (`DFlashDraftModel`): The draft.
        target (`Target`): Whose embedding fills the blocks.
        batch (`Batch`): The rows.
        features (`torch.Tensor` of shape `[B, S, L * D]`): Tapped states of the rows.
        anchors (`Anchors`): The blocks.
        flex (`bool`): Use FlexAttention masks.
        module (`nn.Module`, *optional*): What to call instead of `draft`, when accelerate wrapped it.

    Returns:
        `torch.Tensor` of shape `[B, A * K, D]`: States ready for the target's head.
    """
    num_context = batch.input_ids.shape[1]
    context_positions = torch.arange(num_context, device=features.device).expand(batch.input_ids.shape)
    ids = block_inputs(batch.input_ids, anchors, draft.config.mask_token_id)
    with torch.no_grad():
        noise_embeds = draft.embed(ids, target.embedding)
    dtype = draft.fc.weight.dtype
    output = (draft if module is None else module)(
        noise_embeds=noise_embeds.to(dtype),
        context_hidden_states=features.to(dtype),
        position_ids=torch.cat([context_positions, anchors.positions.flatten(1)], dim=1),
        attention_mask=BlockMaskRule(batch.attention_mask, anchors).masks(attention_kinds(draft), flex),
        block_size=anchors.block_size,
    )
    return output.last_hidden_state


__all__ = ["Features", "attention_kinds", "block_inputs", "forward_inputs", "run_blocks", "target_features"]
