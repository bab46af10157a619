"""Rows of like length, which go through the target together: less padding is computed.

A batch is padded to its longest prompt, and the target computes the padding like tokens.

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

# Padding that a further forward must spare. By itself it costs as much as 17 to 21 tokens (docs/log.md); the rest is
# for targets whose forwards cost more, as those with experts.
TOKENS_OF_A_FORWARD = 256
# Inputs of a prefill that are the same for each row.
OF_ALL_ROWS = {CACHE_NAME, "logits_to_keep", "return_dict", "use_cache"}
# Inputs with a value for each column of each row.
OF_COLUMNS = {"attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids"}


class RowGroup(NamedTuple):
    """Rows of a batch that are computed together, over its last columns."""

    rows: list[int]
    num_columns: int  # as many as its longest row has

    def cut(self, value: Tensor) -> Tensor:
        """Returns the part `[n, num_columns]` of a value of all rows and columns `[B, T]`."""
        return value[self.rows, -self.num_columns :]


def takes_groups(request: Request, inputs: Mapping[str, Any]) -> bool:
    """Returns True if rows of a prefill may be computed apart, and come out as they do together.

    `inputs` are the keywords for the target's prefill. On a GPU a forward has another price, which is not measured.
    """
    target = request.target
    is_plain = (
        request.input_ids.device.type == "cpu"
        and request.ranks.is_alone
        and request.config.prefill_chunk_size is None
        and not target.recurrences
        # Code of the user's may count the forwards, or look at all rows.
        and not request.runs_user_code
        and not request.draft_parts.altered
        # The longest row decides the frequencies of all.
        and not target.facts.ropes
    )
    if not is_plain:
        return False
    given = {name for name, value in inputs.items() if value is not None}
    columns = given & OF_COLUMNS
    # Without positions a target counts the columns.
    is_known = "position_ids" in columns and given <= OF_ALL_ROWS | OF_COLUMNS
    return is_known and all(inputs[name].shape == request.input_ids.shape for name in columns)


def groups_of(num_columns: Sequence[int]) -> list[RowGroup]:
    """Returns groups of rows of which each has so many columns from its first token on, the longest rows first.

    A group ends where the padding that all later rows are spared costs more than a further forward.
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
        parts (sequence of `Cache`): What the target has filled, one cache a group.
        groups (sequence of `RowGroup`): Their rows.
        num_columns (`int`): Columns of all rows, `T`.
        config (`PreTrainedConfig`): The target's.

    Raises:
        ValueError: If a layer has not kept keys and values of all its group's columns.
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
    """Returns keys or values `[B, G, T, E]` of all rows, made of those of each group, with zeros on the left."""
    num_rows = sum(len(group.rows) for group in groups)
    _, num_heads, _, size = states[0].shape
    padded = states[0].new_zeros(num_rows, num_heads, num_columns, size)
    for group, part in zip(groups, states, strict=True):
        # A layer with a window has kept its newest columns alone, and keeps those again.
        first = num_columns - part.shape[2]
        padded[group.rows, :, first:] = part
    return padded
