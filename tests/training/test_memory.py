"""What a step holds: chunks of logits and no more, checkpointed layers, and models on several devices."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import linear
from transformers import Qwen3Config

from dflash_hf import DFlashConfig
from dflash_hf.target_model.parts import find_target
from dflash_hf.training.anchors import Anchors, all_anchors
from dflash_hf.training.collators import Batch
from dflash_hf.training.forward import batch_loss
from dflash_hf.training.loss import decay_weights
from helpers.pretended_gpu import pretended_gpu
from helpers.training_memory import (
    LiveBytes,
    build_bare_draft,
    build_bare_target,
    enable_checkpointing,
    peak_memory,
)

VOCAB, BLOCK, ANCHORS, LENGTH = 40_000, 8, 32, 256
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TARGET = Qwen3Config(**SHAPE, num_hidden_layers=2)
PLACE: dict[str, Any] = {
    "num_target_layers": 2,
    "target_layer_ids": [0],
    "block_size": BLOCK,
    "mask_token_id": 5,
}
DRAFT = DFlashConfig(**SHAPE, **PLACE, num_hidden_layers=1)


def test_bytes_are_counted_as_long_as_somebody_holds_them() -> None:
    with FakeTensorMode():
        states, weight = torch.empty(8, 16), torch.empty(32, 16, requires_grad=True)
        counter = LiveBytes(BLOCK)
        counter.hold(weight)
        with counter:
            out = linear(states, weight).relu()  # relu keeps its own output, and linear its input
            assert counter.live == 4 * (32 * 16 + 8 * 32)
            assert counter.peak == 4 * (32 * 16 + 8 * 32 + 8 * 32)
            view = out[:2].flatten()
            assert counter.live == 4 * (32 * 16 + 8 * 32)
            out.sum().backward()
            assert counter.live == 4 * (32 * 16 * 2 + 8 * 32)
            del out
            assert counter.live == 4 * (32 * 16 * 2 + 8 * 32)
            del view
        assert counter.live == 4 * 32 * 16 * 2


def test_logits_are_held_one_chunk_at_a_time() -> None:
    options: dict[str, Any] = {"batch_size": 2, "length": LENGTH, "objective": "dpace"}
    peaks = {
        chunk: peak_memory(TARGET, DRAFT, num_anchors=ANCHORS, chunk_blocks=chunk, **options)[
            "peak"
        ]
        for chunk in (8, 16, 2 * ANCHORS)
    }
    logits = 8 * (BLOCK - 1) * VOCAB  # of the smallest chunk
    # In bfloat16, in float32, their log-probabilities, and the gradients of these: at most 16 bytes each.
    assert 10 * logits < peaks[16] - peaks[8] < 18 * logits
    whole = 2 * ANCHORS // 8 - 2  # as many more chunks of the smallest size
    assert peaks[2 * ANCHORS] - peaks[16] > whole * 10 * logits
    more = peak_memory(TARGET, DRAFT, num_anchors=2 * ANCHORS, chunk_blocks=16, **options)
    assert more["peak"] - peaks[16] < 20 * logits, "more blocks are no more logits"


def test_distillation_holds_only_the_needed_target_logits() -> None:
    options: dict[str, Any] = {"batch_size": 2, "num_anchors": 2, "chunk_blocks": 1}
    short, long = (
        peak_memory(TARGET, DRAFT, length=length, **options, objective="kl")["peak"]
        for length in (256, 512)
    )
    columns = 2 * 256 * (BLOCK - 1) // BLOCK
    assert 2 * columns * VOCAB < long - short < 8 * columns * VOCAB


def test_checkpointing_and_flex_hold_less() -> None:
    options: dict[str, Any] = {
        "batch_size": 2,
        "length": LENGTH,
        "num_anchors": ANCHORS,
        "chunk_blocks": 16,
    }
    # Logits of few tokens, in few chunks: what the layers hold is more.
    shape = {**SHAPE, "vocab_size": VOCAB // 10}
    target = Qwen3Config(**shape, num_hidden_layers=2)
    draft = DFlashConfig(**shape, **PLACE, num_hidden_layers=3)
    plain = peak_memory(target, draft, **options)
    checkpointed = peak_memory(target, draft, **options, checkpointing=True)
    dense = peak_memory(target, draft, **options, attention="sdpa")
    assert plain["kept"] == checkpointed["kept"]
    assert checkpointed["peak"] < 0.8 * plain["peak"] < 0.8 * dense["peak"]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_checkpointed_draft_has_the_gradients_of_a_plain_one(
    dropout: float, target, make_draft, batch: Batch
) -> None:
    found = find_target(target.double().requires_grad_(False))
    draft = make_draft(attention_dropout=dropout).double().train()
    anchors, weights = all_anchors(batch.loss_mask, 6), decay_weights(6, 3.0)
    found_gradients: list[dict[str, torch.Tensor]] = []
    for _ in range(2):
        torch.manual_seed(0)
        draft.zero_grad()
        batch_loss(draft, found, batch, anchors, weights).loss.backward()
        found_gradients.append({name: p.grad.clone() for name, p in draft.named_parameters()})
        calls: list[object] = []
        enable_checkpointing(draft)
        for layer in draft.layers:
            layer.self_attn.register_forward_pre_hook(lambda *args, calls=calls: calls.append(args))
            layer.mlp.register_forward_pre_hook(lambda *args, calls=calls: calls.append(args))
    assert len(calls) == 0
    assert all(
        torch.equal(found_gradients[0][name], gradient)
        for name, gradient in found_gradients[1].items()
    )
    draft.zero_grad()
    calls.clear()
    result = batch_loss(draft, found, batch, anchors, weights)
    forward = len(calls)
    result.loss.backward()
    assert len(calls) == 2 * forward > 0, "layers run again in the backward pass"


@pytest.mark.parametrize("places", [("cuda", "cpu"), ("cpu", "cuda")])
@torch.no_grad()
def test_target_and_draft_may_be_on_different_devices(places: tuple[str, str]) -> None:
    """An operation on tensors of two devices raises under `FakeTensorMode`, as it would outside."""
    with pretended_gpu():
        with torch.device(places[0]):
            target = find_target(build_bare_target(TARGET, torch.bfloat16))
        with torch.device(places[1]):
            draft = build_bare_draft(DRAFT)
        ids = torch.zeros(2, 32, dtype=torch.long, device="cpu")
        batch = Batch(
            input_ids=ids,
            attention_mask=torch.ones_like(ids).bool(),
            loss_mask=torch.ones_like(ids).bool(),
        )
        indices = torch.zeros(2, 4, dtype=torch.long, device="cpu")
        anchors = Anchors(
            indices=indices, keep=torch.ones_like(indices).bool(), block_size=BLOCK, reach=20
        )
        with LiveBytes(BLOCK):
            result = batch_loss(
                draft, target, batch, anchors, decay_weights(BLOCK, 4.0), attention="sdpa"
            )
        assert result.loss.device.type == places[1]
