"""The format of z-lab's checkpoints, which SpecForge and NVIDIA Model-Optimizer export too.

A Qwen3 config with a section `dflash_config`, and the bare draft without embedding and head. Conventions: layer ids
are 0-based layers whose output is tapped, `block_size` counts the anchor, a window of `w` means `q - k < w`. Sources:
z-lab `dflash/model.py` 0.1.0, both classes; Model-Optimizer's `hf_spec_export.py::DFlashExporter` for `use_swa` and
`causal`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_hf.checkpoints.mapping import (
    BODY_BIASES,
    BODY_WEIGHTS,
    COMMON_IGNORED,
    DFLASH2_WEIGHTS,
    FEATURE_WEIGHTS,
    QWEN3_HEAD_DIM,
    QWEN3_KEYS,
    QWEN3_THETA,
    REQUIRED,
    CheckpointFormat,
    ConfigReader,
    Key,
    plain_keys,
)
from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.errors import shown

SECTION = "dflash_config"
DFLASH2_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def _inner(name: str, default: Any = REQUIRED, *, top: bool = False, **options: bool) -> Key:
    """A key that stands in the section or else at the top; `top` says which of the two is written."""
    places = (f"{SECTION}.{name}", name)
    return Key(name, default, places, places[int(top)], **options)


KEYS = (
    *plain_keys({"vocab_size": None}, must_state=True),
    *plain_keys(QWEN3_KEYS | {"head_dim": QWEN3_HEAD_DIM}),
    _inner("block_size", 16, top=True),
    _inner("num_target_layers", None, top=True, must_state=True),
    _inner("mask_token_id"),
    _inner("target_layer_ids", None),
    _inner("input_embedding_scale", 1.0, optional=True),
    _inner("output_multiplier", 1.0, optional=True),
    _inner("final_logit_softcapping", None, optional=True),
    # Our own addition; z-lab's code always looks rows up in the weight and ignores the key.
    _inner("raw_input_embeddings", False, optional=True),
    *(_inner(name, None, optional=True) for name in DFLASH2_FIELDS),
)


def _both(*names: str) -> tuple[str, ...]:
    return tuple(place for name in names for place in (f"{SECTION}.{name}", name))


# Domino, DSpark, sinks and others; each with the values under which the draft is a plain DFlash one.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        _both(
            "add_swa_attention_sink_bias",
            "attention_sink_bias",
            "causal_head",
            "sample_from_anchor",
            "shift_label",
            "use_confidence_head",
        ),
        (False,),
    ),
    **dict.fromkeys(_both("attention_value_scale", "logit_scale"), (1.0,)),
    **dict.fromkeys(_both("markov_rank"), (0,)),
    **dict.fromkeys(_both("is_neox_style"), (True,)),
    f"{SECTION}.attention_mode": ("gqa", "mha"),
    f"{SECTION}.projector_type": ("dflash",),
}


def _matches(config: Mapping[str, Any]) -> bool:
    return isinstance(config.get(SECTION), Mapping)


def _read_rest(reader: ConfigReader) -> dict[str, Any]:
    """Reads RoPE and, per layer, the window and the causality: five keys that qualify each other."""
    num_layers = reader.take_num_layers("num_hidden_layers")
    window = reader.take(f"{SECTION}.swa_window_size", "sliding_window", default=None)
    layer_types = reader.take_layer_types(num_layers, window)
    is_causal = reader.take("is_causal", f"{SECTION}.is_causal", f"{SECTION}.causal", default=None)
    if reader.take(f"{SECTION}.use_swa", "use_swa", default=False) and "sliding_attention" not in layer_types:
        layer_types = ["sliding_attention"] * num_layers
        is_causal = bool(is_causal)
    vocab_size = reader.take("vocab_size", default=None)
    draft_vocab_size = reader.take(*_both("draft_vocab_size"), default=None)
    if draft_vocab_size not in (None, vocab_size):
        raise ValueError(
            f"expected a draft over the whole vocabulary of {shown(vocab_size)}, got draft_vocab_size "
            f"{shown(draft_vocab_size)}; reduced vocabularies are not supported"
        )
    return {
        "num_hidden_layers": num_layers,
        "layer_types": layer_types,
        "sliding_window": window,
        "target_hidden_size": reader.take(*_both("target_hidden_size"), default=None),
        "is_causal": is_causal,
        "rope_parameters": reader.take_rope(QWEN3_THETA),
    }


def _write_rest(config: DFlashConfig) -> dict[str, Any]:
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta")
    slides = config.sliding_window is not None
    is_uniform = len(set(config.is_causal)) == 1  # else the layers follow z-lab's rule: sliding means causal
    return {
        # The readers choose their class by it.
        "architectures": ["DFlash2DraftModel" if config.is_dflash2 else "DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": config.num_hidden_layers,
        "layer_types": config.layer_types,
        "use_sliding_window": slides,
        "sliding_window": config.sliding_window,
        "max_window_layers": config.num_hidden_layers,
        **({"is_causal": config.is_causal[0]} if is_uniform else {}),
        "rope_theta": theta,
        "rope_scaling": None if rope == {"rope_type": "default"} else rope,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def _refuse(config: DFlashConfig) -> Iterator[str]:
    missing = [name for name in DFLASH2_FIELDS if getattr(config, name) is None]
    if config.is_dflash2 and missing:
        yield f"{' = '.join(missing)} = None (its readers know DFlash 2 only with convolution and selector)"


ZLAB = CheckpointFormat(
    name="zlab",
    matches=_matches,
    weights=BODY_WEIGHTS | BODY_BIASES | DFLASH2_WEIGHTS | FEATURE_WEIGHTS,
    keys=KEYS,
    section=SECTION,
    read_rest=_read_rest,
    write_rest=_write_rest,
    refuse=_refuse,
    neutral=NEUTRAL,
    ignored=COMMON_IGNORED | {f"{SECTION}.mask_token", "mask_token"},
    has_vocabulary=False,
)
