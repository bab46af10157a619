"""What an ordinary cache of Transformers holds after a prefill: columns, windows, the shapes of its layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import StaticLayer

from dflash_hf.cache.recurrence import Recurrence
from dflash_hf.cache.size import LayerShape
from dflash_hf.errors import require


def shapes_of(
    prefill: Cache, recurrences: Mapping[int, Recurrence], num_columns: int
) -> dict[int, LayerShape]:
    """Returns the shapes of a filled cache's attention layers by index; raises `ValueError` if there are none."""
    shapes: dict[int, LayerShape] = {}
    for index, layer in enumerate(prefill.layers):
        if index not in recurrences:
            shapes[index] = _shape_of(layer, index, num_columns)
    if not shapes:
        raise ValueError(
            "expected a prefill cache with attention layers, got none; does the target use its cache?"
        )
    return shapes


def num_bytes_of(
    prefill: Cache, shapes: Mapping[int, LayerShape]
) -> defaultdict[torch.device, int]:
    """Returns the bytes of a filled cache's keys and values on each device."""
    sizes = defaultdict[torch.device, int](int)
    for index, shape in shapes.items():
        layer: Any = prefill.layers[index]
        num_bytes = layer.keys.nbytes + layer.values.nbytes
        sizes[shape.device] += num_bytes
    return sizes


def _shape_of(source: Any, index: int, num_columns: int) -> LayerShape:
    """Returns the shape of the layer that a filled one is moved into.

    Raises `ValueError` for a layer without keys and values of all columns of the prompt.
    """
    keys = getattr(source, "keys", None)
    values = getattr(source, "values", None)
    # Keys are `[B, G, S, E]`; some caches keep compressed ones of three dimensions.
    has_keys = isinstance(keys, Tensor) and keys.dim() == 4
    if not has_keys or not isinstance(values, Tensor):
        raise ValueError(
            f"expected keys and values in every layer of the prefill cache, got {type(source).__name__} in "
            f"layer {index}; this target has a layer without its own K/V and is not supported"
        )
    num_filled = int(source.get_seq_length())
    what = f"keys of {num_columns} prompt tokens in layer {index} of the prefill cache"
    reason = "does not keep the whole prompt in it"
    if num_filled > num_columns:
        reason = "adds tokens to the prompt"
    action = f"the target {reason}, drop assistant_model"
    require(num_filled == num_columns, what, num_filled, action)
    keys, values = stored_columns(source)
    window = layer_window(source)
    if getattr(source, "record_past", False):
        # A cache that records its past is given all of it back, also from before the window.
        window = None
    return LayerShape(
        num_heads=keys.shape[1],
        key_size=keys.shape[3],
        value_size=values.shape[3],
        window=window,
        dtype=keys.dtype,
        value_dtype=values.dtype,
        device=keys.device,
    )


def stored_columns(layer: Any) -> tuple[Tensor, Tensor]:
    """Returns the newest `n` columns, those that an initialised layer of an ordinary cache holds: `[B, G, n, E]`.

    Reads the length of a static layer on the host.
    """
    if not isinstance(layer, StaticLayer):
        return layer.keys, layer.values
    # A static layer's buffer may be longer than the text, and a sliding one's text longer than the buffer.
    assert layer.keys is not None
    assert layer.values is not None
    num_seen = int(layer.get_seq_length())
    num = min(num_seen, layer.max_cache_len)
    keys = layer.keys[:, :, :num]
    values = layer.values[:, :, :num]
    return keys, values


def layer_window(layer: Any) -> int | None:
    """Returns the window of a layer of an ordinary cache in tokens, the query included; `None` without a window."""
    if not layer.is_sliding:
        return None
    if isinstance(layer, StaticLayer):
        return layer.max_cache_len
    return getattr(layer, "sliding_window", None)
