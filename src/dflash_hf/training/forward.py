"""This module computes a training pass: the target's features of a batch, the draft over many blocks, and the loss.

Training and decoding share the draft's model and the taps. A block sees the same context here as in decoding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import logging
from transformers.utils.generic import ModelOutput

from dflash_hf.devices import execution_device
from dflash_hf.errors import one_line, require
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.hidden_states import Taps
from dflash_hf.target_model.parts import Target
from dflash_hf.training.anchors import Anchors, BlockMaskRule
from dflash_hf.training.collators import Batch, Movable
from dflash_hf.training.loss import DISTILLATION, BlockLoss, Objective, block_labels, block_loss

logger: Any = logging.get_logger(__name__)

Attention = Literal["auto", "flex", "sdpa"]
LIKELY_TOKENS = 64  # per position: the target's most likely tokens, from which a draft is distilled
ROWS_OF_LOGITS = 1024  # rows that are converted to float32 at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Features(Movable):
    """The target's outputs for a batch."""

    taps: Tensor  # [B, S, L * D]: outputs of the tapped layers
    # [B, S, P], int64: the target's most likely tokens after each token, best first. `None` unless requested.
    next_ids: Tensor | None = None
    next_log_probs: Tensor | None = None  # [B, S, P], float32 or wider: their log-probabilities


class _Passed(Exception):
    """Ends the target's forward when the last tapped layer has run. It does not signal an error."""


