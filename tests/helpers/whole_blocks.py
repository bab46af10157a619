"""Runs whose every verify is of a whole block or of a whole tree; run as a script, it is the chat with whole trees.

By default a verify is as wide as pays: how many steps that takes follows from what was accepted before, and on a CPU
from what the steps took.
"""

from __future__ import annotations

import sys
from typing import Any

from dflash_hf import DFlashDraftModel
from dflash_hf.generation import decode, iterate, joining
from dflash_hf.generation.widths import FixedWidth

# Who calls `choose_widths` of a run that is not captured in places.
CHOOSING = (decode, iterate, joining)


def widest(generator: Any, state: Any, is_captured: bool) -> FixedWidth:
    """Stands for `choose_widths`: every verify is as wide as it may be, trees included."""
    return FixedWidth(generator.verify_width)


def use_whole_blocks(draft: DFlashDraftModel) -> None:
    """Has every step verify the chain of all that a block proposes, for tests that count or compare steps.

    A block size of the draft's options has to be set before.
    """
    options = draft.generation_config
    options.num_tree_nodes = 0
    options.verify_width = (
        draft.config.num_proposals(options.block_size or draft.config.block_size) + 1
    )


if __name__ == "__main__":
    from dflash_hf.cli.main import app

    for module in CHOOSING:
        module.choose_widths = widest
    app(["chat", "--web", *sys.argv[1:]])
