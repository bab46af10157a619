"""Attributes of each layer of a target: Transformers has configs in which layers differ.

Gemma 4's full layers, for one, have wider heads than its sliding ones. Transformers raises an error where such an
attribute is read from the whole config, so this module reads, layer by layer, all that may differ between layers.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from transformers import PreTrainedConfig


class AttentionSizes(NamedTuple):
    """Sizes of one layer's attention."""

    heads: int  # query heads
    groups: int  # key and value heads
    size: int  # numbers in a head


def layer_config(config: PreTrainedConfig, index: int) -> Any:
    """Returns the config of a layer, which is the whole one where layers do not differ."""
    if config.is_heterogeneous:
        return config.per_layer_config[index]
    return config


def layer_values(config: PreTrainedConfig, name: str) -> list[Any]:
    """Returns an attribute of each layer's config, `None` for a layer without it."""
    varying = config.per_layer_attributes or ()
    return [getattr(layer, name, None) for layer in _configs(config, name in varying)]


def attention_sizes(config: PreTrainedConfig) -> list[AttentionSizes]:
    """Returns the sizes of each layer's attention, an empty list for a config without attention heads."""
    if not all(layer_values(config, "num_attention_heads")):
        return []
    return [_sizes_of(layer) for layer in _configs(config, config.is_heterogeneous)]


def caches_latents(config: PreTrainedConfig) -> bool:
    """Returns True if the layers cache latents (MLA), which their forwards expand to keys and values."""
    return any(rank is not None for rank in layer_values(config, "kv_lora_rank"))


def commonest(values: list[Any]) -> Any:
    """Returns the value that most layers have, the first one of equally common values."""
    [(value, _)] = Counter(values).most_common(1)
    return value


def _configs(config: PreTrainedConfig, are_different: bool) -> list[Any]:
    """Returns the config to read for each layer: the whole one where the layers do not differ in what is read."""
    depth: int = config.num_hidden_layers
    if not are_different:
        return [config] * depth
    return [layer_config(config, index) for index in range(depth)]


def _sizes_of(layer: Any) -> AttentionSizes:
    """Returns the attention sizes that a layer's config states; both defaults are Transformers' own."""
    heads: int = layer.num_attention_heads
    groups = getattr(layer, "num_key_value_heads", None) or heads
    size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return AttentionSizes(heads, groups, size)
