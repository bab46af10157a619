"""This module defines the format of z-lab's checkpoints, which SpecForge and NVIDIA Model-Optimizer export too.

The config is a Qwen3 config with a section `dflash_config`. The weights are the bare draft without embedding and head.
Layer ids are 0-based numbers of the layers whose outputs are tapped, `block_size` counts the anchor, and a window of
`w` means `q - k < w`. A config with a `markov_rank` belongs to a DSpark draft of SpecForge or Model-Optimizer. The
anchor's slot of such a draft proposes too, unless a key says otherwise. Sources: z-lab `dflash/model.py` 0.1.0, both
classes; Model-Optimizer's `hf_spec_export.py::DFlashExporter` for `use_swa` and `causal`; SGLang
`dspark_components/dspark_config.py` for DSpark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_hf.checkpoints.mapping import (
    COMMON_IGNORED,
    CONFIDENCE_KEYS,
    CONFIDENCE_WEIGHTS,
    MARKOV_WEIGHTS,
    QWEN3_KEYS,
    QWEN3_THETA,
    REQUIRED,
    CheckpointFormat,
    ConfigReader,
    Key,
    Neutral,
    agreed,
    beside,
    plain_keys,
    qwen3_layers,
)
from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.errors import require, shown

SECTION = "dflash_config"
DFLASH2_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def _both(*names: str) -> tuple[str, ...]:
    return tuple(place for name in names for place in (f"{SECTION}.{name}", name))


KEYS = (
    *plain_keys({"vocab_size": None, **QWEN3_KEYS}),
    Key("block_size", 16, _both("block_size"), written=1),
    Key("num_target_layers", None, _both("num_target_layers"), written=1),
    # The last name is vLLM's name for this token in all drafts that propose in parallel.
    Key("mask_token_id", REQUIRED, (*_both("mask_token_id"), "pard_token")),
    Key("target_layer_ids", None, _both("target_layer_ids")),
    Key("input_embedding_scale", 1.0, _both("input_embedding_scale"), optional=True),
    Key("output_multiplier", 1.0, _both("output_multiplier"), optional=True),
    Key("final_logit_softcapping", None, _both("final_logit_softcapping"), optional=True),
    # This key is our own addition. z-lab's code always looks rows up in the weight and ignores the key.
    Key("raw_input_embeddings", False, _both("raw_input_embeddings"), optional=True),
    *(Key(name, None, _both(name), optional=True) for name in DFLASH2_FIELDS),
    # For MiMo's and NVIDIA's drafts. The second name is that of MiMo's targets.
    Key(
        "attention_sink_bias",
        False,
        _both("attention_sink_bias", "add_swa_attention_sink_bias"),
        optional=True,
    ),
    Key("attention_value_scale", 1.0, _both("attention_value_scale"), optional=True),
)

_SCALE = "vLLM multiplies the draft's logits by it, for which z-lab's key is output_multiplier"
_PREFIX = "SpecForge reads it, where Domino's head corrects the logits behind that many slots"
_PAIRS = "vLLM and SGLang then turn channels that stand side by side"
_LATENT = "SpecForge reads it, for latent attention (MLA) in the draft"
NEUTRAL: dict[str, Neutral] = {
    **dict.fromkeys(_both("logit_scale"), Neutral((1.0,), _SCALE)),
    **dict.fromkeys(_both("pure_draft_prefix_len"), Neutral((0,), _PREFIX)),
    "mlp_bias": Neutral((False,), "biases in the MLP, which none of the format's readers has"),
    **dict.fromkeys(_both("is_neox_style"), Neutral((True,), _PAIRS)),
    **dict.fromkeys(_both("attention_mode"), Neutral(("gqa", "mha"), _LATENT)),
}


# Keys of training, which do not change what a draft computes.
TRAINING_KEYS = frozenset(_both("num_anchors", "loss_decay_gamma"))
# Each key says whether attention inside the block is causal, for all layers. The last ones are JetSpec's and NVIDIA's.
CAUSALITY = (
    "is_causal",
    *(f"{SECTION}.{name}" for name in ("is_causal", "causal", "causal_head")),
    "causal_head",
    "dflash_query_causal",
)


def _read_rest(reader: ConfigReader) -> dict[str, Any]:
    """Reads RoPE, and the window and causality of each layer. The keys for the latter two depend on each other."""
    _refuse_adapter(reader)
    taps = reader.take(*_both("target_layer_ids"), default=None)
    reader.take_layers_above(taps)
    layers = reader.take_layers(f"{SECTION}.swa_window_size", "sliding_window")
    is_causal = _take_causality(reader)
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
            f"{shown(draft_vocab_size)}; vLLM reads reduced vocabularies in this format, and here the format "
            "'speculators' has them"
        )
    head_dim = reader.take("head_dim", default=QWEN3_KEYS["head_dim"])
    what = f"v_head_dim absent or equal to head_dim = {shown(head_dim)}"
    value_dim = reader.take(*_both("v_head_dim"), default=head_dim)
    action = "values of another size than keys are not supported here"
    require(value_dim == head_dim, what, value_dim, action)
    return {
        **layers,
        **_read_dspark(reader),
        "target_hidden_size": reader.take(*_both("target_hidden_size"), default=None),
        "is_causal": is_causal,
        "rope_parameters": _take_rope(reader),
    }


def _take_rope(reader: ConfigReader) -> dict[str, Any]:
    """Takes the RoPE. It may turn a part of each head, but must turn all tokens in the same way."""
    rope = reader.take_rope(QWEN3_THETA, takes_parts=True)
    theta = rope["rope_theta"]
    base = reader.take(*_both("backbone_rotary_base"), default=theta)
    what = f"backbone_rotary_base absent or equal to rope_theta = {shown(theta)}"
    action = (
        "projects differ in what MiMo's key means, and vLLM does without it: take it out of the config.json to turn "
        "all keys by rope_theta"
    )
    require(base == theta, what, base, action)
    return rope


def _refuse_adapter(reader: ConfigReader) -> None:
    """Raises `ValueError` for a draft with JetSpec's linear map between the target's width and the draft's."""
    adapter = sorted(name for name in reader.weights if name.startswith("hidden_dim_adapter."))
    what = "a draft that takes the target's states as they are"
    action = "this adapter of JetSpec's is not supported; take a draft trained for the target"
    require(not adapter, what, adapter, action)


