"""Costs of steps by what they read and multiply, where the clock may not decide how much is verified.

In half precision two widths may give two texts: a near tie turns. A width that followed the clock would make a text
follow the machine's load. So there the width follows from these costs and from the tokens that the text has accepted,
and two runs of one call give the same text.

A linear layer reads its weights once for all tokens of a step, and multiplies them with each. A step of few tokens
takes the time of the reading; from some number of tokens on it takes twice that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import Target

# Tokens of all rows for which a step takes twice the time, in half precision. Fitted to whole steps of SmolLM2 in
# bfloat16 with its draft over laid-out weights, with one thread (docs/log.md): 4 to 16 rows of 1 to 8 tokens on an AMD
# EPYC with avx512_bf16, and 1 to 32 rows on an Intel Xeon that multiplies tiles of bfloat16 (AMX). CPUs differ;
# threads change little, since they read and multiply faster alike.
TOKENS_PER_READING = 24.0
TOKENS_PER_READING_BY_TILES = 64.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """What a step costs, in weights read; products count as the weights that could have been read meanwhile.

    Args:
        target (`int`): Weights of the target's forward, its head included.
        draft (`int`): Weights of the draft's layers.
        head (`int`): Weights of the head that the draft's states go through.
        block_size (`int`): Tokens of the draft's block.
        num_proposals (`int`): Slots of the block that propose.
        markov (`int`): Weights that each slot goes through behind the one before it; 0 without a Markov head.
        tokens_per_reading (`float`): Tokens that are multiplied with a weight in the time of reading it.
    """

    target: int
    draft: int
    head: int
    block_size: int
    num_proposals: int
    markov: int = 0
    tokens_per_reading: float = TOKENS_PER_READING

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
        # Embeddings are looked up, not read, and a vision tower runs in the prefill alone.
        layers = sum(_num_weights(layer) for layer in target.layers)
        return cls(
            target=layers + _num_weights(target.head),
            draft=_num_weights(draft.layers),
            head=_num_weights(head),
            block_size=block_size,
            num_proposals=draft.config.num_proposals(block_size),
            markov=markov,
            tokens_per_reading=tokens_per_reading(target.model.dtype),
        )

    def of_step(self, width: int, rows: int) -> float:
        """Returns the cost of a step that verifies `width` tokens in each of `rows` rows; one token is not drafted."""
        cost = self._of_products(self.target, rows * width)
        if width == 1:
            return cost
        num_heads = min(width - 1, self.num_proposals)
        cost += self._of_products(self.draft, rows * self.block_size)
        cost += self._of_products(self.head, rows * num_heads)
        # One slot after the other: each of them reads the weights anew.
        cost += num_heads * self._of_products(self.markov, rows)
        return cost

    def of_chain(self, num_tokens: int, rows: int) -> float:
        """Returns the cost of a step that verifies a chain, which is that of a tree of as many tokens."""
        return self.of_step(num_tokens, rows)

    def _of_products(self, num_weights: int, num_tokens: int) -> float:
        """Returns the cost of multiplying `num_weights` weights with each of `num_tokens` tokens."""
        return num_weights * (1.0 + num_tokens / self.tokens_per_reading)


def tokens_per_reading(dtype: torch.dtype) -> float:
    """Returns the tokens that this machine's CPU multiplies with a weight of a dtype in the time of reading it."""
    # A function that older builds of torch may lack.
    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", bool)
    if dtype == torch.bfloat16 and has_tiles():
        return TOKENS_PER_READING_BY_TILES
    return TOKENS_PER_READING


def _num_weights(module: nn.Module) -> int:
    """Returns how many weights a module computes with, at least 1.

    A linear layer counts by its sizes: quantised weights are packed, and may be buffers.
    """
    num = 0
    for part in module.modules():
        # An adapter's layer has the sizes of the layer in it, which is counted itself.
        is_around_another = isinstance(getattr(part, "base_layer", None), nn.Module)
        rows: object = getattr(part, "out_features", None)
        columns: object = getattr(part, "in_features", None)
        if isinstance(rows, int) and isinstance(columns, int) and not is_around_another:
            num += rows * columns
        else:
            num += sum(weight.numel() for weight in part.parameters(recurse=False))
    return max(num, 1)
