"""A row of a running batch whose own code raises ends with its error; the others have the text that each has alone."""

from __future__ import annotations

import traceback
from functools import cache
from typing import Any

import pytest
from torch import Tensor
from transformers import LogitsProcessor

from dflash_hf import RunningBatch, generate_batch
from dflash_hf.cache.size import OutOfRoomError
from dflash_hf.errors import one_line
from dflash_hf.generation import running_batch
from helpers.running import Asked, BatchOracle, answer_alone, asked, batch_oracle
from tiny import shallow_target, tiny_draft

pytestmark = pytest.mark.same_on_every_release

LONG: dict[str, Any] = {"max_position_embeddings": 2048}
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 12}
PENALISED: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.3}


class Fails(LogitsProcessor):
    """Raises, or returns what is no row of scores, behind so many tokens."""

    is_row_wise = True

    def __init__(self, num_tokens: int, how: str = "raises", shapes: bool = False) -> None:
        self.num_tokens = num_tokens
        self.how = how
        self.shapes_proposals = shapes

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        if input_ids.shape[1] < self.num_tokens:
            return scores
        if self.how == "no row":
            return scores[:, :5]
        if self.how == "one column":
            return scores[:, :1]
        if self.how == "nothing":
            return None
        if self.how == "all hidden":
            return scores - float("inf")
        raise KeyError("what it looked for")


@cache
def answered_alone(family: str) -> tuple[Any, list[Asked]]:
    """Returns a target and three requests with the answers that each has alone."""
    target = shallow_target(family, **LONG)
    requests = asked([9, 40, 30], 31, num_new=(24, 24), kinds=(GREEDY, SAMPLED, PENALISED))
    for one in requests:
        one.settings["eos_token_id"] = None
    answer_alone(target, requests, tiny_draft(target))
    return target, requests


def begun(family: str, nodes: int = 0) -> tuple[RunningBatch, list[Asked]]:
    """Returns a batch of three requests that run, and the requests."""
    target, requests = answered_alone(family)
    draft = batch_oracle(target)
    draft.generation_config.num_tree_nodes = nodes
    return RunningBatch(target, draft), requests


def texts_beside(batch: RunningBatch, requests: list[Asked], bad: dict[str, Any]) -> list[Any]:
    """Runs the requests beside one that fails; returns their texts, then its text, its end and its statistics."""
    draft = batch.draft
    assert isinstance(draft, BatchOracle)
    draft.batch = batch
    # The one that fails is second: the others come to stand in other places.
    prompt = [5] * 20
    known = [[*one.ids[0].tolist(), *one.truth] for one in requests]
    draft.arm([known[0], prompt, *known[1:]], 0)
    texts: list[list[int]] = [[] for _ in known] + [[]]
    ends: list[Any] = []
    batch.add(requests[0].ids, seed=requests[0].seed, **requests[0].settings)
    settings: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": None, **bad}
    batch.add(prompt, **settings)
    for one in requests[1:]:
        batch.add(one.ids, seed=one.seed, **one.settings)
    while batch.ids:
        for id, new, finished in batch.step():
            texts[id] += new
            if id == 1 and finished is not None:
                ends = [finished, batch.ended[1]]
    own = texts.pop(1)
    return [*texts, own, *ends]


@pytest.mark.parametrize(
    ("family", "how", "do_sample"),
    [
        ("qwen3-sliding", "raises", False),
        ("qwen3-sliding", "no row", True),
        ("qwen3", "one column", True),
        ("qwen3", "nothing", False),
        ("qwen3", "all hidden", True),
        ("qwen3.5", "raises", True),
    ],
)
def test_a_processor_that_fails_ends_its_row_alone(family: str, how: str, do_sample: bool) -> None:
    batch, requests = begun(family)
    bad = {"do_sample": do_sample, "logits_processor": [Fails(30, how)]}
    *others, text, finished, stats = texts_beside(batch, requests, bad)
    assert others == [one.truth for one in requests]
    assert finished == "error"
    # What was there before the step that fails.
    assert 0 < len(text) < 11
    assert stats.num_new_tokens == len(text)
    sentence = "expected scores of shape (1, 64) of a row's logits processors, got {}; return"
    errors = {
        "raises": (KeyError, "KeyError: 'what it looked for'"),
        "no row": (ValueError, sentence.format("torch.Size([1, 5])")),
        "one column": (ValueError, sentence.format("torch.Size([1, 1])")),
        "nothing": (ValueError, sentence.format("'NoneType'")),
        "all hidden": (ValueError, "expected scores that a token can be drawn from, got -inf"),
    }
    kind, begins = errors[how]
    assert type(stats.exception) is kind
    assert stats.error.startswith(begins)
    assert one_line(stats.exception) in stats.error


