"""Drafts whose trees branch."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from fuzz.targets import Oracle, arm
from tiny import draft_config, randomise_heads


def branching(
    target: PreTrainedModel, truth: list[list[int]], seed: int, nodes: int, **options: Any
) -> Oracle:
    """A draft that is right in places, and whose second and third choice sometimes are where the first is not."""
    draft = Oracle(draft_config(target, 16, **options)).to(target.dtype).eval()
    randomise_heads(draft)
    arm(draft, truth, seed, None, nodes)
    draft.generation_config.num_tree_nodes = nodes
    return draft