def forward_inputs(model: PreTrainedModel, batch: Batch) -> dict[str, Any]:
    """Returns the keyword arguments of the target's forward for a batch.

    Answer tokens with the token type 0 get the type that `generate` gives to new tokens, because some targets attend
    in both directions within a prompt, whose tokens have type 0. A packed row gets no mask, and its positions start at
    0 in each example. From such positions, Transformers makes a mask in which no example sees another example.
    """
    if batch.starts is not None:
        return {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    inputs: dict[str, Any] = dict(batch.model_inputs)
    if "token_type_ids" in inputs:
        types: Tensor = inputs["token_type_ids"]
        asked: Any = model
        kwargs = {"token_type_ids": torch.zeros(1, 1, dtype=torch.long, device=types.device)}
        kwargs = asked._update_model_kwargs_for_generation(ModelOutput(), kwargs)
        new = batch.loss_mask & (types == 0)
        inputs["token_type_ids"] = types.masked_fill(new, int(kwargs["token_type_ids"][0, -1]))
    return {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask.to(torch.long),
        **inputs,
    }


@torch.no_grad()
def target_features(
    target: Target,
    layer_ids: list[int],
    batch: Batch,
    *,
    after_deepstack: bool = False,
    num_likely: int = 0,
    columns: Tensor | None = None,
) -> Features:
    """Runs the frozen target over a batch and records the tapped layers, without gradients.

    If `num_likely` is 0, the forward ends after the last tapped layer: no later layer runs, and neither does the head.
    (Under FSDP, the whole forward runs.) The function does not change the target's mode.

    Args:
        target (`Target`): The target, in eval mode.
        batch (`Batch`): Right-padded rows. They are moved to the device of the target's embedding.
        after_deepstack (`bool`): Whether to tap after DeepStack's additions (the draft's `tap_after_deepstack`).
        num_likely (`int`): How many of the target's most likely next tokens to return.
        columns (`torch.Tensor`, int64, *optional*): The columns whose next tokens are needed, ascending. By default,
            these are all columns. If the target has `logits_to_keep`, its head runs only over these columns, and the
            next tokens and log-probabilities of the other columns are 0.

    Returns:
        [`Features`] on the device of the first tapped layer.
    """
    batch = batch.to(target.device)
    if batch.starts is not None and len(batch.input_ids) > 1:
        # Each row runs alone, because some attention implementations support only one packed row.
        options: dict[str, Any] = {
            "after_deepstack": after_deepstack,
            "num_likely": num_likely,
            "columns": columns,
        }
        found = [
            target_features(target, layer_ids, batch.row(number), **options)
            for number in range(len(batch.input_ids))
        ]
        names = ("taps", "next_ids", "next_log_probs") if num_likely else ("taps",)
        return Features(
            **{name: torch.cat([getattr(row, name) for row in found]) for name in names}
        )
    through_model = num_likely > 0 or bool(batch.model_inputs)
    decoder = None if through_model else target.model.get_decoder()
    module = target.model if decoder is None else decoder
    inputs = forward_inputs(target.model, batch)
    if through_model and "logits_to_keep" in inspect.signature(target.model.forward).parameters:
        if num_likely == 0:
            inputs["logits_to_keep"] = 1
        elif columns is not None:
            columns = columns.to(target.device)
            inputs["logits_to_keep"] = columns
    # FSDP frees gathered weights at the end of a forward, so a forward under FSDP must not end early.
    ends_early = num_likely == 0 and not any(
        base.__name__ == "FSDPModule"
        for part in target.parts.modules
        for base in type(part).__mro__
    )
    kept: list[Tensor] = []

    def keep(states: Tensor) -> None:
        kept.append(states)
        if ends_early:
            raise _Passed

    output: Any = None
    # The draft's autocast does not apply to the target: the features must be the same as in decoding.
    without_autocast = torch.autocast(target.device.type, enabled=False)
    with without_autocast, Taps(target.layers, layer_ids, keep, after_deepstack).open() as taps:
        with suppress(_Passed):
            output = module(**inputs, use_cache=False)
        states = kept[-1] if kept else taps.take()  # `take` names the missing layers
    if num_likely == 0:
        return Features(taps=states)
    ids, log_probs = likely_tokens(output.logits, num_likely)
    if columns is not None and output.logits.shape[1] != batch.input_ids.shape[1]:
        shape = (*batch.input_ids.shape, ids.shape[-1])
        ids = ids.new_zeros(shape).index_copy_(1, columns.to(ids.device), ids)
        log_probs = log_probs.new_zeros(shape).index_copy_(1, columns.to(ids.device), log_probs)
    return Features(taps=states, next_ids=ids, next_log_probs=log_probs)


def likely_tokens(logits: Tensor, num_likely: int) -> tuple[Tensor, Tensor]:
    """Returns the most likely tokens of logits `[..., V]` and their log-probabilities over all of `V`, `[..., P]`."""
    found = []
    for rows in logits.flatten(0, -2).split(ROWS_OF_LOGITS):
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        best, ids = wide.topk(min(num_likely, wide.shape[-1]), dim=-1)
        found.append((ids, best - wide.logsumexp(dim=-1, keepdim=True)))
    ids, log_probs = (
        torch.cat(part).unflatten(0, logits.shape[:-1]) for part in zip(*found, strict=True)
    )
    return ids, log_probs


@torch.no_grad()
def check_packing(target: Target) -> None:
    """Raises `ValueError` if the target computes other states for a packed example. Runs two short forwards."""
    name = type(target.model).__name__
    advice = "train without packing"
    decoder: Any = target.model.get_decoder()
    if target.recurrences:
        raise ValueError(
            f"expected a target without recurrent layers to pack examples, got {name}; {advice}"
        )
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise ValueError(
            f"expected a target that takes position_ids to pack examples, got {name}; {advice}"
        )
    ids = torch.arange(3, 27, device=target.device)[None] % target.vocab_size
    starts = torch.tensor([[0] * 11 + [11] * 13], device=target.device)
    packed, alone = (
        Batch(
            input_ids=part,
            attention_mask=torch.ones_like(part).bool(),
            loss_mask=part > 0,
            starts=begins,
        )
        for part, begins in ((ids, starts), (ids[:, 11:], None))
    )
    last = [len(target.layers) - 1]
    one = target_features(target, last, packed).taps[:, 11:]
    other = target_features(target, last, alone).taps
    # The median is compared: in a mixture of experts, rounding may send a few tokens to other experts.
    error = (
        (one - other).float().norm(dim=-1) / other.float().norm(dim=-1).clamp_min(1e-9)
    ).median()
    if not error < (1e-3 if other.dtype.itemsize >= 4 else 5e-2):
        raise ValueError(
            f"expected states of a packed example to be those of the example alone, got a relative difference of "
            f"{float(error):.2g} in {name}; {advice}"
        )


def run_blocks(
    draft: DFlashDraftModel,
    target: Target,
    batch: Batch,
    features: Tensor,
    anchors: Anchors,
    attention: Attention = "sdpa",
    module: torch.nn.Module | None = None,
    then: Callable[[Tensor], Any] | None = None,
) -> Any:
    """Runs the draft over all blocks in one forward. Context that no anchor can see is left out.

    Args:
        target (`Target`): The target whose embedding fills the blocks. It may be on other devices.
        batch (`Batch`): The rows, on the draft's device.
        features (`torch.Tensor` of shape `[B, S, L * D]`): Tapped states of the rows, on any device.
        anchors (`Anchors`): The blocks, on the draft's device.
        attention (`str`): `"sdpa"` for SDPA with dense masks, `"flex"` for FlexAttention, or `"auto"`. `"auto"` is
            FlexAttention on CUDA, unless it fails in the first run of a draft, in this or another process. In this
            case the reason is logged once, and SDPA is used. Later failures are raised.
        module (`nn.Module`, *optional*): The module to call instead of `draft`, if accelerate has wrapped the draft.
        then (callable, *optional*): A function that is applied to the states within this call.

    Returns:
        `torch.Tensor` of shape `[B, A * K, D]`: States ready for the target's head, or the result of `then` for these
        states.
    """
    dtype = draft.fc.weight.dtype
    device = draft.fc.weight.device
    seen = slice(0, None if anchors.reach is None else max(anchors.reach, 1))
    starts_BQ = None
    positions = anchors.positions.flatten(1)
    if batch.starts is not None:
        starts_BQ = batch.starts.gather(1, anchors.indices).repeat_interleave(
            anchors.block_size, dim=1
        )
        positions = positions - starts_BQ
    ids = torch.full_like(anchors.positions, draft.config.mask_token_id)
    ids[:, :, 0] = batch.input_ids.gather(1, anchors.indices)
    ids = ids.flatten(1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and draft.embed_tokens is not None):
        noise_embeds = draft.embed(
            ids if draft.embed_tokens is not None else ids.to(target.device), target.embedding
        )
    rule = BlockMaskRule(batch.attention_mask[:, seen], anchors, starts_BQ)
    context = features[:, seen].to(device, _dtype_of_context(features.dtype, dtype, device))

    def run(called: torch.nn.Module, flex: bool, then: Callable[[Tensor], Any] | None) -> Any:
        return called(
            noise_embeds=noise_embeds.to(device, dtype),
            context_hidden_states=context,
            position_ids=torch.cat([batch.position_ids[:, seen], positions], dim=1),
            attention_mask=rule.masks(draft.config, flex),
            block_size=anchors.block_size,
            then=then,
        )

    flex = _wants_flex(draft, attention, device)
    if flex and attention == "auto" and draft not in _flex_drafts:
        flex = _flex_works(
            draft, lambda: run(_alone(draft), True, None), is_shared=module is not None
        )
    output = run(draft if module is None else module, flex, then)
    return output.last_hidden_state if then is None else output


def _alone(draft: DFlashDraftModel) -> DFlashDraftModel:
    """Returns a draft of the same shape that runs in this process alone: the draft itself, unless it is sharded.

    The layers of a sharded draft wait for the other processes. If a layer failed in one process, the other processes
    would wait forever.
    """
    is_sharded = any(isinstance(weight, DTensor) for weight in draft.parameters())
    if not is_sharded:
        return draft
    weight = draft.fc.weight
    alone: Any = DFlashDraftModel(draft.config)
    return alone.to(weight.device, weight.dtype).train(draft.training)


def _dtype_of_context(
    features: torch.dtype, draft: torch.dtype, device: torch.device
) -> torch.dtype:
    """Returns the dtype in which the draft gets the target's states.

    The draft's first product casts these states to autocast's dtype. So states that already have this dtype keep it: a
    wider copy would only take memory.
    """
    is_autocast = torch.is_autocast_enabled(device.type)
    if is_autocast and features == torch.get_autocast_dtype(device.type):
        return features
    return draft


_flex_failures: list[str] = []  # why FlexAttention failed in this process
_flex_drafts: WeakSet[DFlashDraftModel] = WeakSet()  # drafts with a successful trial


def _wants_flex(draft: DFlashDraftModel, attention: Attention, device: torch.device) -> bool:
    """Says whether to try FlexAttention."""
    if attention != "auto":
        return attention == "flex"
    if device.type == "cuda" and draft.training and draft.config.attention_dropout > 0:
        logger.warning_once(
            "attention='auto' takes SDPA: FlexAttention has no dropout, and the draft has some"
        )
        return False
    return device.type == "cuda" and not _flex_failures


def _flex_works(draft: DFlashDraftModel, trial: Callable[[], object], is_shared: bool) -> bool:
    """Says whether FlexAttention can run a draft in this process, or in all processes if `is_shared`. Logs a failure.

    Args:
        trial (callable): Runs the draft with FlexAttention, but without the wrapper of DDP. The wrapper's forward
            communicates with the other processes, so no process may call it twice in a step.
        is_shared (`bool`): Whether all processes call this function now.
    """
    device = draft.fc.weight.device
    kept = [device] if device.type == "cuda" else []
    reason = ""
    try:
        # The trial has gradients, as the step does: the backward pass is compiled together with the forward.
        with torch.random.fork_rng(devices=kept):
            trial()
    except torch.OutOfMemoryError:
        raise
    # A compiler may raise any error. If the compiler is not its cause, SDPA raises the error again.
    except Exception as error:
        reason = one_line(error)
    works = torch.tensor(int(not reason), device=device)
    if is_shared and torch.distributed.is_initialized():
        torch.distributed.all_reduce(works, torch.distributed.ReduceOp.MIN)
    if works.item():
        _flex_drafts.add(draft)
        return True
    _flex_failures.append(reason or "an error in another process")
    logger.warning_once(
        f"attention='auto' goes on with SDPA: FlexAttention failed with {_flex_failures[0]}"
    )
    return False


def logits_of(draft: DFlashDraftModel, target: Target) -> Callable[[Tensor], Tensor]:
    """Returns a function from the draft's states `[..., D]` to logits `[..., V]`.

    As in decoding, the target's head gets the states in the target's dtype and on the head's device.
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
    objective: Objective = "cross_entropy",
    target_labels: bool = False,
    chunk_blocks: int = 128,
    attention: Attention = "auto",
    features: Features | None = None,
    module: torch.nn.Module | None = None,
) -> BlockLoss:
    """Runs the target and the draft over a batch, and returns the loss.

    Args:
        target (`Target`): The target, frozen and in eval mode. It may be on other devices.
        batch, anchors: The rows and their blocks, on any device.
        weights_K (`torch.Tensor` of shape `[K]`): The weight of each slot. See `decay_weights`.
        objective, chunk_blocks: See `block_loss`.
        target_labels (`bool`): Whether to learn the target's argmax at each position instead of the data's tokens.
        features ([`Features`], *optional*): The features of the batch, if they are known already. They must include
            the target's next tokens if the objective or the labels need these tokens.
        attention, module: See `run_blocks`.

    Raises:
        ValueError: If `features` has too few of the target's next tokens.
    """
    config = draft.config
    device = draft.fc.weight.device
    num_likely = LIKELY_TOKENS if objective in DISTILLATION else int(target_labels)
    if features is None:
        columns = (
            _columns_before_labels(batch, anchors, int(config.sample_from_anchor))
            if num_likely
            else None
        )
        features = target_features(
            target,
            config.target_layer_ids,
            batch,
            after_deepstack=config.tap_after_deepstack,
            num_likely=num_likely,
            columns=columns,
        )
    batch = batch.to(device)
    anchors = anchors.to(device)
    features = features.to(device)
    likely = None
    if num_likely:
        wanted = min(num_likely, target.vocab_size)
        found = 0 if features.next_ids is None else features.next_ids.shape[-1]
        what = f"features with the target's {wanted} most likely next tokens"
        require(found >= wanted, what, found, f"write them with num_likely={wanted}")
        assert features.next_ids is not None
        assert features.next_log_probs is not None
        likely = (features.next_ids, features.next_log_probs)
    labels = block_labels(batch, anchors, int(config.sample_from_anchor), likely)
    if target_labels and labels.likely is not None:
        labels = replace(labels, ids=labels.likely[0][..., 0])
    known = None  # [V], bool: the tokens of a reduced vocabulary
    if draft.d2t is not None:
        known = torch.zeros(config.vocab_size or 0, dtype=torch.bool, device=device)
        known[draft.d2t + torch.arange(len(draft.d2t), device=device)] = True

    def sums_of(hidden: Tensor) -> dict[str, Tensor]:
        logits = logits_of(draft, target)
        selector = draft.candidate_selector
        found = block_loss(
            hidden,
            labels,
            weights_K,
            logits,
            chunk_blocks,
            selector,
            objective=objective,
            known_V=known,
            behind=draft.logits_behind,
        )
        sums = {field.name: getattr(found, field.name) for field in fields(found)}
        # If the head knows no label of the batch, the loss does not depend on these weights. DDP and FSDP wait for
        # their gradients in every process, so a term of value 0 adds the weights.
        own = (selector, draft.markov_head, draft.lm_head)
        parts = [part for part in own if part is not None]
        for part in parts:
            for weight in part.parameters():
                sums["loss"] = sums["loss"] + 0 * weight.sum()
        return sums

    # The loss is computed within the draft's forward and returned as a dictionary, because DDP and FSDP look for
    # weights there and find gradients in such outputs.
    return BlockLoss(
        **run_blocks(draft, target, batch, features.taps, anchors, attention, module, sums_of)
    )


def _columns_before_labels(batch: Batch, anchors: Anchors, ahead: int) -> Tensor:
    """Returns the columns whose next token is the label of some slot, ascending."""
    anchors = anchors.to(batch.input_ids.device)
    num_columns = batch.input_ids.shape[1]
    mask = block_labels(batch, anchors, ahead).mask.flatten()
    columns = (anchors.positions + ahead - 1).flatten().clamp(0, num_columns - 1)
    return (
        torch.zeros(num_columns, device=mask.device)
        .index_add_(0, columns, mask.float())
        .nonzero()[:, 0]
    )
