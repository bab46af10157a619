"""The draft in Transformers' own DFlash decoding: `generate(..., speculation_type="dflash")`, batch 1, float64.

With an oracle that is right for a random part of each block, so that blocks are kept, cut and thrown away, and that
checks on every call that the real forward, over the cropped cache, computes what one forward over everything would.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from dflash_hf import DFlashDraftModel
from dflash_hf.block.cache_name import CACHE_NAME
from tiny import DFLASH2, draft_config, prompts, randomise_heads, tiny_target

BLOCK = 6
NEW = 40


class StockOracle(DFlashDraftModel):
    """Returns states that the target's head maps to the true continuation up to a random slot of each block."""

    def arm(self, truth: Tensor, head: Tensor, seed: int) -> StockOracle:
        """Sets the true tokens `[S]` and the head's weight `[V, D]`."""
        self.truth = truth
        self.head = head
        self.random = torch.Generator().manual_seed(seed)
        self.taps: list[Tensor] = []
        self.kept: list[int] = []
        return self

    def forward(
        self, noise_embeds: Tensor, context_hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Runs the real forward, checks it, and replaces its result."""
        out = super().forward(noise_embeds, context_hidden_states, *args, **kwargs)
        self.taps.append(context_hidden_states)
        assert isinstance(out, BaseModelOutputWithPast)
        whole = super().forward(noise_embeds, torch.cat(self.taps, dim=1)).last_hidden_state
        torch.testing.assert_close(out.last_hidden_state, whole, rtol=1e-9, atol=1e-12)
        positions = kwargs["position_ids"][0, -BLOCK:].tolist()
        assert positions[0] == sum(taps.shape[1] for taps in self.taps)
        good = int(torch.randint(0, BLOCK, (), generator=self.random))
        states = torch.zeros_like(out.last_hidden_state)
        for slot, position in enumerate(positions):
            true = int(self.truth[position]) if position < len(self.truth) else 0
            states[0, slot] = self.state_of(
                true if slot <= good else (true + 1) % self.head.shape[0]
            )
        self.kept.append(good)
        return BaseModelOutputWithPast(last_hidden_state=states, **{CACHE_NAME: out[CACHE_NAME]})

    def state_of(self, token: int) -> Tensor:
        """A state for which the head's largest score is that of `token`."""
        rows = self.head / self.head.norm(dim=1, keepdim=True)
        state = rows[token]
        for _ in range(100):  # perceptron: add the row that is wanted, take off the one that wins
            winner = int((self.head @ state).argmax())
            if winner == token:
                return state
            state = state + rows[token] - rows[winner]
        raise AssertionError(f"no state found for token {token}")


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    """A tiny Qwen3."""
    return tiny_target("qwen3")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "overrides", [{}, {"layer_types": None}, DFLASH2], ids=["mixed", "full", "dflash 2"]
)
def test_partly_right_draft_gives_the_plain_text(
    target: PreTrainedModel, seed: int, overrides: dict[str, Any]
) -> None:
    inputs = prompts([9 + 7 * seed], seed)
    plain = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    config = draft_config(target, BLOCK, **overrides)
    draft = (
        StockOracle(config)
        .double()
        .eval()
        .arm(plain[0], target.get_output_embeddings().weight, seed)
    )
    randomise_heads(draft)
    out = target.generate(
        **inputs,
        max_new_tokens=NEW,
        do_sample=False,
        assistant_model=draft,
        speculation_type="dflash",
    )
    assert torch.equal(out, plain)
    assert len(draft.kept) < NEW - 1, "nothing was ever accepted"
    assert min(draft.kept) < BLOCK - 1, "nothing was ever rejected"


def test_random_draft_gives_the_plain_text(target: PreTrainedModel) -> None:
    inputs = prompts([12], 0)
    plain = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = DFlashDraftModel(draft_config(target, BLOCK)).double().eval()
    out = target.generate(
        **inputs,
        max_new_tokens=NEW,
        do_sample=False,
        assistant_model=draft,
        speculation_type="dflash",
    )
    assert torch.equal(out, plain)
