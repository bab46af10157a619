"""Which position sees which, and which layers are tapped: the one definition of each, for decoding and training.

Three quantities are kept apart everywhere: the *slot* of a key in a buffer, the *draft position* (the plain index of
a token in its row, image tokens included) and the *target position* (the index plus the row's rope delta). This module
knows indices alone; rotary embeddings belong to the models.
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
    """Returns which keys a query may attend to, from indices alone.

    Args:
        query_position (`torch.Tensor`, integer, broadcastable): Index of each query in its row, at least 0.
        key_position (`torch.Tensor`, integer, broadcastable): Index of each key in its row; negative means empty.
        window (`int`, *optional*): Number of positions a query sees looking one way, itself included
            (`q - k < window`, and `k - q < window` where keys may lie ahead). `None` means no limit.
        causal (`bool`): Whether keys after the query are hidden.
        anchor (`torch.Tensor`, integer, broadcastable, *optional*): Index of the first token of the query's block.
            With it every slot sees the last `window` tokens before the anchor, and the window hides nothing of the
            block.

    Returns:
        `torch.Tensor`: Boolean, `True` where the key is visible.

    Source: z-lab `dflash/model.py::_attention_mask`; with an anchor, speculators
    `models/dflash/attention.py::create_anchor_block_mask_mod`.
    """
    # A slot that nothing was written to has a negative index, and so has padding.
    is_filled = key_position >= 0
    if causal:
        seen = is_filled & (key_position <= query_position)
    else:
        # The comparison is true for every query; the result takes the queries' shape from it.
        seen = is_filled & (query_position >= 0)
    if window is None:
        return seen
    # The anchor stands in for every query of its block, which the window then does not cut.
    if anchor is not None:
        return seen & (anchor - key_position <= window)
    seen = seen & (query_position - key_position < window)
    if not causal:
        # Keys of the block may lie ahead of a query, and a window looks as far ahead as back.
        seen = seen & (key_position - query_position < window)
    return seen


def slot_positions(last: Tensor, slots: Tensor, ring: int) -> Tensor:
    """Returns the index of the token that each slot of a ring buffer holds.

    A token with index `p` lives in slot `p % ring`. A buffer as long as the row never wraps, so the same formula
    serves full attention. A slot that nothing has been written to has a negative index.

    Args:
        last (`torch.Tensor`, integer, broadcastable): Index of the newest token of the row.
        slots (`torch.Tensor`, integer, broadcastable): Slot numbers in `[0, ring)`.
        ring (`int`): Number of slots.

    Returns:
        `torch.Tensor`: The greatest index at most `last` that is congruent to the slot.
    """
    return last - (last - slots) % ring


def build_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """Returns the target layers to tap by default: evenly from layer 1 to the third from the end.

    Layer ids are 0-based and mean "the output of that layer"; there are as many as draft layers. Raises `ValueError`
    for a target of fewer than 4 layers.

    Source: z-lab `dflash/model.py::build_target_layer_ids`.
    """
    if num_target_layers < 4 or num_draft_layers < 1:
        raise ValueError(
            f"expected num_target_layers >= 4 and at least one tap, got {num_target_layers} and {num_draft_layers}; "
            "pass target_layer_ids explicitly"
        )
    # A single tap lies in the middle, where a formula of even steps has nothing to divide by.
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    # From layer 1 to the third from the end there are so many steps.
    span = num_target_layers - 4
    # The product comes before the division, as in z-lab's code: the other order rounds some layers differently.
    num_steps = num_draft_layers - 1
    return [round(1 + i * span / num_steps) for i in range(num_draft_layers)]
