"""What the draft sees during decoding is what it would see in one forward over everything committed so far.

Token equality cannot show a tap on the wrong layer, a shifted position or a lost row of context: the target corrects
the text, and only acceptance suffers. These tests compare the draft's states themselves.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.target_model.hidden_states import Taps
from dflash_hf.target_model.parts import find_target
from tiny import OracleDraft, oracle_draft, prompts, tiny_target, truth_of

pytestmark = pytest.mark.same_on_every_release


class Recording(OracleDraft):
    """Keeps every block it runs."""

    def forward_block(
        self, noise_embeds: Tensor, cache: RaggedCache, context: Any = None
    ) -> Tensor:
        hidden = super().forward_block(noise_embeds, cache, context)
        assert cache.block is not None
        rows = self.rows_of(len(hidden))
        self.blocks.append(
            (rows, cache.block.lengths.clone(), noise_embeds.clone(), hidden.clone())
        )
        return hidden


@cache
def plain(family: str) -> tuple[PreTrainedModel, dict[str, Tensor], Tensor]:
    """A target, prompts, and what plain `generate` makes of them."""
    target = tiny_target(family)
    inputs = prompts([4, 17, 9], 6)
    return target, inputs, target.generate(**inputs, max_new_tokens=20, do_sample=False)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3-sliding", "llama"])
@pytest.mark.parametrize(("block_size", "width"), [(8, 8), (8, 3), (16, 16)])
def test_every_block_equals_one_forward_over_the_committed_text(
    family: str, block_size: int, width: int
) -> None:
    target, inputs, ref = plain(family)
    truth = truth_of(inputs, ref)
    draft = oracle_draft(target, truth, 3, block_size)
    draft.__class__ = Recording
    draft.blocks = []
    draft.generation_config.verify_width = width
    out = target.generate(**inputs, max_new_tokens=20, do_sample=False, assistant_model=draft)
    assert torch.equal(out, ref)
    assert draft.last_stats.acceptance_length > 1.3
    with torch.no_grad():
        features = [
            torch.cat(
                [
                    target(torch.tensor([row]), output_hidden_states=True).hidden_states[i]
                    for i in (1, 3)
                ],
                -1,
            )
            for row in truth
        ]
        for rows, lengths, noise, hidden in draft.blocks:
            for place, (row, length) in enumerate(zip(rows, lengths.tolist(), strict=True)):
                once = draft(noise[place : place + 1], features[row][:, :length]).last_hidden_state[
                    0
                ]
                assert (once - hidden[place]).abs().max() < 1e-9 * once.abs().max()


def test_a_tap_records_the_output_of_its_layer() -> None:
    target = tiny_target("qwen3")
    ids = prompts([7, 7], 0)["input_ids"]
    states = target(ids, output_hidden_states=True).hidden_states
    layers = find_target(target).layers
    # Recording hidden states leaves hooks of its own
    hooks = [len(layer._forward_hooks) for layer in layers]
    with Taps(layers, [2, 0]).open() as taps:
        target(ids)
        taken = taps.take()
        with pytest.raises(RuntimeError, match="got none from"):
            taps.take()
    assert torch.equal(taken, torch.cat([states[3], states[1]], dim=-1))
    assert hooks == [len(layer._forward_hooks) for layer in layers]
