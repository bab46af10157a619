"""The layout of z-lab's checkpoints, which SpecForge and NVIDIA Model-Optimizer export too.

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
    DFLASH2_FIELDS,
    DFLASH2_WEIGHTS,
    FOREIGN_FIELDS,
    OWN_FIELDS,
    REQUIRED,
    CheckpointFormat,
    ConfigReader,
    Key,
    read_rope,
    refuse_fields,
)
from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.errors import shown

SECTION = "dflash_config"
DEFAULT_THETA = 10000.0  # Qwen3Config's, like the other defaults below


def _inner(
    name: str, default: Any = REQUIRED, *, top: bool = False, optional: bool = False, must_state: bool = False
) -> Key:
    """A key that stands in the section or else at the top; `top` says which of the two is written."""
    places = (f"{SECTION}.{name}", name)
    return Key(name, places, default, places[int(top)], optional, must_state)


KEYS = (
    Key("vocab_size", ("vocab_size",), None, must_state=True),
    Key("hidden_size", ("hidden_size",)),
    Key("intermediate_size", ("intermediate_size",)),
    Key("num_attention_heads", ("num_attention_heads",)),
    Key("num_key_value_heads", ("num_key_value_heads",)),
    Key("head_dim", ("head_dim",), 128),
    Key("hidden_act", ("hidden_act",), "silu"),
    Key("rms_norm_eps", ("rms_norm_eps",), 1e-6),
    Key("max_position_embeddings", ("max_position_embeddings",), 32768),
    Key("attention_bias", ("attention_bias",), False),
    Key("attention_dropout", ("attention_dropout",), 0.0),
    Key("initializer_range", ("initializer_range",), 0.02),
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
    num_layers: int = reader.take_num_layers("num_hidden_layers")
    layer_types: list[str] | None = reader.take("layer_types", default=None, kind=list)
    window = reader.take(f"{SECTION}.swa_window_size", "sliding_window", default=None)
    is_causal = reader.take("is_causal", f"{SECTION}.is_causal", f"{SECTION}.causal", default=None)
    use_window = reader.take("use_sliding_window", default=None)
    use_swa = reader.take(f"{SECTION}.use_swa", "use_swa", default=False)
    first_sliding = reader.take("max_window_layers", default=28, kind=int)
    if layer_types is None:
        sliding = [bool(use_window) and window is not None and index >= first_sliding for index in range(num_layers)]
        layer_types = ["sliding_attention" if slides else "full_attention" for slides in sliding]
    elif use_window is False and "sliding_attention" in layer_types:
        raise ValueError(
            f"expected use_sliding_window true or absent beside layer_types {shown(layer_types)}, got false; make "
            "the checkpoint's config.json agree with itself"
        )
    if use_swa and "sliding_attention" not in layer_types:
        layer_types = ["sliding_attention"] * num_layers
        is_causal = bool(is_causal)
    vocab_size = reader.take("vocab_size", default=None)
    draft_vocab_size = reader.take(*_both("draft_vocab_size"), default=None)
    if draft_vocab_size not in (None, vocab_size):
        raise ValueError(
            f"expected a draft over the whole vocabulary of {shown(vocab_size)}, got draft_vocab_size "
            f"{shown(draft_vocab_size)}; "
            "reduced vocabularies are not supported"
        )
    return {
        "num_hidden_layers": num_layers,
        "layer_types": layer_types,
        "sliding_window": window,
        "target_hidden_size": reader.take(*_both("target_hidden_size"), default=None),
        "is_causal": is_causal,
        "rope_parameters": read_rope(reader, DEFAULT_THETA),
    }


def _uniform_causality(config: DFlashConfig) -> bool | None:
    """Returns the one value of `is_causal`, or `None` where the layers follow z-lab's rule (sliding means causal)."""
    assert isinstance(config.is_causal, list)
    return config.is_causal[0] if len(set(config.is_causal)) == 1 else None


def _write_rest(config: DFlashConfig) -> dict[str, Any]:
    assert config.layer_types is not None
    assert config.rope_parameters is not None
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta")
    slides = "sliding_attention" in config.layer_types
    causal = _uniform_causality(config)
    return {
        # The readers choose their class by it.
        "architectures": ["DFlash2DraftModel" if config.is_dflash2 else "DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": config.num_hidden_layers,
        "layer_types": config.layer_types,
        "use_sliding_window": slides,
        "sliding_window": config.sliding_window if slides else None,
        "max_window_layers": config.num_hidden_layers,
        **({} if causal is None else {"is_causal": causal}),
        "rope_theta": theta,
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def _refuse(config: DFlashConfig) -> Iterator[str]:
    yield from refuse_fields(config, *FOREIGN_FIELDS, *OWN_FIELDS)
    assert config.layer_types is not None
    by_rule = [kind == "sliding_attention" for kind in config.layer_types]
    if _uniform_causality(config) is None and config.is_causal != by_rule:
        yield f"is_causal = {config.is_causal} (only all, none, or exactly the sliding layers)"
    if config.target_hidden_size != config.hidden_size:
        yield f"target_hidden_size = {config.target_hidden_size} (its readers take hidden_size)"
    missing = [name for name in DFLASH2_FIELDS if getattr(config, name) is None]
    if config.is_dflash2 and missing:
        yield f"{' = '.join(missing)} = None (its readers know DFlash 2 only with convolution and selector)"


ZLAB = CheckpointFormat(
    name="zlab",
    matches=_matches,
    weights=BODY_WEIGHTS
    | BODY_BIASES
    | DFLASH2_WEIGHTS
    | {"fc.weight": "fc.weight", "hidden_norm.weight": "hidden_norm.weight"},
    keys=KEYS,
    section=SECTION,
    read_rest=_read_rest,
    write_rest=_write_rest,
    refuse=_refuse,
    neutral=NEUTRAL,
    ignored=COMMON_IGNORED | {f"{SECTION}.mask_token", "mask_token"},
    has_vocabulary=False,
)
