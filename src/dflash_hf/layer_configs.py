"""This module reads attributes of each layer of a target, because Transformers has configs whose layers differ.

For example, Gemma 4's full layers have wider heads than its sliding layers. Transformers raises an error if such an
attribute is read from the config of the whole model. So this module reads every attribute that may differ layer by
layer.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from transformers import PreTrainedConfig


class AttentionSizes(NamedTuple):
    """An instance holds the sizes of one layer's attention."""

    heads: int  # number of query heads
    groups: int  # number of key and value heads
    size: int  # size of a head


def layer_config(config: PreTrainedConfig, index: int) -> Any:
    """Returns the config of a layer. If layers do not differ, this is the config of the whole model."""
    if config.is_heterogeneous:
        return config.per_layer_config[index]
    return config


def layer_values(config: PreTrainedConfig, name: str) -> list[Any]:
    """Returns an attribute of each layer's config, or `None` for a layer without this attribute."""
    varying = config.per_layer_attributes or ()
    return [getattr(layer, name, None) for layer in _configs(config, name in varying)]


def attention_sizes(config: PreTrainedConfig) -> list[AttentionSizes]:
    """Returns the sizes of each layer's attention, or an empty list for a config without attention heads."""
    if not all(layer_values(config, "num_attention_heads")):
        return []
    return [_sizes_of(layer) for layer in _configs(config, config.is_heterogeneous)]


def caches_latents(config: PreTrainedConfig) -> bool:
    """Returns True if the layers cache latents (MLA), which their forwards expand to keys and values."""
    return any(rank is not None for rank in layer_values(config, "kv_lora_rank"))


def commonest(values: list[Any]) -> Any:
    """Returns the value that most layers have. Of equally common values, it is the first one."""
    [(value, _)] = Counter(values).most_common(1)
    return value


def _configs(config: PreTrainedConfig, are_different: bool) -> list[Any]:
    """Returns the config to read for each layer. If the layers do not differ, it is the whole model's config."""
    depth: int = config.num_hidden_layers
    if not are_different:
        return [config] * depth
    return [layer_config(config, index) for index in range(depth)]


def _sizes_of(layer: Any) -> AttentionSizes:
    """Returns the attention sizes that a layer's config states. Both default values are Transformers' own."""
    heads: int = layer.num_attention_heads
    groups = getattr(layer, "num_key_value_heads", None) or heads
    size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return AttentionSizes(heads, groups, size)
