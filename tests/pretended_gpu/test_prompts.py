"""Prompts on the CPU for a target on a pretended H200: all that its prefill gets is on the target's device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel, Qwen3Config

from dflash_hf import DFlashDraftModel, RunningBatch
from helpers.pretended_gpu import Answers, build_draft, build_target
from tiny import draft_config

PROMPT = 8


class PrefillReachedError(Exception):
    """Ends a call at its prefill."""


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The devices of the tensors that the prefill has got, by name; a call ends there."""
    found: dict[str, str] = {}

    def stop(self: Any, input_ids: Tensor, config: Any, inputs: dict[str, Any], *rest: Any) -> None:
        given = {"input_ids": input_ids, **inputs}
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        found.update({name: value.device.type for name, value in tensors.items()})
        raise PrefillReachedError

    monkeypatch.setattr(GenerationMixin, "_prefill", stop)
    return found


def pair() -> tuple[PreTrainedModel, DFlashDraftModel]:
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
