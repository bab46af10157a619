"""A draft under `draft_window` is a draft with that window in its config, and the text stays plain `generate`'s."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.cache.ragged import RaggedCache
from helpers.static import tensor_oracle, use_tapes
from tiny import OracleDraft, oracle_draft, prompts, shallow_target, truth_of

pytestmark = pytest.mark.same_on_every_release

NEW = 30
WINDOW = 6
LENGTHS = [4, 17, 9]
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
FULL: dict[str, Any] = {"layer_types": ["full_attention"] * 2, "is_causal": False}
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention"] * 2, "is_causal": False}
# A draft's config, and that of the draft which it is under a window of 6.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": (FULL, {**SLIDING, "sliding_window": WINDOW, "window_from_anchor": True}),
    "full, causal": (
        {**FULL, "is_causal": True},
        {**SLIDING, "sliding_window": WINDOW, "window_from_anchor": True, "is_causal": True},
    ),
    "a wider window": (
        {**SLIDING, "sliding_window": 11},
        {**SLIDING, "sliding_window": WINDOW},
    ),
    "a wider window from the anchor": (
        {**SLIDING, "sliding_window": 11, "window_from_anchor": True},
        {**SLIDING, "sliding_window": WINDOW, "window_from_anchor": True},
    ),
    "a narrower window": ({**SLIDING, "sliding_window": 3}, {**SLIDING, "sliding_window": 3}),
}


class Recording(OracleDraft):
    """Keeps the states of every block that it runs."""

    def forward_block(
        self, noise_embeds: Tensor, cache: RaggedCache, context: Any = None
    ) -> Tensor:
        hidden = super().forward_block(noise_embeds, cache, context)
        self.blocks.append(hidden.clone())
        return hidden


def recording(target: Any, truth: list[list[int]], config: dict[str, Any]) -> Any:
    """Returns an oracle that records, with the same weights and luck under every config."""
    draft: Any = oracle_draft(target, truth, 3, 8, **config)
    draft.__class__ = Recording
    draft.blocks = []
    draft.generation_config.verify_width = 8  # at every step: the clock has no say
    return draft


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_is_that_of_a_config(kind: str) -> None:
    target: Any = shallow_target("qwen3")
    inputs = prompts(LENGTHS, 6)
    ref = target.generate(**inputs, **GREEDY)
    config, config_of_window = KINDS[kind]
    draft = recording(target, truth_of(inputs, ref), config)
    wanted = recording(target, truth_of(inputs, ref), config_of_window)
    assert torch.equal(draft.fc.weight, wanted.fc.weight)
    draft.generation_config.draft_window = WINDOW
    for one in (draft, wanted):
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=one), ref)
    assert len(draft.blocks) == len(wanted.blocks) > 5
    for block, block_of_config in zip(draft.blocks, wanted.blocks, strict=True):
        torch.testing.assert_close(block, block_of_config, rtol=1e-12, atol=1e-12)


def test_a_window_changes_what_the_draft_sees() -> None:
    # Otherwise the test above would compare drafts that see all of it.
    target: Any = shallow_target("qwen3")
    inputs = prompts(LENGTHS, 6)
    ref = target.generate(**inputs, **GREEDY)
    blocks = []
    for window in (None, WINDOW):
        draft = recording(target, truth_of(inputs, ref), FULL)
        draft.generation_config.draft_window = window
        target.generate(**inputs, **GREEDY, assistant_model=draft)
        blocks.append(draft.blocks[-1])
    assert not torch.allclose(blocks[0], blocks[1])


@pytest.mark.parametrize("nodes", [0, 8], ids=["chain", "tree"])
def test_captured_steps_give_the_plain_text(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tapes(monkeypatch)
    target: Any = shallow_target("qwen3-sliding")
    inputs = prompts(LENGTHS, 6)
    ref = target.generate(**inputs, **GREEDY)
    draft = tensor_oracle(target, truth_of(inputs, ref), 3, 8, **FULL)
    draft.generation_config.num_tree_nodes = nodes
    # The buffers of one call do not fit the next.
    for window in (None, WINDOW, 9, None):
        draft.generation_config.draft_window = window
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
        assert draft.last_stats.engine == "cuda_graph"


@pytest.mark.parametrize("windows", [(WINDOW, None), (None, WINDOW), (WINDOW, 11), (11, WINDOW)])
def test_a_kept_cache_serves_another_window(windows: tuple[int | None, int | None]) -> None:
    target: Any = shallow_target("qwen3")
    inputs = prompts([17], 6)
    first = target.generate(**inputs, **GREEDY)
    more = torch.cat([first, prompts([5], 7)["input_ids"]], dim=1)
    ref = target.generate(more, attention_mask=torch.ones_like(more), **GREEDY)
    truth = [ref[0].tolist()]
    cache = DynamicCache(config=target.config)
    draft: Any = recording(target, truth, FULL)
    for ids, window in zip((inputs["input_ids"], more), windows, strict=True):
        draft.generation_config.draft_window = window
        draft.blocks = []
        out = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **GREEDY,
            **{CACHE_NAME: cache},
            assistant_model=draft,
        )
    assert torch.equal(out, ref)
    if windows == (None, WINDOW):
        # All context that the window shows was kept: the draft sees what it would see without a cache.
        alone: Any = recording(target, truth, FULL)
        alone.random.set_state(draft.random.get_state())
        alone.generation_config.draft_window = WINDOW
        target.generate(more, attention_mask=torch.ones_like(more), **GREEDY, assistant_model=alone)
        torch.testing.assert_close(draft.blocks[0], alone.blocks[0], rtol=1e-9, atol=1e-9)
