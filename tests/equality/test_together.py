"""Parts of the step that were built apart, together: changing widths, kernels, compiled and recurrent layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_hf import ops
from helpers.static import engine_of, set_engine, tensor_oracle, use_tapes
from helpers.widths import use_random_widths
from tiny import prompts, shallow_target, truth_of

pytestmark = pytest.mark.same_on_every_release

NEW = 13
SLOW = pytest.mark.slow
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


def pair(family: str, engine: Any, seed: int) -> tuple[Any, Any, dict[str, Tensor], Tensor]:
    """A tiny target, a partly right draft of changing widths, ragged prompts and plain `generate`'s text."""
    target: Any = shallow_target(family)
    if family == "qwen3-next" and engine == "cuda_graph":  # eager experts count tokens on the host
        target = target.float()
        target.set_experts_implementation("batched_mm")
    inputs = prompts([4, 11, 7], seed)
    ref = target.generate(**inputs, **GREEDY)
    draft = tensor_oracle(target, truth_of(inputs, ref), seed, 8)
    set_engine(draft, engine)
    draft.generation_config.verify_width = "auto"
    return target, draft, inputs, ref


def check(target: Any, draft: Any, inputs: dict[str, Tensor], ref: Tensor) -> None:
    """The text, twice: the second time over kept buffers."""
    engine = engine_of(draft)
    for _ in range(2):
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
        stats = draft.last_stats
        assert stats.engine == engine
        assert len(set(stats.verify_widths)) > 1
        assert 1.0 < stats.acceptance_length < 8.0


FAMILIES = [
    "qwen3-sliding",
    "qwen3.5",
    "bamba",
    *(pytest.param(name, marks=SLOW) for name in ("qwen3-next", "lfm2")),
]


@pytest.mark.parametrize("engine", ["eager", "static", "cuda_graph"])
@pytest.mark.parametrize("family", FAMILIES)
def test_widths_change_under_kernels_and_recurrent_layers(
    family: str, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Triton's interpreter the kernels' references run: what is tested is how they are called."""
    use_tapes(monkeypatch, 32)
    use_random_widths(monkeypatch, seed=3)
    run = pair(family, engine, 3)
    with ops.kernels(True):
        check(*run)
