"""Drafts whose every verify is of a whole block.

By default a verify is a tree, or as wide as pays: how many steps that takes follows from what was accepted before.
"""

from __future__ import annotations

from dflash_hf import DFlashDraftModel


def use_whole_blocks(draft: DFlashDraftModel) -> None:
    """Has every step verify the chain of all that a block proposes, for tests that count or compare steps.

    A block size of the draft's options has to be set before.
    """
    options = draft.generation_config
    options.num_tree_nodes = 0
    options.verify_width = (
        draft.config.num_proposals(options.block_size or draft.config.block_size) + 1
    )
