"""Prompts on the CPU for a target on a pretended H200: all that its prefill gets is on the target's device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessorList, Qwen3Config

from dflash_hf import DFlashDraftModel, RunningBatch
from dflash_hf.generation import generate
from dflash_hf.generation.accept import BlockRule
from dflash_hf.generation.generate import answer_with
from dflash_hf.generation.iterate import CustomBlockRule
from dflash_hf.generation.request import Request
from dflash_hf.generation.sampling import BlockProcessors
from dflash_hf.generation.state import BufferShape, DecodeState
from helpers.pretended_gpu import Answers, build_draft, build_target
from tiny import draft_config

PROMPT = 8


class PrefillReachedError(Exception):
    """Ends a call behind its prefill."""


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The devices of the tensors that the prefill has got, by name; a call ends behind it."""
    found: dict[str, str] = {}
    prefill: Any = GenerationMixin._prefill

    def stop(self: Any, input_ids: Tensor, config: Any, inputs: dict[str, Any], *rest: Any) -> None:
        given = {"input_ids": input_ids, **inputs}
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        found.update({name: value.device.type for name, value in tensors.items()})
        # Operations over two devices fail here as on a GPU.
        prefill(self, input_ids, config, inputs, *rest)
        raise PrefillReachedError

    monkeypatch.setattr(GenerationMixin, "_prefill", stop)
    return found


def pair() -> tuple[Any, DFlashDraftModel]:
    """A target of two layers and its draft, on the pretended device."""
    target = build_target(Qwen3Config(num_hidden_layers=2))
    draft = build_draft(draft_config(target))
    draft.generation_config.engine = "eager"
    return target, draft


def are_on_target(places: dict[str, str], names: Iterable[str]) -> bool:
    """Returns True if the prefill got these tensors, and all of its tensors on the target's device."""
    return set(names) <= set(places) and set(places.values()) == {"cuda"}


@torch.no_grad()
def test_a_row_of_a_running_batch(places: dict[str, str]) -> None:
    target, draft = pair()
    batch = RunningBatch(target, draft)
    with Answers(PROMPT - 1):
        batch.add(list(range(PROMPT)), max_new_tokens=4)
        with pytest.raises(PrefillReachedError):
            batch.step()
    assert are_on_target(places, ["input_ids", "position_ids"])


@torch.no_grad()
def test_a_call_with_all_tensors_on_the_cpu(places: dict[str, str]) -> None:
    target, draft = pair()
    ids = torch.zeros(2, PROMPT, dtype=torch.long)
    positions = torch.arange(PROMPT).expand_as(ids)
    with Answers(PROMPT - 1), pytest.raises(PrefillReachedError):
        target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            position_ids=positions,
            max_new_tokens=4,
            assistant_model=draft,
        )
    assert are_on_target(places, ["input_ids", "position_ids"])


@torch.no_grad()
def test_positions_of_images_are_computed_on_the_targets_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model keeps what it computes beside them, for the next turn."""
    target, draft = pair()
    ids = torch.zeros(1, PROMPT, dtype=torch.long)
    found: dict[str, str] = {}

    def noted(target: Any, arguments: dict[str, Any]) -> None:
        tensors = {name: one for name, one in arguments.items() if isinstance(one, Tensor)}
        found.update({name: one.device.type for name, one in tensors.items()})
        # The target has no images: its `generate` would refuse them.
        del arguments["image_grid_thw"]

    def prepared(request: Request, inputs: dict[str, Any]) -> None:
        assert request.given_on == ids.device

    monkeypatch.setattr(generate, "keep_new_images", noted)
    arguments: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
        "max_new_tokens": 4,
    }
    with Answers(PROMPT - 1):
        answer_with(prepared, target.generate, target, draft, arguments)
    assert found == dict.fromkeys(("input_ids", "attention_mask", "image_grid_thw"), "cuda")


@torch.no_grad()
def test_a_rule_of_the_callers_may_count_on_the_cpu() -> None:
    target, draft = pair()
    on: dict[str, Any] = {"dtype": torch.long, "device": target.device}
    shape = BufferShape.of(
        draft,
        block_size=4,
        width=4,
        is_tree=False,
        position_delta=torch.zeros(2, **on),
        eos_ids=torch.zeros(1, **on),
    )
    state = DecodeState.allocate(shape, PROMPT)
    state.width = 4
    own = BlockRule(BlockProcessors(LogitsProcessorList()), [], is_recorded=False)
    rule = CustomBlockRule(own, lambda *_: torch.zeros(2, dtype=torch.int32))
    logits = torch.zeros(2, 4, 10, device=target.device)
    _, num_accepted = rule.choose(state, logits)
    assert num_accepted is not None
    assert num_accepted.device.type == "cuda"
    assert num_accepted.dtype == torch.long


@torch.no_grad()
def test_processors_are_made_on_the_targets_device(places: dict[str, str]) -> None:
    target, draft = pair()
    ids = torch.zeros(1, PROMPT, dtype=torch.long)
    made: list[Any] = []

    def prepared(request: Request, inputs: dict[str, Any]) -> None:
        made.extend(request.processors.processors)
        assert request.given_on == ids.device

    limits = {"min_new_tokens": 2, "max_new_tokens": 4, "eos_token_id": 1}
    arguments = {"input_ids": ids, "do_sample": False, **limits}
    with Answers(PROMPT - 1):
        answer_with(prepared, target.generate, target, draft, arguments)
    assert {one.eos_token_id.device.type for one in made} == {"cuda"}
