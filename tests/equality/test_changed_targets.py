"""A target that is changed between requests or steps: from then on its text is that of the target as it is."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from dflash_hf import RunningBatch, iterate
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.generation import kept_prefixes
from helpers.running import answer_alone, asked
from helpers.static import TapeStep, set_engine, tensor_oracle, use_tapes
from tiny import prompts, shallow_target, tiny_draft, truth_of

pytestmark = pytest.mark.same_on_every_release

Change = Callable[[Any], None]
GREEDY: dict[str, Any] = {"max_new_tokens": 18, "do_sample": False}


class Flipped(nn.Module):
    """A norm of the user's own."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, states: Tensor) -> Tensor:
        return -2 * self.weight * states.tanh()


@torch.no_grad()
def scale(target: Any) -> None:
    for layer in target.model.layers:
        layer.self_attn.v_proj.weight.mul_(-2)


def scale_uncounted(target: Any) -> None:
    for layer in target.model.layers:
        layer.self_attn.v_proj.weight.data.mul_(-2)


def swap_rows(target: Any) -> None:
    for layer in target.model.layers:
        weight = layer.self_attn.v_proj.weight.data
        weight.copy_(weight.flip(0))


def replace_weights(target: Any) -> None:
    for layer in target.model.layers:
        layer.mlp.up_proj.weight = nn.Parameter(-3 * layer.mlp.up_proj.weight.detach())


def replace_norms(target: Any) -> None:
    for layer in target.model.layers:
        layer.input_layernorm = Flipped(layer.input_layernorm.weight).eval()


def replace_activations(target: Any) -> None:
    for layer in target.model.layers:
        layer.mlp.act_fn = nn.Tanh().eval()


def set_epsilons(target: Any) -> None:
    for layer in target.model.layers:
        layer.input_layernorm.variance_epsilon = 3.0


def hook_activations(target: Any) -> None:
    for layer in target.model.layers:
        layer.mlp.act_fn.register_forward_hook(lambda module, given, out: -2 * out)


def hook_norms_before(target: Any) -> None:
    for layer in target.model.layers:
        layer.input_layernorm.register_forward_pre_hook(lambda module, given: -3 * given[0] + 1)


def set_forwards(target: Any) -> None:
    for layer in target.model.layers:
        plain = layer.mlp.forward
        layer.mlp.forward = lambda states, plain=plain: -2 * plain(states)


OF_WEIGHTS: list[Change] = [scale, scale_uncounted, swap_rows, replace_weights]
OF_CODE: list[Change] = [
    replace_norms,
    replace_activations,
    set_epsilons,
    hook_activations,
    hook_norms_before,
    set_forwards,
]


def set_factors(target: Any) -> None:
    for layer in target.model.layers:
        layer.self_attn.scaling *= 5.0


def turn_weights(target: Any) -> None:
    for layer in target.model.layers:
        weight = layer.mlp.up_proj.weight
        # The same numbers at the same address, in another order.
        numbers = weight.data.as_strided((weight.numel(),), (1,))
        weight.data = numbers.view(weight.shape[::-1]).t()


def answered(batch: RunningBatch, one: Any) -> tuple[list[int], int]:
    """Returns the answer to a request, and how many tokens of its prompt were taken from an earlier text."""
    id = batch.add(one.ids, **one.settings)
    text: list[int] = []
    while id in batch.ids:
        for new in batch.step():
            if new.id == id:
                text += new.token_ids
    return text, batch.ended[id].num_kept_tokens


# ---- kept graphs


def captured_pair() -> tuple[Any, Any, dict[str, Tensor], Tensor]:
    """A target, an oracle whose steps are captured, ragged prompts and plain `generate`'s text."""
    target = shallow_target("qwen3")
    inputs = prompts([4, 11], 0)
    ref = target.generate(**inputs, **GREEDY)
    draft = tensor_oracle(target, truth_of(inputs, ref), 0, 8)
    set_engine(draft, "cuda_graph")
    return target, draft, inputs, ref


# Hooks keep a call from being captured at all.
@pytest.mark.parametrize(
    "change",
    [
        *OF_WEIGHTS,
        turn_weights,
        replace_norms,
        replace_activations,
        set_epsilons,
        set_factors,
        set_forwards,
    ],
)
def test_no_graph_of_another_target_is_replayed(
    change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tapes(monkeypatch, smallest_bucket=64)  # one graph a run
    target, draft, inputs, before = captured_pair()
    for _ in range(2):
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), before)
        change(target)
        before = target.generate(**inputs, **GREEDY)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), before)
    assert draft.last_stats.engine == "cuda_graph"


