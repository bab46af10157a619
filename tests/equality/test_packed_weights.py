"""Runs over laid-out weights give the text of plain `generate`, also behind a change of weights."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, PreTrainedModel
from transformers.generation import BaseStreamer

from dflash_hf import (
    DFlashDraftModel,
    RunningBatch,
    free_buffers,
    generate_batch,
    iterate,
    packed_weights,
)
from tiny import oracle_draft, prompts, tiny_draft, tiny_target, truth_of

pytestmark = pytest.mark.same_on_every_release

NEW = 18


@pytest.fixture(autouse=True)
def small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of tiny models are laid out, too."""
    packed_weights.forget_packed()
    monkeypatch.setattr(packed_weights, "MIN_SIZES", dict.fromkeys(packed_weights.MIN_SIZES, 1))


def target_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Returns a tiny target in a dtype that is laid out."""
    return tiny_target(family).to(dtype)


def is_packed(model: torch.nn.Module) -> bool:
    """Returns True if some weight of a model is copied."""
    return bool(packed_weights._kept.get(model))


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


def copied_of(draft: DFlashDraftModel) -> set[str]:
    """Returns the names of those weights of a draft that are copied."""
    copied = {number for key in packed_weights._kept.get(draft, {}) for number in key}
    return {name for name, weight in draft.named_parameters() if id(weight) in copied}


@pytest.mark.parametrize(
    "config", [{}, {"hidden_act": "gelu"}, {"own_lm_head": True}], ids=["silu", "gelu", "head"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draft_multiplies_by_copies_too(dtype: torch.dtype, config: dict[str, Any]) -> None:
    target = target_of("qwen3", dtype)
    draft = tiny_draft(target, 8, **config).to(dtype)
    inputs = prompts([4, 11, 7], seed=1)
    text = drafted(target, draft, inputs)
    matrices = {name for name, weight in draft.named_parameters() if weight.dim() == 2}
    assert copied_of(draft) == matrices
    # An adapter that is merged: no version counts it.
    projection: Any = draft.layers[0].mlp.down_proj
    copies = packed_weights._kept[draft]
    before = copies[(id(projection.weight),)]
    projection.weight.data += 0.5
    again = drafted(target, draft, inputs)
    # In half precision another draft decides ties otherwise.
    assert dtype == torch.bfloat16 or torch.equal(again, text)
    assert copies[(id(projection.weight),)] is not before


class Own(nn.Module):
    """A part of a draft of the user's own, which may change weights."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *args: Any) -> Any:
        """Calls the part."""
        return self.part(*args)


def test_a_draft_of_other_classes_computes_by_its_own_weights() -> None:
    target = target_of("qwen3")
    draft = tiny_draft(target, 8)
    draft.layers[0].mlp = Own(draft.layers[0].mlp)
    inputs = prompts([4, 11, 7], seed=1)
    drafted(target, draft, inputs)
    assert not copied_of(draft)
    assert is_packed(target)


def test_a_weight_that_is_no_parameter_is_not_copied() -> None:
    target = target_of("qwen3")
    draft = tiny_draft(target, 8)
    inputs = prompts([4, 11, 7], seed=1)
    text = drafted(target, draft, inputs)
    frozen: Any = draft.layers[0].mlp.up_proj
    weight = frozen.weight.detach()
    del frozen.weight
    frozen.register_buffer("weight", weight)
    packed_weights.forget_packed()
    assert torch.equal(drafted(target, draft, inputs), text)
    # Every other one is.
    matrices = {name for name, weight in draft.named_parameters() if weight.dim() == 2}
    assert copied_of(draft) == matrices
    assert (id(frozen.weight),) not in packed_weights._kept[draft]


def test_iterate_leaves_the_copies_of_calls() -> None:
    target = target_of("qwen3")
    draft = tiny_draft(target, 8)
    inputs = prompts([4], seed=1)
    drafted(target, draft, inputs)
    copies = [dict(packed_weights._kept[model]) for model in (target, draft)]
    assert list(iterate(target, draft, **inputs, **SETTINGS))
    assert [packed_weights._kept[model] for model in (target, draft)] == copies


def test_a_draft_with_hooks_computes_by_its_own_weights() -> None:
    target = target_of("qwen3")
    draft = tiny_draft(target, 8)
    inputs = prompts([4, 11, 7], seed=1)
    text = drafted(target, draft, inputs)
    assert copied_of(draft)
    packed_weights.forget_packed()
    num_calls = 0

    def hook(*args: Any) -> None:
        nonlocal num_calls
        num_calls += 1

    draft.layers[0].mlp.down_proj.register_forward_hook(hook)
    assert torch.equal(drafted(target, draft, inputs), text)
    assert num_calls > 0
    assert not copied_of(draft)
    assert is_packed(target)


