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
    COMMON_IGNORED,
    QWEN3_KEYS,
    QWEN3_THETA,
    REQUIRED,
    CheckpointFormat,
    ConfigReader,
    Key,
    plain_keys,
    qwen3_layers,
)
from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.errors import shown

SECTION = "dflash_config"
DFLASH2_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def _both(*names: str) -> tuple[str, ...]:
    return tuple(place for name in names for place in (f"{SECTION}.{name}", name))


KEYS = (
    *plain_keys({"vocab_size": None, **QWEN3_KEYS}),
    Key("block_size", 16, _both("block_size"), written=1),
    Key("num_target_layers", None, _both("num_target_layers"), written=1),
    Key("mask_token_id", REQUIRED, _both("mask_token_id")),
    Key("target_layer_ids", None, _both("target_layer_ids")),
    Key("input_embedding_scale", 1.0, _both("input_embedding_scale"), optional=True),
    Key("output_multiplier", 1.0, _both("output_multiplier"), optional=True),
    Key("final_logit_softcapping", None, _both("final_logit_softcapping"), optional=True),
    # Our own addition; z-lab's code always looks rows up in the weight and ignores the key.
    Key("raw_input_embeddings", False, _both("raw_input_embeddings"), optional=True),
    *(Key(name, None, _both(name), optional=True) for name in DFLASH2_FIELDS),
)

# Domino, DSpark, sinks and others; each with the values under which the draft is a plain DFlash one.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        _both("add_swa_attention_sink_bias", "attention_sink_bias", "causal_head"), (False,)
    ),
    **dict.fromkeys(_both("sample_from_anchor", "shift_label", "use_confidence_head"), (False,)),
    **dict.fromkeys(_both("attention_value_scale", "logit_scale"), (1.0,)),
    **dict.fromkeys(_both("markov_rank"), (0,)),
    **dict.fromkeys(_both("is_neox_style"), (True,)),
    f"{SECTION}.attention_mode": ("gqa", "mha"),
    f"{SECTION}.projector_type": ("dflash",),
}


def _read_rest(reader: ConfigReader) -> dict[str, Any]:
    """Reads RoPE and, per layer, the window and the causality: five keys that qualify each other."""
    layers = reader.take_layers(f"{SECTION}.swa_window_size", "sliding_window")
    is_causal = reader.take("is_causal", f"{SECTION}.is_causal", f"{SECTION}.causal", default=None)
    if (
        reader.take(f"{SECTION}.use_swa", "use_swa", default=False)
        and "sliding_attention" not in layers["layer_types"]
    ):
        layers["layer_types"] = ["sliding_attention"] * layers["num_hidden_layers"]
        is_causal = bool(is_causal)
    vocab_size = reader.take("vocab_size", default=None)
    draft_vocab_size = reader.take(*_both("draft_vocab_size"), default=None)
    if draft_vocab_size not in (None, vocab_size):
        raise ValueError(
            f"expected a draft over the whole vocabulary of {shown(vocab_size)}, got draft_vocab_size "
            f"{shown(draft_vocab_size)}; reduced vocabularies are not supported"
        )
    return {
        **layers,
        "target_hidden_size": reader.take(*_both("target_hidden_size"), default=None),
        "is_causal": is_causal,
        "rope_parameters": reader.take_rope(QWEN3_THETA),
    }


def _write_rest(config: DFlashConfig) -> dict[str, Any]:
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta")
    written: dict[str, Any] = {
        # The readers choose their class by it.
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **qwen3_layers(config),
        "rope_theta": theta,
        "rope_scaling": rope,
    }
    if config.is_dflash2:
        written["architectures"] = ["DFlash2DraftModel"]
    # Without the key the layers follow z-lab's rule: sliding means causal.
    if len(set(config.is_causal)) == 1:
        written["is_causal"] = config.is_causal[0]
    if rope == {"rope_type": "default"}:
        written["rope_scaling"] = None
    return written


def _refuse(config: DFlashConfig) -> Iterator[str]:
    missing = [name for name in DFLASH2_FIELDS if getattr(config, name) is None]
    if config.is_dflash2 and missing:
        yield f"{' = '.join(missing)} = None (its readers know DFlash 2 only with convolution and selector)"


ZLAB = CheckpointFormat(
    name="zlab",
    matches=lambda config: isinstance(config.get(SECTION), Mapping),
    keys=KEYS,
    needs=("vocab_size", "num_target_layers"),
    section=SECTION,
    read_rest=_read_rest,
    write_rest=_write_rest,
    refuse=_refuse,
    neutral=NEUTRAL,
    ignored=COMMON_IGNORED | {f"{SECTION}.mask_token", "mask_token"},
    has_vocabulary=False,
)
