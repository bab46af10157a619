"""Pictures: the same text as plain `generate` on vision targets, alone and in mixed left-padded batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.vision import VISION, Grid, vision_prompts, vision_target
from tiny import oracle_draft, truth_of

NEW = 24
ROWS: dict[str, list[list[Grid]]] = {
    "one picture": [[(4, 4)]],
    "several sizes": [[(4, 6), (2, 2), (8, 4)]],
    "no picture": [[]],
    "mixed batch": [[(4, 4)], [], [(2, 8), (6, 4)]],
    "batch without pictures": [[], [], []],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("name", VISION)
def test_pictures_give_the_plain_text(name: str, rows: list[list[Grid]]) -> None:
    target = vision_target(name)
    for seed, block_size in enumerate([2, 5, 8, 16]):
        inputs = vision_prompts(target, name, rows, seed)
        ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        draft = oracle_draft(target, truth_of(inputs, ref), seed, block_size)
        out = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft)
        assert torch.equal(out, ref)
        assert 1.0 < draft.last_stats.acceptance_length < block_size