@pytest.mark.parametrize("what", ["method", "function"])
def test_no_graph_of_a_replaced_function_is_replayed(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tapes(monkeypatch, smallest_bucket=64)
    target, draft, inputs, ref = captured_pair()
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    layer: Any = target.model.layers[0]
    if what == "method":
        kind = type(layer.mlp)
        plain = kind.forward
        monkeypatch.setattr(kind, "forward", lambda self, states: -2 * plain(self, states))
    else:
        file = sys.modules[type(layer).__module__]
        monkeypatch.setattr(file, "apply_rotary_pos_emb", lambda query, key, *args: (query, key))
    ref = target.generate(**inputs, **GREEDY)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert draft.last_stats.engine == "cuda_graph"


def test_forwards_in_turn_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tapes(monkeypatch, smallest_bucket=64)
    target, draft, inputs, _ = captured_pair()
    norm: Any = target.model.norm
    plain = norm.forward
    for factor in (2.0, -1.0, 3.0, -2.0):
        # Each one may stand at the address of the one before it.
        norm.forward = lambda states, by=factor: by * plain(states).roll(int(by), -1)
        ref = target.generate(**inputs, **GREEDY)
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    num_captured = len(TapeStep.captured)
    target.generate(**inputs, **GREEDY, assistant_model=draft)
    assert len(TapeStep.captured) == num_captured


# ---- kept texts


@pytest.mark.parametrize("change", OF_WEIGHTS + OF_CODE)
def test_no_text_of_another_target_is_gone_on_from(change: Change) -> None:
    target = shallow_target("qwen3")
    (one,) = asked([24], 1, num_new=(8, 8))
    # Without windows, the draft too can go on from the middle of a text.
    draft = tiny_draft(target, layer_types=["full_attention"] * 2)
    batch = RunningBatch(target, draft, max_kept_bytes=2**30)
    answer_alone(target, [one])
    before = one.truth
    assert answered(batch, one) == (before, 0)
    change(target)
    answer_alone(target, [one])
    assert one.truth != before, "the change has to tell"
    assert answered(batch, one) == (one.truth, 0)
    # The new one's text is kept in its turn.
    assert answered(batch, one) == (one.truth, 23)


def test_a_removed_hook_is_a_change_too() -> None:
    target: Any = shallow_target("qwen3")
    (one,) = asked([24], 2, num_new=(8, 8))
    batch = RunningBatch(target, tiny_draft(target), max_kept_bytes=2**30)
    norm = target.model.layers[1].input_layernorm
    for factor in (-2, 3, -1):
        # Each hook may stand at the address of the one before it.
        handle = norm.register_forward_hook(lambda module, given, out, by=factor: by * out)
        answer_alone(target, [one])
        assert answered(batch, one) == (one.truth, 0)
        handle.remove()
    answer_alone(target, [one])
    assert answered(batch, one) == (one.truth, 0)


def test_a_text_begun_before_a_change_is_not_kept() -> None:
    target = shallow_target("qwen3")
    first, second = asked([40, 30], 3, num_new=(20, 20))
    first.settings["eos_token_id"] = None
    batch = RunningBatch(target, tiny_draft(target), max_kept_bytes=2**30)
    mixed = batch.add(first.ids, **first.settings)
    text: list[int] = []
    for new in batch.step():
        text += new.token_ids
    scale(target)
    batch.add(second.ids, **second.settings)
    while mixed in batch.ids:
        for new in batch.step():
            if new.id == mixed:
                text += new.token_ids
    while batch.ids:
        batch.step()
    first.ids = torch.cat([first.ids, torch.tensor([text])], dim=1)
    answer_alone(target, [first])
    assert answered(batch, first) == (first.truth, 0)


def test_what_is_dropped_is_said_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = shallow_target("qwen3")
    (one,) = asked([40], 4, num_new=(5, 5))
    batch = RunningBatch(target, tiny_draft(target), max_kept_bytes=2**30)
    kept_prefixes.logger.warning_once.cache_clear()
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    answered(batch, one)
    answered(batch, one)
    assert "draft has changed" not in caplog.text
    scale(target)
    answered(batch, one)
    assert "draft has changed" in caplog.text


# ---- a running batch


def take(batch: RunningBatch, texts: dict[int, list[int]]) -> None:
    """Runs a step, and adds its tokens to the texts."""
    for new in batch.step():
        texts.setdefault(new.id, []).extend(new.token_ids)


def copy_layers(target: Any) -> None:
    for index, layer in enumerate(target.model.layers):
        target.model.layers[index] = copy.deepcopy(layer)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        *(("qwen3", change) for change in (*OF_CODE, replace_weights, copy_layers)),
        # A recurrent part that is another one ends its rows with a sentence: their states are the old one's.
        *(("qwen3.5", change) for change in (*OF_CODE, replace_weights)),
    ],
)
def test_a_row_that_joins_sees_the_target_as_it_is(family: str, change: Change) -> None:
    target = shallow_target(family)
    (first, *others) = asked([9, 20, 14], 5, num_new=(8, 8))
    # Longer than the others, which come two steps later.
    first.settings |= {"max_new_tokens": 14, "eos_token_id": None}
    batch = RunningBatch(target, tiny_draft(target))
    batch.add(first.ids, **first.settings)
    # It was looked at for the first time when it was added, and waits.
    waiting = batch.add(others[0].ids, **others[0].settings)
    batch.cancel(waiting)
    texts: dict[int, list[int]] = {}
    take(batch, texts)
    take(batch, texts)
    change(target)
    answer_alone(target, others)
    ids = [batch.add(one.ids, **one.settings) for one in others]
    while batch.ids:
        take(batch, texts)
    assert [texts[id] for id in ids] == [one.truth for one in others]


