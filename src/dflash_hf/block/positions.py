"""This module defines which position sees which other position, and which layers are tapped.

Decoding and training use the same definitions.

The code distinguishes three quantities: the *slot* of a key in a buffer, the *draft position* (the plain index of a
token in its row, image tokens included) and the *target position* (the index plus the row's rope delta). This module
uses indices only. Rotary embeddings belong to the models.
"""

from __future__ import annotations

from torch import Tensor


def visible(
    query_position: Tensor,
    key_position: Tensor,
    window: int | None,
    causal: bool,
    anchor: Tensor | None = None,
) -> Tensor:
    """Returns which keys a query may attend to. The result depends only on indices.

    Args:
        query_position (`torch.Tensor`, integer, broadcastable): Index of each query in its row, at least 0.
        key_position (`torch.Tensor`, integer, broadcastable): Index of each key in its row. A negative index means
            that the slot is empty or padding.
        window (`int`, *optional*): Number of positions that a query sees in one direction, itself included
            (`q - k < window`, and `k - q < window` where keys may be after the query). `None` means no limit.
        causal (`bool`): Whether keys after the query are hidden.
        anchor (`torch.Tensor`, integer, broadcastable, *optional*): Index of the first token of the query's block.
            With an anchor, every slot sees the last `window` tokens before the anchor, and the window hides nothing of
            the block.

    Returns:
        `torch.Tensor`: Boolean, `True` where the query sees the key.

    Source: z-lab `dflash/model.py::_attention_mask`; with an anchor, speculators
    `models/dflash/attention.py::create_anchor_block_mask_mod`.
    """
    # An empty slot has a negative index, and padding has one too.
    is_filled = key_position >= 0
    if causal:
        seen = is_filled & (key_position <= query_position)
    else:
        # The comparison is true for every query. It gives the result the shape of the queries.
        seen = is_filled & (query_position >= 0)
    if window is None:
        return seen
    # The window counts from the anchor for every query of its block, so it hides nothing of the block.
    if anchor is not None:
        return seen & (anchor - key_position <= window)
    seen = seen & (query_position - key_position < window)
    if not causal:
        # Keys of the block may be after a query, and a window reaches as far forward as backward.
        seen = seen & (key_position - query_position < window)
    return seen


def slot_positions(last: Tensor, slots: Tensor, ring: int) -> Tensor:
    """Returns the index of the token that each slot of a ring buffer holds.

    A token with index `p` is stored in slot `p % ring`. A buffer that is as long as the row never wraps, so the same
    formula applies to full attention. A slot that has not been written has a negative index.

    Args:
        last (`torch.Tensor`, integer, broadcastable): Index of the newest token of the row.
        slots (`torch.Tensor`, integer, broadcastable): Slot numbers in `[0, ring)`.
        ring (`int`): Number of slots.

    Returns:
        `torch.Tensor`: The greatest index at most `last` that is congruent to the slot.
    """
    return last - (last - slots) % ring


def build_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """Returns the target layers that are tapped by default, evenly spaced from layer 1 to the third layer from the
    end.

    Layer ids are 0-based and mean "the output of that layer". There is one id for each draft layer. Raises
    `ValueError` for a target of fewer than 4 layers, and without draft layers.

    Source: z-lab `dflash/model.py::build_target_layer_ids`.
    """
    if num_target_layers < 4 or num_draft_layers < 1:
        raise ValueError(
            f"expected num_target_layers >= 4 and at least one tap, got {num_target_layers} and {num_draft_layers}; "
            "pass target_layer_ids explicitly"
        )
    # A single tap is in the middle, because the formula below would divide by zero.
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    # This is the number of steps from layer 1 to the third layer from the end.
    span = num_target_layers - 4
    # The product is computed before the division, as in z-lab's code. The other order rounds some layers differently.
    num_steps = num_draft_layers - 1
    return [round(1 + i * span / num_steps) for i in range(num_draft_layers)]