@pytest.mark.usefixtures("whole_trees")
def test_a_row_that_fails_beside_trees() -> None:
    batch, requests = begun("qwen3", nodes=12)
    bad = {"logits_processor": [Fails(30)], **GREEDY}
    *others, _, finished, stats = texts_beside(batch, requests, bad)
    assert others == [one.truth for one in requests]
    assert (finished, stats.error) == ("error", "KeyError: 'what it looked for'")


def test_a_row_that_fails_at_its_first_token() -> None:
    batch, requests = begun("qwen3")
    bad = {"logits_processor": [Fails(0)], **GREEDY}
    *others, text, finished, stats = texts_beside(batch, requests, bad)
    assert others == [one.truth for one in requests]
    assert (text, finished) == ([], "error")
    assert isinstance(stats.exception, KeyError)


def test_a_row_whose_proposals_cannot_be_shaped() -> None:
    batch, requests = begun("qwen3")
    # A step shapes its proposals before it chooses tokens.
    bad = {"logits_processor": [Fails(21, shapes=True)], **GREEDY}
    *others, text, finished, stats = texts_beside(batch, requests, bad)
    assert others == [one.truth for one in requests]
    assert (len(text), finished) == (1, "error")
    called = [frame.name for frame in traceback.extract_tb(stats.exception.__traceback__)]
    assert "shape" in called


def test_a_prefix_function_that_fails_ends_its_row() -> None:
    batch, requests = begun("qwen3")

    def allowed(row: int, prefix: Tensor) -> list[int]:
        # Transformers refuses an empty list.
        return [] if len(prefix) > 26 else list(range(40))

    bad = {"prefix_allowed_tokens_fn": allowed, **GREEDY}
    *others, _, finished, stats = texts_beside(batch, requests, bad)
    assert others == [one.truth for one in requests]
    assert finished == "error"
    assert "prefix_allowed_tokens_fn" in stats.error


def test_every_row_may_fail_and_the_next_one_runs() -> None:
    target = shallow_target("qwen3", **LONG)
    requests = asked([9], 32, num_new=(8, 8))
    answer_alone(target, requests)
    batch = RunningBatch(target, tiny_draft(target))
    for _ in range(2):
        batch.add([5] * 20, max_new_tokens=60, logits_processor=[Fails(24)], **GREEDY)
    text: list[int] = []
    ends: list[Any] = []
    while batch.ids:
        ends += [new.finished for new in batch.step() if new.finished]
    batch.add(requests[0].ids, **requests[0].settings)
    while batch.ids:
        for new in batch.step():
            text += new.token_ids
    assert ends == ["error", "error"]
    assert text == requests[0].truth


def test_an_interrupt_in_a_processor_ends_all_rows() -> None:
    target = shallow_target("qwen3", **LONG)
    batch = RunningBatch(target, tiny_draft(target))

    class Interrupts(Fails):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
            if input_ids.shape[1] > 24:
                raise KeyboardInterrupt
            return scores

    batch.add([5], max_new_tokens=60, eos_token_id=None, **GREEDY)
    batch.add([5] * 20, max_new_tokens=60, logits_processor=[Interrupts(0)], **GREEDY)

    def run() -> None:
        while batch.ids:
            batch.step()

    with pytest.raises(KeyboardInterrupt):
        run()
    assert batch.ids == []


def test_an_answer_of_many_says_what_its_processor_raised() -> None:
    target = shallow_target("qwen3", **LONG)
    requests = asked([9, 40, 30], 33, num_new=(12, 12))
    answer_alone(target, requests)
    inputs: list[Any] = [{"input_ids": one.ids} for one in requests]
    inputs.insert(1, {"input_ids": [5] * 20, "logits_processor": [Fails(24)]})
    settings = {name: requests[0].settings[name] for name in ("max_new_tokens", "eos_token_id")}
    answers = list(generate_batch(target, tiny_draft(target), inputs, **settings, **GREEDY))
    by_index = {answer.index: answer for answer in answers}
    assert by_index[1].finished == "error"
    assert isinstance(by_index[1].stats.exception, KeyError)
    texts = [by_index[index].token_ids for index in (0, 2, 3)]
    assert texts == [one.truth for one in requests]


def test_a_row_too_long_for_the_memory_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, requests = begun("qwen3")
    room = running_batch.make_room

    def full(run: Any) -> None:
        if run.longest > 70:
            raise OutOfRoomError("expected room, got none")
        room(run)

    monkeypatch.setattr(running_batch, "make_room", full)
    *others, text, finished, stats = texts_beside(batch, requests[:2], {"max_new_tokens": 60})
    assert others == [one.truth for one in requests[:2]]
    assert len(text) > 40
    assert (finished, stats.error) == ("error", "expected room, got none")
