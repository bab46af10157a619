"""Code of the user's may use autograd in a run, and keep what it gets for autograd, as under plain `generate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from dflash_hf import RunningBatch, generate_batch, iterate
from dflash_hf.generation import decode
from helpers.running import answer_alone, asked
from tiny import VOCAB, prompts, shallow_target, tiny_draft

GREEDY: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False}


class Uphill(LogitsProcessor):
    """Moves scores along a gradient."""

    is_row_wise = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        with torch.enable_grad():
            own = scores.detach().clone().requires_grad_()
            own.softmax(-1)[..., ::2].sum().backward()
        assert own.grad is not None
        return scores + 5 * own.grad


class Kept(list[tuple[Tensor, Tensor]]):
    """Tensors that a call handed out, each with a copy of what it was then."""

    def add(self, value: Tensor) -> None:
        self.append((value, value.clone()))


class KeepsScores(LogitsProcessor):
    is_row_wise = True

    def __init__(self) -> None:
        self.kept = Kept()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.kept.add(scores)
        return scores


class KeepsIds(StoppingCriteria):
    def __init__(self) -> None:
        self.kept = Kept()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.kept.add(input_ids)
        return torch.zeros(len(input_ids), dtype=torch.bool)


class KeepsTokens(BaseStreamer):
    def __init__(self) -> None:
        self.kept = Kept()

    def put(self, value: Tensor) -> None:
        self.kept.add(value)

    def end(self) -> None: ...


def hooked(target: Any) -> Kept:
    """Returns a list that gets what the second layer returns."""
    kept = Kept()

    def keep(module: Any, given: Any, out: Any) -> None:
        kept.add(out if isinstance(out, Tensor) else out[0])

    target.model.layers[1].register_forward_hook(keep)
    return kept


def learn(kept: Kept) -> None:
    """Trains something on each tensor, which the rest of the call has left as it was."""
    assert len(kept) > 1
    for one, then in kept:
        assert torch.equal(one, then)
        if one.is_floating_point():
            probe: nn.Module = nn.Linear(one.shape[-1], 2, dtype=one.dtype)
        else:
            probe = nn.Embedding(VOCAB, 4)
        probe(one).sum().backward()


def steer(target: Any) -> None:
    """Moves the states behind the second layer along a gradient."""

    def move(module: Any, given: Any, out: Any) -> Any:
        states = out if isinstance(out, Tensor) else out[0]
        with torch.enable_grad():
            own = states.detach().clone().requires_grad_()
            (own**2).sum().backward()
        assert own.grad is not None
        moved = states - 0.1 * own.grad
        return moved if isinstance(out, Tensor) else (moved, *out[1:])

    target.model.layers[1].register_forward_hook(move)


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_what_is_kept_can_be_learnt_from(family: str) -> None:
    target: Any = shallow_target(family)
    draft = tiny_draft(target)
    scores = KeepsScores()
    ids = KeepsIds()
    tokens = KeepsTokens()
    calls: list[tuple[Kept, dict[str, Any]]] = [
        (scores.kept, {"logits_processor": [scores]}),
        (ids.kept, {"stopping_criteria": StoppingCriteriaList([ids])}),
        (tokens.kept, {"streamer": tokens}),
        (hooked(target), {}),
    ]
    for kept, given in calls:
        kept.clear()
        text = target.generate(**prompts([9], 0), **GREEDY, **given, assistant_model=draft)
        learn(kept)
    # Each call gives the same text: they are greedy.
    streamed = torch.cat([one.flatten() for one, _ in tokens.kept])
    assert torch.equal(streamed, text[0])


def test_states_of_a_cache_that_is_advanced_can_be_learnt_from() -> None:
    target: Any = shallow_target("qwen3")
    kept = hooked(target)
    settings: dict[str, Any] = {**GREEDY, "return_dict_in_generate": True}
    target.generate(**prompts([4, 9], 0), **settings, assistant_model=tiny_draft(target))
    learn(kept)


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_gradients_within_a_call(family: str) -> None:
    target: Any = shallow_target(family)
    given: dict[str, Any] = {**prompts([9], 0), **GREEDY, "logits_processor": [Uphill()]}
    text = target.generate(**given)
    assert torch.equal(target.generate(**given, assistant_model=tiny_draft(target)), text)
    steer(target)
    del given["logits_processor"]
    steered = target.generate(**given)
    assert not torch.equal(steered, text)
    assert torch.equal(target.generate(**given, assistant_model=tiny_draft(target)), steered)


def test_a_rule_of_iterate_may_keep_what_it_gets() -> None:
    target: Any = shallow_target("qwen3")
    kept = Kept()

    def propose(logits: Tensor, anchor: Tensor) -> Tensor:
        kept.add(logits)
        return logits.argmax(-1)

    def accept(proposals: Tensor, tokens: Tensor, logits: Tensor) -> Tensor:
        kept.add(logits)
        return torch.zeros(len(tokens), dtype=torch.long)

    for rule in ({"propose": propose}, {"accept": accept}):
        kept.clear()
        list(iterate(target, tiny_draft(target), **rule, **prompts([9], 0), **GREEDY))
        learn(kept)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-sliding", "qwen3.5", "lfm2"])
def test_rows_with_gradients_come_and_leave(family: str) -> None:
    target = shallow_target(family)
    requests = asked([9, 40, 12, 20, 15], 1, num_new=(4, 20))
    for one in requests[1::2]:
        one.settings["logits_processor"] = [Uphill()]
    answer_alone(target, requests)
    batch = RunningBatch(target, tiny_draft(target), max_rows=3, prefill_chunk_size=15)
    texts: list[list[int]] = [[] for _ in requests]
    waiting = list(requests)
    while waiting or batch.ids:
        if waiting:
            one = waiting.pop(0)
            batch.add(one.ids, **one.settings)
        for _ in range(3):
            for new in batch.step():
                texts[new.id] += new.token_ids
    assert texts == [one.truth for one in requests]


@pytest.mark.parametrize("family", ["qwen3.5", "lfm2", "bamba"])
def test_a_prefill_goes_on_beside_gradients(family: str) -> None:
    target = shallow_target(family)
    long, short = asked([40, 5], 3, num_new=(4, 4))
    short.settings["logits_processor"] = [Uphill()]
    answer_alone(target, [long, short])
    batch = RunningBatch(target, tiny_draft(target), prefill_chunk_size=15)
    texts: list[list[int]] = [[], []]
    for one in (long, short):
        batch.add(one.ids, **one.settings)
        # The first chunk of the long prompt is in inference mode.
        for new in batch.step():
            texts[new.id] += new.token_ids
    while batch.ids:
        for new in batch.step():
            texts[new.id] += new.token_ids
    assert texts == [long.truth, short.truth]


@pytest.mark.usefixtures("whole_trees")
@pytest.mark.parametrize(("family", "nodes"), [("qwen3", 0), ("qwen3", 6), ("qwen3.5", 0)])
def test_a_row_that_waits_for_its_turn_may_use_gradients(family: str, nodes: int) -> None:
    """The rows before it have joined in inference mode, and go on outside it."""
    target = shallow_target(family)
    requests = asked([9, 20, 12], 3, num_new=(10, 10))
    for one in requests:
        one.settings["eos_token_id"] = None
    answer_alone(target, requests)
    prompts_of: list[Any] = [one.ids for one in requests]
    prompts_of[-1] = {"input_ids": prompts_of[-1], "logits_processor": [KeepsScores()]}
    draft = tiny_draft(target)
    draft.generation_config.num_tree_nodes = nodes
    settings: dict[str, Any] = {**requests[0].settings, "max_rows": 2}
    answers = list(generate_batch(target, draft, iter(prompts_of), **settings))
    texts = {answer.index: answer.token_ids for answer in answers}
    assert texts == {index: one.truth for index, one in enumerate(requests)}


def test_a_hook_set_between_steps_may_use_gradients() -> None:
    target = shallow_target("qwen3.5")
    first, second = asked([9, 20], 2, num_new=(10, 10))
    first.settings["eos_token_id"] = None
    batch = RunningBatch(target, tiny_draft(target))
    batch.add(first.ids, **first.settings)
    batch.step()
    steer(target)
    answer_alone(target, [second])
    id = batch.add(second.ids, **second.settings)
    text: list[int] = []
    while batch.ids:
        for new in batch.step():
            if new.id == id:
                text += new.token_ids
    assert text == second.truth


@pytest.fixture
def modes_of_steps(monkeypatch: pytest.MonkeyPatch) -> set[bool]:
    """Gets whether inference mode was on, of each step."""
    seen: set[bool] = set()
    step: Callable[..., Any] = decode.step

    def noted(run: Any) -> Any:
        seen.add(torch.is_inference_mode_enabled())
        return step(run)

    monkeypatch.setattr(decode, "step", noted)
    return seen


@pytest.mark.parametrize(
    ("given", "is_inference"),
    [({}, True), ({"repetition_penalty": 1.2}, True), ({"logits_processor": [Uphill()]}, False)],
    ids=["none", "transformers'", "own"],
)
def test_inference_mode_is_left_to_code_of_libraries(
    given: dict[str, Any], is_inference: bool, modes_of_steps: set[bool]
) -> None:
    target: Any = shallow_target("qwen3")
    target.generate(**prompts([9], 0), **GREEDY, **given, assistant_model=tiny_draft(target))
    assert modes_of_steps == {is_inference}


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_inference_mode_behind_a_call_that_recorded(family: str, modes_of_steps: set[bool]) -> None:
    target: Any = shallow_target(family)
    # Transformers leaves its recording hooks on the layers, which then have a fast form of this package too.
    target(**prompts([9], 0), output_hidden_states=True)
    assert target.model.layers[0]._forward_hooks
    target.generate(**prompts([9], 0), **GREEDY, assistant_model=tiny_draft(target))
    assert modes_of_steps == {True}
