"""One training pass: the target's features of a batch, the draft over many blocks of it at once, and the loss.

This and decoding meet in the model and the taps; what a block sees here is what it would see in decoding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from dflash_hf.devices import execution_device
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target.hidden_states import Taps
from dflash_hf.target.parts import Target
from dflash_hf.training.anchors import Anchors, BlockMaskRule
from dflash_hf.training.collators import Batch, Movable
from dflash_hf.training.loss import BlockLoss, block_labels, block_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Features(Movable):
    """What the target says about a batch."""

    taps: Tensor  # [B, S, L * D]: outputs of the tapped layers
    # [B, S], int64: the target's most likely token after each token; only where they were asked for
    next_ids: Tensor | None = None


def forward_inputs(model: PreTrainedModel, batch: Batch) -> dict[str, Any]:
    """Returns what the target's forward gets for a batch.

    Answer tokens of type 0 get the type that `generate` gives to new tokens: some targets attend both ways within a
    prompt, where all is of type 0.
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
) -> Features:
    """Runs the frozen target over a batch and records the tapped layers; sets no mode, keeps no gradient.

    Args:
        target (`Target`): The target, in eval mode.
        batch (`Batch`): Right-padded rows; they are moved to where the target's embedding is.
        after_deepstack (`bool`): Tap after DeepStack's additions, as the draft's `tap_after_deepstack` says.
        with_head (`bool`): Whether to return the target's most likely next tokens.

    Returns:
        [`Features`] on the device of the first tapped layer.
    """
    batch = batch.to(target.device)
    through_model = with_head or bool(batch.model_inputs)
    decoder = None if through_model else target.model.get_decoder()
    module = target.model if decoder is None else decoder
    inputs = forward_inputs(target.model, batch)
    if through_model and not with_head and "logits_to_keep" in inspect.signature(target.model.forward).parameters:
        inputs["logits_to_keep"] = 1
    with Taps(target.layers, layer_ids, after_deepstack=after_deepstack).open() as taps:
        output: Any = module(**inputs, use_cache=False)
        states = taps.take()
    return Features(taps=states, next_ids=output.logits.argmax(dim=-1) if with_head else None)


def run_blocks(
    draft: DFlashDraftModel,
    target: Target,
    batch: Batch,
    features: Tensor,
    anchors: Anchors,
    flex: bool = False,
    module: torch.nn.Module | None = None,
    then: Callable[[Tensor], Any] | None = None,
) -> Any:
    """Runs the draft over all blocks in one forward.

    Args:
        target (`Target`): Whose embedding fills the blocks; it may be on other devices.
        batch (`Batch`): The rows, on the draft's device.
        features (`torch.Tensor` of shape `[B, S, L * D]`): Tapped states of the rows, on any device.
        anchors (`Anchors`): The blocks, on the draft's device.
        flex (`bool`): FlexAttention instead of SDPA under dense masks.
        module (`nn.Module`, *optional*): What to call instead of `draft`, when accelerate wrapped it.
        then (callable, *optional*): What to make of the states within that call.

    Returns:
        `torch.Tensor` of shape `[B, A * K, D]`: States ready for the target's head; or what `then` makes of them.
    """
    dtype, device = draft.fc.weight.dtype, draft.fc.weight.device
    context = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device).expand(batch.input_ids.shape)
    positions = anchors.positions.flatten(1)
    ids = torch.full_like(anchors.positions, draft.config.mask_token_id)
    ids[:, :, 0] = batch.input_ids.gather(1, anchors.indices)
    ids = ids.flatten(1)
    with torch.no_grad():
        noise_embeds = draft.embed(ids if draft.embed_tokens is not None else ids.to(target.device), target.embedding)
    rule = BlockMaskRule(batch.attention_mask, anchors)
    output = (draft if module is None else module)(
        noise_embeds=noise_embeds.to(device, dtype),
        context_hidden_states=features.to(device, dtype),
        position_ids=torch.cat([context, positions], dim=1),
        attention_mask=rule.masks(draft.config, flex),
        block_size=anchors.block_size,
        then=then,
    )
    return output.last_hidden_state if then is None else output


def logits_of(draft: DFlashDraftModel, target: Target) -> Callable[[Tensor], Tensor]:
    """Returns what makes logits `[..., V]` of the draft's states `[..., D]`.

    As in decoding the target's head sees the target's dtype, whatever the draft's is, on its own device.
    """

    def logits(states: Tensor) -> Tensor:
        if draft.lm_head is None:
            states = states.to(execution_device(target.head), target.model.dtype)
        return draft.compute_logits(states, target.head)

    return logits


def batch_loss(
    draft: DFlashDraftModel,
    target: Target,
    batch: Batch,
    anchors: Anchors,
    weights_K: Tensor,
    *,
    target_labels: bool = False,
    chunk_blocks: int = 128,
    module: torch.nn.Module | None = None,
) -> BlockLoss:
    """Runs target and draft over a batch, up to the loss.

    Args:
        target (`Target`): The target, frozen and in eval mode; it may be on other devices.
        batch, anchors: The rows and their blocks, on any device.
        weights_K (`torch.Tensor` of shape `[K]`): Weight of each slot; see `decay_weights`.
        chunk_blocks: See `block_loss`.
        target_labels (`bool`): Learn the target's argmax at each position instead of the data's tokens.
        module: See `run_blocks`.
    """
    config, device = draft.config, draft.fc.weight.device
    features = target_features(
        target,
        config.target_layer_ids,
        batch,
        after_deepstack=config.tap_after_deepstack,
        with_head=target_labels,
    )
    batch, anchors, features = batch.to(device), anchors.to(device), features.to(device)
    labels = block_labels(batch, anchors, features.next_ids)

    def sums_of(hidden: Tensor) -> dict[str, Tensor]:
        logits, selector = logits_of(draft, target), draft.candidate_selector
        found = block_loss(hidden, labels, weights_K, logits, chunk_blocks, selector)
        sums = {field.name: getattr(found, field.name) for field in fields(found)}
        if not bool(found.blocks):  # no label, no use of it: FSDP waits for its gradients in every process
            unused = [] if selector is None else [p.sum() for p in selector.parameters()]
            sums["loss"] = sums["loss"] + 0 * sum(unused)
        return sums

    # Within the draft's forward, and as a dictionary: where and how DDP and FSDP look for weights and gradients.
    flex = device.type == "cuda"
    return BlockLoss(**run_blocks(draft, target, batch, features.taps, anchors, flex, module, sums_of))
