"""What a target's config says of each of its layers: Transformers has configs in which layers differ.

Gemma 4's attention, for one, has wider heads in its full layers than in its sliding ones. To read such an attribute
of the whole config raises an error, so everything that may differ between layers is read here, layer by layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from transformers import PreTrainedConfig

T = TypeVar("T")


class AttentionSizes(NamedTuple):
    """The sizes of a layer's attention: its query heads, its key and value heads, and the numbers in a head."""

    heads: int
    groups: int
    size: int


def layer_config(config: PreTrainedConfig, index: int) -> Any:
    """Returns the config of a layer; the given one where layers do not differ."""
    return config.per_layer_config[index] if config.is_heterogeneous else config


def layer_values(config: PreTrainedConfig, name: str) -> list[Any]:
    """Returns an attribute of each layer's config; `None` where there is none."""
    differs = name in (config.per_layer_attributes or ())
    return _of_each(config, lambda layer: getattr(layer, name, None), differs)


def attention_sizes(config: PreTrainedConfig) -> list[AttentionSizes]:
    """Returns the sizes of each layer's attention; nothing for a config that knows no heads."""
    if not all(layer_values(config, "num_attention_heads")):
        return []
    return _of_each(config, _sizes_of, config.is_heterogeneous)


def commonest(values: list[Any]) -> Any:
    """Returns the value of most layers, the first of them where several are as many."""
    return Counter(values).most_common(1)[0][0]


def _of_each(config: PreTrainedConfig, read: Callable[[Any], T], differs: bool) -> list[T]:
    """What is read of each layer's config; read once, of the whole one, where it does not differ."""
    depth: int = config.num_hidden_layers
    if not differs:
        return [read(config)] * depth
    return [read(layer_config(config, index)) for index in range(depth)]


def _sizes_of(layer: Any) -> AttentionSizes:
    heads: int = layer.num_attention_heads
    groups = getattr(layer, "num_key_value_heads", None) or heads
    size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return AttentionSizes(heads, groups, size)