@pytest.mark.parametrize("change", [*OF_CODE, replace_weights, copy_layers])
def test_a_row_that_waited_sees_the_target_as_it_is(change: Change) -> None:
    target = shallow_target("qwen3")
    requests = asked([9, 20], 6, num_new=(8, 8))
    batch = RunningBatch(target, tiny_draft(target))
    for one in requests:
        batch.add(one.ids, **one.settings)
    change(target)
    answer_alone(target, requests)
    texts: dict[int, list[int]] = {}
    while batch.ids:
        take(batch, texts)
    assert [texts[id] for id in range(2)] == [one.truth for one in requests]


def test_rows_that_outlive_the_first_see_hooks_too() -> None:
    target = shallow_target("qwen3")
    first, second, third = asked([9, 20, 14], 7, num_new=(10, 10))
    batch = RunningBatch(target, tiny_draft(target))
    oldest = batch.add(first.ids, **first.settings)
    texts: dict[int, list[int]] = {}
    take(batch, texts)
    hook_activations(target)
    answer_alone(target, [second, third])
    batch.add(second.ids, **second.settings)
    take(batch, texts)
    batch.cancel(oldest)
    batch.add(third.ids, **third.settings)
    while batch.ids:
        take(batch, texts)
    assert [texts[1], texts[2]] == [second.truth, third.truth]


def test_layers_are_replaced_between_two_chunks() -> None:
    target = shallow_target("qwen3")
    (one,) = asked([60], 8, num_new=(20, 20))
    answer_alone(target, [one])
    batch = RunningBatch(target, tiny_draft(target), prefill_chunk_size=25)
    batch.add(one.ids, **one.settings)
    texts: dict[int, list[int]] = {}
    take(batch, texts)
    copy_layers(target)
    while batch.ids:
        take(batch, texts)
    assert texts == {0: one.truth}


# ---- within a run


def text_behind(target: Any, text: Tensor, change: Change, num: int) -> list[int]:
    """Changes a target whose cache has a text `[1, n]` but for the last token; returns what it then says."""
    cache = DynamicCache(config=target.config)
    found: list[int] = []
    with torch.no_grad():
        target(text[:, :-1], **{CACHE_NAME: cache})
        change(target)
        last = text[:, -1:]
        for _ in range(num):
            last = target(last, **{CACHE_NAME: cache}).logits[:, -1:].argmax(-1)
            found.append(int(last))
    return found


@pytest.mark.parametrize("change", OF_WEIGHTS + OF_CODE)
def test_a_pause_of_iterate_may_change_the_target(change: Change) -> None:
    target = shallow_target("qwen3")
    inputs = prompts([9], 0)
    text = inputs["input_ids"]
    wanted: list[int] = []
    settings: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None}
    for step in iterate(target, tiny_draft(target), **inputs, **settings):
        text = torch.cat([text, step.committed[0][None]], dim=1)
        if step.index == 2:
            num_before = text.shape[1]
            wanted = text_behind(target, text, change, 23 - num_before)
    assert text[0, -len(wanted) :].tolist() == wanted


@pytest.mark.parametrize("change", [*OF_CODE, replace_weights])
def test_a_criterion_may_change_the_target(change: Change) -> None:
    inputs = prompts([9], 0)
    settings: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None}
    texts: list[Tensor] = []
    for is_drafted in (False, True):
        target: Any = shallow_target("qwen3")
        if is_drafted:
            draft = tiny_draft(target)
            # So that the criterion is called behind the same forwards.
            draft.generation_config.verify_width = 1
            settings["assistant_model"] = draft
        changes = Changes(target, change)
        given = {"stopping_criteria": StoppingCriteriaList([changes])}
        texts.append(target.generate(**inputs, **settings, **given))
        assert changes.is_done
    assert torch.equal(*texts)


class Changes(StoppingCriteria):
    """Changes a target behind 14 tokens."""

    def __init__(self, target: Any, change: Change) -> None:
        self.target = target
        self.change = change
        self.is_done = False

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        if input_ids.shape[1] == 14 and not self.is_done:
            self.is_done = True
            self.change(self.target)
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("what", ["weights", "weights uncounted", "hook", "window"])
def test_no_context_of_another_draft_is_gone_on_from(what: str) -> None:
    target = shallow_target("qwen3")
    (one,) = asked([40], 5, num_new=(20, 20))
    answer_alone(target, [one])
    draft: Any = tiny_draft(target, layer_types=["full_attention"] * 2)
    batch = RunningBatch(target, draft, max_kept_bytes=2**30)
    assert answered(batch, one) == (one.truth, 0)
    assert answered(batch, one) == (one.truth, 39)
    if what == "weights":
        with torch.no_grad():
            draft.fc.weight.mul_(2)
    elif what == "weights uncounted":
        draft.fc.weight.data *= 2
    elif what == "hook":
        draft.fc.register_forward_hook(lambda module, given, out: -out)
    else:
        draft.generation_config.draft_window = 12
    assert answered(batch, one) == (one.truth, 0)
