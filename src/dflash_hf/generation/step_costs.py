"""This module models the costs of steps, by the weights that a step reads and the products that it computes.

In half precision, two widths may give two texts, because a near tie may turn. If the width followed the clock, the
text would depend on the load of the machine. On a CPU, the width follows from these costs and from the tokens that the
text has accepted, in every dtype. So two runs of one call verify alike, and the first call knows as much as a later
call.

A linear layer reads its weights once for all tokens of a step, and multiplies them with each token. A few tokens are
multiplied while the weights are read. Each further token takes additional time. A layer also runs small operations
besides its products. They take the same time in small and in large layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import Target, num_weights


class Speed(NamedTuple):
    """How fast a machine multiplies, compared with how fast it reads."""

    free_tokens: float  # tokens of all rows that are multiplied while the weights are read
    tokens_per_reading: float  # further tokens that are multiplied in the time of one more reading


# Chosen so that the steps that follow from these numbers have a low cost over recorded answers of SmolLM2. The costs
# were measured for steps of 1 to 16 rows and 1 to 8 tokens with one thread (docs/log.md): on an AMD EPYC with
# avx512_bf16, and on an Intel Xeon that multiplies tiles of bfloat16 (AMX). Other CPUs differ. The number of threads
# changes little, because more threads both read and multiply faster.
FULL_PRECISION = Speed(free_tokens=6.0, tokens_per_reading=8.0)
HALF_PRECISION = Speed(free_tokens=6.0, tokens_per_reading=10.0)
HALF_PRECISION_BY_TILES = Speed(free_tokens=12.0, tokens_per_reading=32.0)
# Number of bytes that are read in the time of a layer's small operations: 0.45 ms at 20 GB/s.
LAYER_OVERHEAD_BYTES = 9_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """The cost of a step, in weights read. Products beyond the free ones count as the weights read in their time.

    Args:
        target (`int`): Number of weights of the target's forward, its head included.
        target_layers (`int`): Number of layers of the target.
        draft (`int`): Number of weights of the draft's layers.
        draft_layers (`int`): Number of layers of the draft.
        head (`int`): Number of weights of the head that the draft uses.
        block_size (`int`): Number of tokens of the draft's block.
        num_proposals (`int`): Number of slots of the block that propose.
        markov (`int`): Number of weights that each slot multiplies after the slot before it; 0 without a Markov head.
        speed ([`Speed`]): How fast the machine multiplies.
        layer_overhead (`float`): Number of weights that are read in the time of a layer's small operations.
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
            # The Markov head has two tables. The first one is only looked up.
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
        """Returns the cost of a step that verifies `width` tokens per row; at width 1 the draft does not run."""
        cost = self._of_products(self.target, rows * width)
        cost += self.layer_overhead * self.target_layers
        if width == 1:
            return cost
        cost += self.layer_overhead * self.draft_layers
        num_heads = min(width - 1, self.num_proposals)
        cost += self._of_products(self.draft, rows * self.block_size)
        cost += self._of_products(self.head, rows * num_heads)
        # The slots follow one another, and each of them reads the weights again.
        cost += num_heads * self._of_products(self.markov, rows)
        return cost

    def of_chain(self, num_tokens: int, rows: int) -> float:
        """Returns the cost of a step that verifies a chain in a run with trees."""
        # The host builds no tree for it. Building a tree takes about as long as a layer's operations (docs/log.md).
        return self.of_step(num_tokens, rows) - self.layer_overhead

    def _of_products(self, num_weights: int, num_tokens: int) -> float:
        """Returns the cost of multiplying `num_weights` weights with each of `num_tokens` tokens."""
        num_beyond = max(num_tokens - self.speed.free_tokens, 0.0)
        return num_weights * (1.0 + num_beyond / self.speed.tokens_per_reading)


def speed_of(dtype: torch.dtype) -> Speed:
    """Returns how fast this machine's CPU multiplies with weights of a dtype."""
    if dtype.itemsize > 2:
        return FULL_PRECISION
    # Older builds of torch may lack this function.
    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", bool)
    if dtype == torch.bfloat16 and has_tiles():
        return HALF_PRECISION_BY_TILES
    return HALF_PRECISION
