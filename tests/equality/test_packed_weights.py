"""Runs over laid-out weights give the text of plain `generate`, also behind a change of weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation import BaseStreamer

from dflash_hf import DFlashDraftModel, RunningBatch, free_buffers, generate_batch, packed_weights
from tiny import oracle_draft, prompts, tiny_draft, tiny_target, truth_of

NEW = 24


@pytest.fixture(autouse=True)
def small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of tiny models are laid out, too."""
    packed_weights.forget_packed()
    monkeypatch.setattr(packed_weights, "MIN_SIZES", dict.fromkeys(packed_weights.MIN_SIZES, 1))


def target_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Returns a tiny target in a dtype that is laid out."""
    return tiny_target(family).to(dtype)


def is_packed(model: torch.nn.Module) -> bool:
    """Returns True if some weight of a model is laid out."""
    return any(weight in packed_weights._kept for weight in model.parameters())


@pytest.mark.parametrize("lengths", [[9], [4, 11, 7]])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3-moe", "qwen3.5", "lfm2"])
def test_texts_are_plain_generates(family: str, lengths: list[int]) -> None:
    target = target_of(family)
    inputs = prompts(lengths, seed=1)
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    plain = target.generate(**inputs, **settings)
    draft = oracle_draft(target, truth_of(inputs, plain), seed=1)
    # The second call has the weights of the first one.
    for _ in range(2):
        assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), plain)
    assert is_packed(target)
    assert is_packed(draft)


def test_sampled_texts_are_the_same_at_every_width() -> None:
    target = target_of("qwen3")
    inputs = prompts([4, 11, 7], seed=2)
    texts: list[Any] = []
    for width in (1, 3, 8):
        draft = tiny_draft(target, 8)
        draft.generation_config.verify_width = width
        draft.generation_config.proposal = "argmax"
        torch.manual_seed(3)
        texts.append(
            target.generate(**inputs, max_new_tokens=NEW, do_sample=True, assistant_model=draft)
        )
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])


def test_bfloat16_has_the_same_text_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("qwen3", torch.bfloat16)
    draft = tiny_draft(target, 8)
    inputs = prompts([4, 11, 7], seed=4)
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    found = [target.generate(**inputs, **settings, assistant_model=draft) for _ in range(2)]
    monkeypatch.setattr(packed_weights, "_is_packable", lambda weight: False)
    packed_weights.forget_packed()
    plain = target.generate(**inputs, **settings, assistant_model=draft)
    assert not is_packed(target)
    assert all(torch.equal(text, plain) for text in found)


def change(model: PreTrainedModel) -> None:
    """Changes weights as libraries merge an adapter: no version counts it."""
    layer: Any = model.model.layers[1]
    layer.mlp.down_proj.weight.data += 0.2 * torch.randn_like(layer.mlp.down_proj.weight)
    model.lm_head.weight.data[5:20] *= 1.5


def test_the_next_call_has_the_weights_of_today() -> None:
    target = target_of("qwen3")
    draft = tiny_draft(target, 8)
    inputs = prompts([4, 11, 7], seed=5)
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    before = target.generate(**inputs, **settings, assistant_model=draft)
    assert is_packed(target)
    change(target)
    plain = target.generate(**inputs, **settings)
    assert not torch.equal(before, plain)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), plain)


def test_a_running_batch_has_the_weights_of_a_requests_day() -> None:
    target = target_of("qwen3")
    draft = tiny_draft(target, 8)
    draft.generation_config.verify_width = 4
    batch = RunningBatch(target, draft)
    prompt = prompts([7], seed=6)["input_ids"]
    answers: list[list[int]] = []
    for _ in range(2):
        id = batch.add(prompt, max_new_tokens=NEW, do_sample=False)
        tokens: list[int] = []
        while id in batch.ids:
            tokens += [token for new in batch.step() for token in new.token_ids]
        plain: Any = target.generate(prompt, max_new_tokens=NEW, do_sample=False)
        assert tokens == plain[0, 7:].tolist()
        answers.append(tokens)
        assert is_packed(target)
        change(target)
    assert answers[0] != answers[1]


def test_freed_buffers_take_laid_out_weights_along() -> None:
    target = target_of("qwen3", torch.bfloat16)
    draft = tiny_draft(target, 8)
    list(generate_batch(target, draft, [prompts([5], seed=7)["input_ids"]], max_new_tokens=NEW))
    assert is_packed(target)
    free_buffers(draft)
    assert not is_packed(target)
    assert not is_packed(draft)


def test_hooks_and_streamers_find_the_model_as_it_was() -> None:
    target = target_of("qwen3")
    draft: DFlashDraftModel = tiny_draft(target, 8)
    draft.generation_config.verify_width = 4
    inputs = prompts([6], seed=8)
    forwards: list[bool] = []
    layer = target.model.layers[0].mlp.down_proj

    class Looking(BaseStreamer):
        def put(self, value: Any) -> None:
            forwards.append("forward" in layer.__dict__)

        def end(self) -> None:
            pass

    target.model.layers[0].register_forward_hook(lambda *args: None)
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    plain = target.generate(**inputs, **settings)
    found = target.generate(**inputs, **settings, assistant_model=draft, streamer=Looking())
    assert torch.equal(found, plain)
    assert len(forwards) > 2
    assert not any(forwards)
    assert is_packed(target)