def _read_dspark(reader: ConfigReader) -> dict[str, Any]:
    """Reads the rank of a Markov head, and whether the anchor's slot proposes. The latter needs such a head."""
    ranks = (*_both("markov_rank"), "dspark_markov_rank")
    kinds = (*_both("markov_head_type"), "dspark_markov_head_type")
    rank = reader.take_markov_rank(*ranks, kinds=kinds)
    names = ("dflash",)
    if rank is not None:
        names = ("dflash", "dspark")
    projector = reader.take(*_both("projector_type"), default="dflash")
    what = f"projector_type in {names} in the checkpoint's config.json"
    action = "SpecForge has heads of other kinds, which are not supported here; 'dspark' needs a markov_rank"
    require(projector in names, what, projector, action)
    proposes = reader.stated(*_both("sample_from_anchor", "shift_label"))
    # This key has the opposite meaning.
    proposes |= {
        f"not {place}": not value
        for place, value in reader.stated(*_both("dspark_bonus_anchor")).items()
    }
    is_first = rank is not None
    if proposes:
        is_first = agreed(proposes)
    is_known = rank is not None or not is_first
    if not is_known:
        raise ValueError(
            f"expected a markov_rank where the anchor's slot proposes, got {beside(proposes)} without one; the "
            "readers of this format let it propose in DSpark's drafts alone"
        )
    return {"markov_rank": rank, "sample_from_anchor": is_first}


def _take_causality(reader: ConfigReader) -> bool | None:
    """Takes whether attention inside the block is causal; `None` if no key says it."""
    stated = reader.stated(*CAUSALITY)
    if True in stated.values() and False in stated.values():
        raise ValueError(
            f"expected keys that say the same of causality inside the block, got {beside(stated)}; set all of them to "
            "what the draft was trained with: in NeMo's JetSpec recipe that is dflash_config.causal = True, and "
            "is_causal = False is left over from its base recipe"
        )
    return reader.take(*CAUSALITY, default=None, kind=bool)


def _write_rest(config: DFlashConfig) -> dict[str, Any]:
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta")
    part = rope.pop("partial_rotary_factor", None)
    written: dict[str, Any] = {
        # The readers choose their class by this key.
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **qwen3_layers(config),
        "rope_theta": theta,
        "rope_scaling": rope,
    }
    if part is not None:
        written["partial_rotary_factor"] = part
    if config.is_dflash2:
        written["architectures"] = ["DFlash2DraftModel"]
    if config.is_dspark:
        written |= _written_dspark(config)
    # Without the key, the layers follow z-lab's rule: sliding layers are causal.
    if len(set(config.is_causal)) == 1:
        written["is_causal"] = config.is_causal[0]
    if rope == {"rope_type": "default"}:
        written["rope_scaling"] = None
    return written


def _written_dspark(config: DFlashConfig) -> dict[str, Any]:
    """Returns the keys of a Markov head. SGLang and vLLM read those outside the section, TensorRT-LLM those inside."""
    head = {"markov_rank": config.markov_rank, "markov_head_type": "vanilla"}
    return {
        "architectures": ["Qwen3DSparkModel"],
        **head,
        "enable_confidence_head": False,
        "sample_from_anchor": config.sample_from_anchor,
        "dspark_bonus_anchor": not config.sample_from_anchor,
        SECTION: {**head, "projector_type": "dspark", "shift_label": config.sample_from_anchor},
    }


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
    takes_partial_ropes=True,
    read_rest=_read_rest,
    write_rest=_write_rest,
    refuse=_refuse,
    neutral=NEUTRAL,
    ignored=COMMON_IGNORED
    | TRAINING_KEYS
    | {place for name in CONFIDENCE_KEYS for place in _both(name)}
    | {f"{SECTION}.mask_token", "mask_token", "pretraining_tp"},
    renamed=MARKOV_WEIGHTS,
    dropped=CONFIDENCE_WEIGHTS,
    has_vocabulary=False,
)
