"""A block in training is the same block in decoding, and the target gives features without changing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import Qwen3ForCausalLM

from dflash_hf.block.attention import RaggedBlock
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import Target, find_target
from dflash_hf.training.anchors import Anchors, BlockMaskRule, all_anchors, sample_anchors
from dflash_hf.training.collators import Batch
from dflash_hf.training.forward import (
    batch_loss,
    run_blocks,
    target_features,
)
from dflash_hf.training.loss import (
    OBJECTIVES,
    Objective,
    block_labels,
    block_loss,
    decay_weights,
    loss_weight,
)
from helpers.layouts import SELECTOR
from tiny import DFLASH2

SLIDING = {
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "sliding_window": 4,
    "is_causal": [False, True, False],
}
# Attention as MiMo's drafts have it.
MIMO = {
    **SLIDING,
    "attention_sink_bias": True,
    "attention_value_scale": 0.612,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    },
}
VARIANTS = [
    {},
    SLIDING,
    {**SLIDING, "window_from_anchor": True},
    {"is_causal": True},
    {"input_embedding_scale": 2.0, "raw_input_embeddings": True},
    {**SLIDING, **DFLASH2},
    MIMO,
]

MakeDraft = Callable[..., DFlashDraftModel]


def decode_block(
    draft: DFlashDraftModel, target: Target, batch: Batch, taps: torch.Tensor, anchors: Anchors
) -> torch.Tensor:
    """The same blocks one anchor at a time through the ragged cache, as decoding runs them: `[B, A * K, D]`."""
    batch_size, num_anchors = anchors.indices.shape
    width = anchors.block_size
    ids = torch.full((batch_size, num_anchors, width), draft.config.mask_token_id)
    ids[:, :, 0] = batch.input_ids.gather(1, anchors.indices)
    columns = torch.arange(batch.input_ids.shape[1]).expand(batch_size, -1)
    blocks = []
    for number in range(num_anchors):
        lengths = anchors.indices[:, number]
        cache = RaggedCache(draft.cache_shapes(), batch=batch_size, max_length=64, block=width)
        draft.write_prompt(taps, torch.where(columns < lengths[:, None], columns, -1), cache)
        cache.begin(RaggedBlock.at(lengths, width))
        blocks.append(draft.forward_block(draft.embed(ids[:, number], target.embedding), cache))
    return torch.cat(blocks, dim=1)


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("block_size", [6, 4])
@torch.no_grad()
def test_training_forward_equals_decoding(
    block_size: int,
    changes: dict[str, object],
    target: Qwen3ForCausalLM,
    make_draft: MakeDraft,
    batch: Batch,
) -> None:
    found, draft = find_target(target.double()), make_draft(**changes).double().eval()
    taps = target_features(found, [0, 2], batch).taps
    anchors = all_anchors(batch.loss_mask, block_size)
    trained = run_blocks(draft, found, batch, taps, anchors)
    decoded = decode_block(draft, found, batch, taps, anchors)
    assert (trained - decoded).abs().max() < 1e-9
    assert decoded.std() > 0.1


@torch.no_grad()
def test_blocks_do_not_depend_on_what_they_must_not_see(
    target: Qwen3ForCausalLM, make_draft: MakeDraft, batch: Batch
) -> None:
    found, draft = find_target(target.double()), make_draft().double().eval()
    taps = target_features(found, [0, 2], batch).taps
    anchors = sample_anchors(batch.loss_mask, 2, 6, torch.Generator().manual_seed(0))
    anchor = int(anchors.indices[0, 0])
    before = run_blocks(draft, found, batch, taps, anchors).view(3, 2, 6, -1)
    later = taps.clone()
    later[0, anchor:] = 7.0
    after = run_blocks(draft, found, batch, later, anchors).view(3, 2, 6, -1)
    torch.testing.assert_close(after[0, 0], before[0, 0], rtol=0, atol=1e-12)
    assert not torch.allclose(after[0, 1], before[0, 1])
    earlier = taps.clone()
    earlier[0, anchor - 1] = 7.0
    assert not torch.allclose(
        run_blocks(draft, found, batch, earlier, anchors).view(3, 2, 6, -1)[0, 0], before[0, 0]
    )


class Ran(Exception):
    """Something ran that is not needed."""


def refuse(*args: object) -> None:
    raise Ran


@pytest.mark.parametrize("layer_ids", [[0, 2], [2, 0], [-1, 1], [3]])
@pytest.mark.parametrize("after_deepstack", [False, True])
@pytest.mark.parametrize("top_level", [False, True])
def test_the_targets_forward_ends_behind_the_last_tapped_layer(
    layer_ids: list[int],
    after_deepstack: bool,
    top_level: bool,
    target: Qwen3ForCausalLM,
    batch: Batch,
) -> None:
    found = find_target(target)
    hooks = {
        name: len(module._forward_hooks) + len(module._forward_pre_hooks)
        for name, module in target.named_modules()
    }
    options = {"after_deepstack": after_deepstack}
    if top_level:  # other inputs than tokens are the model's own
        batch = replace(batch, model_inputs={"position_ids": batch.position_ids})
    whole = target_features(found, layer_ids, batch, **options, num_likely=1)
    logits = target(batch.input_ids).logits
    last = max(layer_ids)
    later: list[nn.Module] = [
        target.model.norm,
        target.lm_head,
        *(layer.mlp for layer in found.layers[last + 1 :]),
    ]
    handles = [module.register_forward_pre_hook(refuse) for module in later]
    ended = target_features(found, layer_ids, batch, **options)
    assert torch.equal(ended.taps, whole.taps)
    with pytest.raises(Ran):
        target_features(found, layer_ids, batch, **options, num_likely=1)
    for handle in handles:
        handle.remove()
    assert hooks == {
        name: len(module._forward_hooks) + len(module._forward_pre_hooks)
        for name, module in target.named_modules()
    }
    assert torch.equal(target(batch.input_ids).logits, logits)


def test_a_sharded_targets_forward_is_run_to_its_end(
    target: Qwen3ForCausalLM, batch: Batch
) -> None:
    """FSDP shards a module's weights again when its forward returns: what it never does it never takes back."""

    class FSDPModule:
        pass

    wanted = target_features(find_target(target), [0, 2], batch).taps
    target.__class__ = type("FSDPQwen3ForCausalLM", (FSDPModule, Qwen3ForCausalLM), {})
    ran: list[nn.Module] = []
    handle = target.model.norm.register_forward_pre_hook(lambda module, args: ran.append(module))
    assert torch.equal(target_features(find_target(target), [0, 2], batch).taps, wanted)
    handle.remove()
    assert ran == [target.model.norm]


