"""This module computes rows of similar length together in the prefill, so that less padding is computed.

A batch is padded to its longest prompt, and the target computes the padding like other tokens.

Shapes: `B` rows, `T` columns, `G` heads, `E` head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig

from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.cache.prefilled import shapes_of, stored_columns
from dflash_hf.generation.request import Request

# Number of padding tokens that an additional forward must save. A forward itself costs as much as 17 to 21 tokens
# (docs/log.md). The number is larger because of targets whose forwards cost more, such as targets with experts.
TOKENS_OF_A_FORWARD = 256
# Inputs of a prefill that are the same for all rows.
OF_ALL_ROWS = {CACHE_NAME, "logits_to_keep", "return_dict", "use_cache"}
# Inputs with a value for each column of each row.
OF_COLUMNS = {"attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids"}


class RowGroup(NamedTuple):
    """Rows of a batch that are computed together, over the last columns of the batch."""

    rows: list[int]
    num_columns: int  # number of columns of its longest row

    def cut(self, value: Tensor) -> Tensor:
        """Returns the part `[n, num_columns]` of a tensor of all rows and columns `[B, T]`."""
        return value[self.rows, -self.num_columns :]


def takes_groups(request: Request, inputs: Mapping[str, Any]) -> bool:
    """Returns True if the rows of a prefill may be computed in groups, with the same results as together.

    `inputs` are the keywords for the target's prefill. Groups are only for CPUs. On a GPU, a forward has another cost,
    which was not measured.
    """
    target = request.target
    is_plain = (
        request.input_ids.device.type == "cpu"
        and request.ranks.is_alone
        and request.config.prefill_chunk_size is None
        and not target.recurrences
        # The user's code may count the forwards, or look at all rows.
        and not request.runs_user_code
        and not request.draft_parts.altered
        # With such a RoPE, the longest row determines the frequencies of all rows.
        and not target.facts.ropes
    )
    if not is_plain:
        return False
    given = {name for name, value in inputs.items() if value is not None}
    columns = given & OF_COLUMNS
    # Without positions, a target counts the columns itself.
    is_known = "position_ids" in columns and given <= OF_ALL_ROWS | OF_COLUMNS
    return is_known and all(inputs[name].shape == request.input_ids.shape for name in columns)


def groups_of(num_columns: Sequence[int]) -> list[RowGroup]:
    """Returns groups of rows, the longest rows first. `num_columns` are each row's columns from its first token on.

    A group ends if the padding that this saves for all later rows costs more than an additional forward.
    """
    longest_first = sorted(range(len(num_columns)), key=lambda row: -num_columns[row])
    groups: list[RowGroup] = []
    rows: list[int] = []
    for place, row in enumerate(longest_first):
        if rows:
            num_later = len(longest_first) - place
            num_spared = num_later * (num_columns[rows[0]] - num_columns[row])
            if num_spared > TOKENS_OF_A_FORWARD:
                groups.append(RowGroup(rows, num_columns[rows[0]]))
                rows = []
        rows.append(row)
    groups.append(RowGroup(rows, num_columns[rows[0]]))
    return groups


def merged(
    parts: Sequence[Cache],
    groups: Sequence[RowGroup],
    num_columns: int,
    config: PreTrainedConfig,
) -> DynamicCache:
    """Returns the cache of all rows, left-padded with zeros, and empties the caches of the groups layer by layer.

    Args:
        parts (sequence of `Cache`): The caches that the target has filled, one for each group.
        groups (sequence of `RowGroup`): The groups of rows.
        num_columns (`int`): Number of columns of all rows, `T`.
        config (`PreTrainedConfig`): The target's config.

    Raises:
        ValueError: If a layer does not hold the keys and values of all columns of its group.
    """
    for part, group in zip(parts, groups, strict=True):
        shapes_of(part, {}, group.num_columns)
    cache = DynamicCache(config=config)
    for index in range(len(parts[0].layers)):
        layers: list[Any] = [part.layers[index] for part in parts]
        pairs = [stored_columns(layer) for layer in layers]
        keys, values = (_padded(states, groups, num_columns) for states in zip(*pairs, strict=True))
        cache.update(keys, values, index)
        for layer in layers:
            layer.keys = None
            layer.values = None
    return cache


def _padded(states: Sequence[Tensor], groups: Sequence[RowGroup], num_columns: int) -> Tensor:
    """Returns keys or values `[B, G, T, E]` of all rows, from those of each group, with zeros on the left."""
    num_rows = sum(len(group.rows) for group in groups)
    _, num_heads, _, size = states[0].shape
    padded = states[0].new_zeros(num_rows, num_heads, num_columns, size)
    for group, part in zip(groups, states, strict=True):
        # A layer with a window holds only its newest columns, and will keep only these again.
        first = num_columns - part.shape[2]
        padded[group.rows, :, first:] = part
    return padded
