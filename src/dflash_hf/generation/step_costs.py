"""Costs of steps by what they read and multiply.

In half precision two widths may give two texts: a near tie turns. A width that followed the clock would make a text
follow the machine's load. On a CPU the width follows from these costs and from the tokens that the text has accepted,
in every dtype. So two runs of one call verify alike, and the first call knows as much as a later one.

A linear layer reads its weights once for all tokens of a step, and multiplies them with each. Few tokens are
multiplied while the weights are read; each one beyond these takes time of its own. Around its products a layer runs
small operations, which take the same time however small the layer is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import Target, num_weights


class Speed(NamedTuple):
    """How fast a machine multiplies, beside how fast it reads."""

    free_tokens: float  # tokens of all rows that are multiplied while the weights are read
    tokens_per_reading: float  # further tokens that are multiplied in the time of one more reading


# Chosen by what the steps that follow from them would have cost over recorded answers of SmolLM2, by measured costs of
# steps of 1 to 16 rows and 1 to 8 tokens with one thread (docs/log.md): on an AMD EPYC with avx512_bf16, and on an
# Intel Xeon that multiplies tiles of bfloat16 (AMX). CPUs differ; threads change little, since they read and multiply
# faster alike.
FULL_PRECISION = Speed(free_tokens=6.0, tokens_per_reading=8.0)
HALF_PRECISION = Speed(free_tokens=6.0, tokens_per_reading=10.0)
HALF_PRECISION_BY_TILES = Speed(free_tokens=12.0, tokens_per_reading=32.0)
# Bytes that are read in the time of a layer's small operations: 0.45 ms at 20 GB/s.
LAYER_OVERHEAD_BYTES = 9_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """What a step costs, in weights read; products beyond the free ones count as weights that could have been read.

    Args:
        target (`int`): Weights of the target's forward, its head included.
        target_layers (`int`): Layers of the target.
        draft (`int`): Weights of the draft's layers.
        draft_layers (`int`): Layers of the draft.
        head (`int`): Weights of the head that the draft's states go through.
        block_size (`int`): Tokens of the draft's block.
        num_proposals (`int`): Slots of the block that propose.
        markov (`int`): Weights that each slot goes through behind the one before it; 0 without a Markov head.
        speed ([`Speed`]): How fast the machine multiplies.
        layer_overhead (`float`): Weights that are read in the time of a layer's small operations.
    """

    target: int
    target_layers: int
    draft: int
    draft_layers: int
    head: int
    block_size: int
    num_proposals: int
    markov: int = 0
    speed: Speed = HALF_PRECISION
    layer_overhead: float = LAYER_OVERHEAD_BYTES / 2

    @classmethod
    def of(cls, target: Target, draft: DFlashDraftModel, block_size: int) -> StepCosts:
        """Returns the costs of a pair's steps with blocks of `block_size` tokens."""
        head = target.head
        if draft.lm_head is not None:
            head = draft.lm_head
        markov = 0
        if draft.markov_head is not None:
            # Of its two tables the first is looked up.
            markov = draft.markov_head.markov_w2.numel()
        dtype = target.model.dtype
        return cls(
            target=target.facts.num_weights + num_weights(target.head),
            target_layers=len(target.layers),
            draft=num_weights(draft.layers),
            draft_layers=len(draft.layers),
            head=num_weights(head),
            block_size=block_size,
            num_proposals=draft.config.num_proposals(block_size),
            markov=markov,
            speed=speed_of(dtype),
            layer_overhead=LAYER_OVERHEAD_BYTES / dtype.itemsize,
        )

    def of_step(self, width: int, rows: int) -> float:
        """Returns the cost of a step that verifies `width` tokens in each of `rows` rows; one token is not drafted."""
        cost = self._of_products(self.target, rows * width)
        cost += self.layer_overhead * self.target_layers
        if width == 1:
            return cost
        cost += self.layer_overhead * self.draft_layers
        num_heads = min(width - 1, self.num_proposals)
        cost += self._of_products(self.draft, rows * self.block_size)
        cost += self._of_products(self.head, rows * num_heads)
        # One slot after the other: each of them reads the weights anew.
        cost += num_heads * self._of_products(self.markov, rows)
        return cost

    def of_chain(self, num_tokens: int, rows: int) -> float:
        """Returns the cost of a step that verifies a chain where others verify trees."""
        # The host builds no tree, which takes about as long as a layer's operations (docs/log.md).
        return self.of_step(num_tokens, rows) - self.layer_overhead

    def _of_products(self, num_weights: int, num_tokens: int) -> float:
        """Returns the cost of multiplying `num_weights` weights with each of `num_tokens` tokens."""
        num_beyond = max(num_tokens - self.speed.free_tokens, 0.0)
        return num_weights * (1.0 + num_beyond / self.speed.tokens_per_reading)


def speed_of(dtype: torch.dtype) -> Speed:
    """Returns how fast this machine's CPU multiplies with weights of a dtype."""
    if dtype.itemsize > 2:
        return FULL_PRECISION
    # A function that older builds of torch may lack.
    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", bool)
    if dtype == torch.bfloat16 and has_tiles():
        return HALF_PRECISION_BY_TILES
    return HALF_PRECISION