@torch.no_grad()
def test_context_that_no_anchor_sees_is_left_out(
    target: Qwen3ForCausalLM, make_draft: MakeDraft, batch: Batch
) -> None:
    found, draft = find_target(target.double()), make_draft(**SLIDING).double().eval()
    taps = target_features(found, [0, 2], batch).taps
    anchors = all_anchors(batch.loss_mask, 6).select(0, 2)
    assert anchors.reach == 8 < batch.input_ids.shape[1]
    widths: list[int] = []
    handle = draft.fc.register_forward_pre_hook(
        lambda module, args: widths.append(args[0].shape[1])
    )
    shorter = run_blocks(draft, found, batch, taps, anchors)
    longer = run_blocks(draft, found, batch, taps, replace(anchors, reach=None))
    handle.remove()
    assert widths == [8, batch.input_ids.shape[1]]
    torch.testing.assert_close(shorter, longer, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_draft_and_target_may_be_of_different_dtypes(
    dtypes: tuple[torch.dtype, torch.dtype],
    objective: Objective,
    target: Qwen3ForCausalLM,
    make_draft: MakeDraft,
    batch: Batch,
) -> None:
    """As they are without autocast: a fresh float32 draft of a bfloat16 target."""
    anchors, weights = all_anchors(batch.loss_mask, 6), decay_weights(6, 3.0)
    draft = make_draft()
    wanted = batch_loss(draft, find_target(target), batch, anchors, weights, objective=objective)
    found, draft = find_target(target.requires_grad_(False).to(dtypes[0])), draft.to(dtypes[1])
    result = batch_loss(draft, found, batch, anchors, weights, objective=objective)
    result.loss.backward()
    assert all(p.grad is not None and p.grad.dtype == dtypes[1] for p in draft.parameters())
    assert abs(result.loss.item() / wanted.loss.item() - 1) < 0.05
    assert (
        result.weight
        == wanted.weight
        == loss_weight(block_labels(batch, anchors), weights, objective)
    )


def test_features_under_autocast_are_those_of_decoding(
    target: Qwen3ForCausalLM, batch: Batch
) -> None:
    found = find_target(target)
    wanted = target_features(found, [0, 2], batch, num_likely=4)
    with torch.autocast("cpu", torch.bfloat16):
        features = target_features(found, [0, 2], batch, num_likely=4)
    assert features.taps.dtype == torch.float32
    assert torch.equal(features.taps, wanted.taps)
    assert torch.equal(features.next_log_probs, wanted.next_log_probs)


def test_the_targets_states_stay_in_its_dtype_under_autocast(
    target: Qwen3ForCausalLM, make_draft: MakeDraft, batch: Batch
) -> None:
    """A copy in float32 would take twice the memory and change no bit of the loss and its gradients."""
    found = find_target(target.requires_grad_(False).bfloat16())
    anchors, weights = all_anchors(batch.loss_mask, 6), decay_weights(6, 3.0)
    features = target_features(found, [0, 2], batch)
    kinds: list[torch.dtype] = []
    losses: list[torch.Tensor] = []
    gradients: list[list[torch.Tensor]] = []
    for given in (features, replace(features, taps=features.taps.float())):
        draft = make_draft()
        draft.fc.register_forward_pre_hook(lambda module, args: kinds.append(args[0].dtype))
        with torch.autocast("cpu", torch.bfloat16):
            result = batch_loss(draft, found, batch, anchors, weights, features=given)
        result.loss.backward()
        losses.append(result.loss.detach())
        gradients.append([weight.grad for weight in draft.parameters() if weight.grad is not None])
    assert kinds == [torch.bfloat16, torch.float32]
    assert torch.equal(*losses)
    assert all(one.equal(two) for one, two in zip(*gradients, strict=True))


def test_distillation_compares_with_the_targets_own_distribution(
    target: Qwen3ForCausalLM, make_draft: MakeDraft, batch: Batch
) -> None:
    """All of the vocabulary is likely here, so it is the whole distribution behind the token in front of each slot."""
    target, draft = target.double(), make_draft().double().eval()
    found, anchors, weights = (
        find_target(target),
        all_anchors(batch.loss_mask, 6),
        decay_weights(6, 3.0),
    )
    result = batch_loss(draft, found, batch, anchors, weights, objective="kl")
    taps = target_features(found, [0, 2], batch).taps
    own = (
        target.lm_head(run_blocks(draft, found, batch, taps, anchors)).log_softmax(dim=-1).detach()
    )
    theirs = (
        target(batch.input_ids, attention_mask=batch.attention_mask.long())
        .logits.log_softmax(dim=-1)
        .detach()
    )
    labels, loss = block_labels(batch, anchors), 0.0
    for row, number, slot in labels.mask.nonzero().tolist():
        p = theirs[row, int(anchors.indices[row, number]) + slot - 1]
        q = own.unflatten(1, (-1, 6))[row, number, slot]
        loss += float(weights[slot] * (p.exp() * (p - q)).sum())
    assert result.loss.item() == pytest.approx(loss, rel=1e-9)


@pytest.mark.parametrize("kind", [{}, SELECTOR], ids=["plain", "selector"])
def test_labels_of_the_target_are_its_argmax_in_a_batch_loss(
    kind: dict[str, Any], target: Qwen3ForCausalLM, make_draft: MakeDraft, batch: Batch
) -> None:
    """A selector's score is of the token before in the text, which the target was shown, and not in the labels."""
    draft, found, anchors = make_draft(**kind), find_target(target), all_anchors(batch.loss_mask, 6)
    if draft.candidate_selector is not None:
        nn.init.normal_(draft.candidate_selector.successor_codebook)
    weights = decay_weights(6, 3.0)
    result = batch_loss(draft, found, batch, anchors, weights, target_labels=True)
    own = target(batch.input_ids, attention_mask=batch.attention_mask.long()).logits.argmax(dim=-1)
    ids = torch.cat([batch.input_ids[:, :1], own[:, :-1]], dim=1)
    labels = block_labels(batch, anchors)
    labels = replace(labels, ids=block_labels(replace(batch, input_ids=ids), anchors).ids)
    hidden = run_blocks(draft, found, batch, target_features(found, [0, 2], batch).taps, anchors)
    wanted = block_loss(hidden, labels, weights, found.head, selector=draft.candidate_selector)
    torch.testing.assert_close(result.loss, wanted.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(result.selector_loss, wanted.selector_loss, rtol=1e-5, atol=0)
    plain = batch_loss(draft, found, batch, anchors, weights)
    assert plain.loss != result.loss


@pytest.mark.parametrize("changes", [SLIDING, MIMO], ids=["sliding", "sinks"])
def test_flex_attention_gives_the_same_states(
    changes: dict[str, Any], target: Qwen3ForCausalLM, make_draft: MakeDraft, batch: Batch
) -> None:
    found, draft = find_target(target), make_draft(**changes)
    taps = target_features(found, [0, 2], batch).taps
    anchors = sample_anchors(batch.loss_mask, 3, 6, torch.Generator().manual_seed(0))
    masks = BlockMaskRule(batch.attention_mask, anchors).masks(draft.config, flex=True)
    assert all(isinstance(mask, BlockMask) for mask in masks.values())
    dense = run_blocks(draft, found, batch, taps, anchors)
    with torch.no_grad():
        flexible = run_blocks(draft, found, batch, taps, anchors, "flex")
    torch.testing.assert_close(dense, flexible, rtol=1e-4, atol=1e-4)


def test_gradient_flows_into_the_draft_only(
    target: Qwen3ForCausalLM, make_draft: MakeDraft, batch: Batch
) -> None:
    target.requires_grad_(False)
    found, draft = find_target(target), make_draft()
    before = {name: p.clone() for name, p in target.named_parameters()}
    taps = target_features(found, [0, 2], batch).taps
    anchors = sample_anchors(batch.loss_mask, 3, 6)
    hidden = run_blocks(draft, found, batch, taps, anchors)
    labels = block_labels(batch, anchors)
    block_loss(hidden, labels, decay_weights(6, 3.0), found.head).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in draft.parameters())
    assert all(p.grad is None for p in target.parameters())
    assert all(torch.equal(p, before[name]) for name, p in target.named_parameters())


@torch.no_grad()
def test_features_are_the_hidden_states_after_each_layer(
    target: Qwen3ForCausalLM, batch: Batch
) -> None:
    found = find_target(target)
    states = target(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask.long(),
        output_hidden_states=True,
    )
    expected = torch.cat([states.hidden_states[1], states.hidden_states[3]], dim=-1)[
        batch.attention_mask
    ]
    through_model = replace(batch, model_inputs={"position_ids": batch.position_ids})
    for given, num_likely in ((batch, 1), (through_model, 0), (batch, 0)):
        features = target_features(found, [0, 2], given, num_likely=num_likely)
        torch.testing.assert_close(features.taps[batch.attention_mask], expected, rtol=0, atol=1e-6)
    assert features.next_ids is None
    features = target_features(found, [0, 2], batch, num_likely=3)
    assert features.next_ids is not None
    assert features.next_log_probs is not None
    assert torch.equal(features.next_ids[..., 0], states.logits.argmax(dim=-1))
    log_probs, ids = states.logits.log_softmax(dim=-1).topk(3)
    assert torch.equal(features.next_ids, ids)
    torch.testing.assert_close(features.next_log_probs, log_probs, rtol=0, atol=1e-5)
    columns = torch.tensor([2, 5, 6])
    some = target_features(found, [0, 2], batch, num_likely=3, columns=columns)
    assert some.next_ids is not None
    assert torch.equal(some.next_ids[:, columns], ids[:, columns])
    assert not some.next_ids[:, [0, 1, 3, 4, 7]].any()


@torch.no_grad()
def test_padding_does_not_change_a_row(
    target: Qwen3ForCausalLM, make_draft: MakeDraft, batch: Batch
) -> None:
    found, draft = find_target(target.double()), make_draft().double().eval()
    anchors = all_anchors(batch.loss_mask, 6)
    taps = target_features(found, [0, 2], batch).taps
    together = run_blocks(draft, found, batch, taps, anchors)
    length = int(batch.attention_mask[1].sum())
    alone = Batch(
        input_ids=batch.input_ids[1:2, :length],
        attention_mask=batch.attention_mask[1:2, :length],
        loss_mask=batch.loss_mask[1:2, :length],
    )
    own = all_anchors(alone.loss_mask, 6)
    single = run_blocks(draft, found, alone, target_features(found, [0, 2], alone).taps, own)
    torch.testing.assert_close(together[1:2, : single.shape[1]], single, rtol=0, atol=1e-9)