def test_a_first_token_waits_for_no_weight() -> None:
    target = target_of("qwen3")
    inputs = prompts([4, 11, 7], seed=1)
    target.generate(**inputs, max_new_tokens=1, do_sample=False, assistant_model=tiny_draft(target))
    assert not is_packed(target)


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


def shared_with_draft(target: Any) -> DFlashDraftModel:
    """Returns a draft whose first layer has the very weights of one of the target's."""
    draft = tiny_draft(target, 8, head_dim=16, intermediate_size=48)
    layer: Any = draft.layers[0]
    other = target.model.layers[1]
    for name in ("q_proj", "k_proj", "v_proj"):
        layer.self_attn.get_submodule(name).weight = other.self_attn.get_submodule(name).weight
    for name in ("gate_proj", "up_proj"):
        layer.mlp.get_submodule(name).weight = other.mlp.get_submodule(name).weight
    return draft


def tied_layers(target: Any) -> DFlashDraftModel:
    """Returns a draft for a target two of whose layers share a part of their weights."""
    first, second, *_ = target.model.layers
    second.self_attn.q_proj.weight = first.self_attn.q_proj.weight
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    return tiny_draft(target, 8)


@pytest.mark.parametrize("make", [shared_with_draft, tied_layers])
def test_weights_of_two_layers_are_not_copied_at_every_step(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of("qwen3")
    # The copies of a run without the draft are those of weights that are multiplied together.
    inputs = prompts([4, 11, 7], seed=1)
    drafted(target, tiny_draft(target, 8), inputs)
    draft = make(target)
    plain = target.generate(**inputs, **SETTINGS)
    num_copied = 0
    packed = packed_weights._Packed

    def counting(*args: Any) -> Any:
        nonlocal num_copied
        num_copied += 1
        return packed(*args)

    monkeypatch.setattr(packed_weights, "_Packed", counting)
    assert torch.equal(drafted(target, draft, inputs), plain)
    assert draft.last_stats.num_target_forwards > 4
    num_weights = len(list(target.parameters())) + len(list(draft.parameters()))
    assert num_copied < num_weights
    num_copied = 0
    assert torch.equal(drafted(target, draft, inputs), plain)
    assert num_copied == 0


def test_freed_buffers_take_laid_out_weights_along() -> None:
    target = target_of("qwen3")
    draft = tiny_draft(target, 8)
    draft.generation_config.verify_width = 4
    list(generate_batch(target, draft, [prompts([5], seed=7)["input_ids"]], max_new_tokens=NEW))
    assert is_packed(target)
    free_buffers(draft)
    assert not is_packed(target)


SETTINGS: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


def drafted(target: Any, draft: DFlashDraftModel, inputs: Any, **others: Any) -> Any:
    """Returns a text with the draft, every verify of four tokens."""
    draft.generation_config.verify_width = 4
    return target.generate(**inputs, **SETTINGS, assistant_model=draft, **others)


def test_models_with_hooks_compute_by_their_own_weights() -> None:
    target = target_of("qwen3")
    inputs = prompts([6], seed=8)
    num_calls = 0

    def hook(*args: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        # Within a forward, where no look at the weights would come in time.
        target.model.layers[2].mlp.up_proj.weight.data += 0.01

    before = copy.deepcopy(target.state_dict())
    target.model.layers[0].register_forward_pre_hook(hook)
    plain = target.generate(**inputs, **SETTINGS)
    target.load_state_dict(before)
    draft = tiny_draft(target, 8)
    draft.generation_config.verify_width = 1
    found = target.generate(**inputs, **SETTINGS, assistant_model=draft)
    assert num_calls > NEW
    assert torch.equal(found, plain)
    assert not is_packed(target)


class Changing(LogitsProcessor):
    """Writes other weights into a target at one of its calls."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.num_calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == 8:
            torch.manual_seed(0)
            change(self.target)
        return scores


def test_weights_that_a_processor_changes_are_seen() -> None:
    target = target_of("qwen3")
    inputs = prompts([4, 9], seed=9)
    before = copy.deepcopy(target.state_dict())
    plain = target.generate(**inputs, **SETTINGS, logits_processor=[Changing(target)])
    target.load_state_dict(before)
    draft = tiny_draft(target, 8)
    draft.generation_config.verify_width = 1
    found = target.generate(
        **inputs, **SETTINGS, assistant_model=draft, logits_processor=[Changing(target)]
    )
    assert torch.equal(found, plain)


def test_weights_that_a_pause_changes_are_seen() -> None:
    texts: list[list[int]] = []
    for is_on in (True, False):
        target = target_of("qwen3")
        draft = tiny_draft(target, 8)
        inputs = prompts([6, 9], seed=10)
        with pytest.MonkeyPatch.context() as patch:
            if not is_on:
                patch.setattr(packed_weights, "_is_packable", lambda weight: False)
            tokens: list[int] = []
            for step in iterate(target, draft, **inputs, **SETTINGS):
                tokens += step.committed[0].tolist()
                if step.index == 4:
                    torch.manual_seed(0)
                    change(target)
        texts.append(tokens)
    assert texts[0] == texts[1]


def test_processors_of_transformers_keep_the_copies() -> None:
    target = target_of("qwen3")
    inputs = prompts([6, 9], seed=13)
    others: dict[str, Any] = {"repetition_penalty": 1.2, "min_new_tokens": NEW}
    plain = target.generate(**inputs, **SETTINGS, **others)
    assert torch.equal(drafted(target, tiny_draft(target, 8), inputs, **others), plain)
    assert is_packed(target)


def test_functions_of_the_users_keep_weights_as_they_are() -> None:
    target = target_of("qwen3")
    inputs = prompts([6, 9], seed=14)

    def allowed(row: int, ids: Tensor) -> list[int]:
        return list(range(5, 50))

    plain = target.generate(**inputs, **SETTINGS, prefix_allowed_tokens_fn=allowed)
    draft = tiny_draft(target, 8)
    found = drafted(target, draft, inputs, prefix_allowed_tokens_fn=allowed)
    assert torch.equal(found, plain)
    assert not is_packed(target)


class Streamer(BaseStreamer):
    """Looks at a layer whenever it gets tokens."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.had_forward: list[bool] = []

    def put(self, value: Any) -> None:
        self.had_forward.append("forward" in self.layer.__dict__)

    def end(self) -> None:
        pass


def test_streamers_find_the_model_as_it_was() -> None:
    target = target_of("qwen3")
    inputs = prompts([6], seed=8)
    plain = target.generate(**inputs, **SETTINGS)
    for layer in (target.lm_head, target.model.layers[0].mlp.down_proj):
        streamer = Streamer(layer)
        found = drafted(target, tiny_draft(target, 8), inputs, streamer=streamer)
        assert torch.equal(found, plain)
        assert len(streamer.had_forward) > 2
        assert not any(streamer.had_forward)
    # Code of the user's may change weights between two steps.
    assert not is_packed(target)


def test_streamers_of_transformers_keep_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Streamer, "__module__", "transformers.generation")
    target = target_of("qwen3")
    inputs = prompts([6], seed=8)
    plain = target.generate(**inputs, **SETTINGS)
    streamer = Streamer(target.lm_head)
    assert torch.equal(drafted(target, tiny_draft(target, 8), inputs, streamer=streamer), plain)
    assert len(streamer.had_forward) > 2
    assert is_packed(target)


def test_a_forward_put_on_the_class_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("qwen3")
    inputs = prompts([6, 9], seed=11)
    drafted(target, tiny_draft(target, 8), inputs)
    assert is_packed(target)
    own = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, input: 1.5 * own(self, input))
    plain = target.generate(**inputs, **SETTINGS)
    assert torch.equal(drafted(target, tiny_draft(target, 8), inputs), plain)


def test_autocast_computes_as_plain_generate_does() -> None:
    target = target_of("qwen3")
    inputs = prompts([6, 9], seed=12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = target.generate(
            **inputs, **SETTINGS, output_logits=True, return_dict_in_generate=True
        )
        found = drafted(
            target, tiny_draft(target, 8), inputs, output_logits=True, return_dict_in_generate=True
        )
    assert torch.equal(found.logits[0], plain.logits[0])
    assert not is_packed(target)


def test_threads_have_the_texts_of_calls_alone() -> None:
    target = target_of("qwen3")
    inputs = [prompts([5 + row, 8], seed=20 + row) for row in range(3)]
    plain = [target.generate(**each, **SETTINGS) for each in inputs]
    errors: list[BaseException] = []

    def call(number: int) -> None:
        try:
            for _ in range(4):
                found = drafted(target, tiny_draft(target, 8), inputs[number])
                assert torch.equal(found, plain[number])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
